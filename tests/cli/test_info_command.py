"""`cactus-kernels info`."""

import json

import torch


def test_info(command):
    code, out, _ = command("info")
    assert code == 0
    for name in ("cactus_kernels", "python", "torch", "triton", "transformers", "cpu"):
        assert name in out
    code, out, _ = command("info", "--json")
    found = json.loads(out)
    assert code == 0 and found["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["backend"] == "torch"
