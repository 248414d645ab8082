"""`cactus-kernels info`."""

import json

import torch

from cactus_kernels.cli.commands import info as info_command


def test_info(command):
    code, out, _ = command("info")
    assert code == 0
    for name in ("cactus_kernels", "python", "torch", "triton", "transformers", "cpu"):
        assert name in out
    code, out, _ = command("info", "--json")
    found = json.loads(out)
    assert code == 0 and found["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["backend"] == "torch"


def test_info_in_a_pipe_is_neither_padded_nor_wrapped(command, monkeypatch):
    why = "a reason of many words " * 8
    found = {"torch": "2.7.1", "devices": [{"device": "cpu", "name": "x86", "backend": "torch", "why": why + "."}]}
    monkeypatch.setattr(info_command, "describe_environment", lambda: found)
    _, out, _ = command("info")
    assert out.splitlines() == ["torch  2.7.1", "cpu    x86", f"       torch: {why}."]
