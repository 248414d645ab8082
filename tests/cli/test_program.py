"""The command from its arguments to its exit code: what it loads, and one clear line for everything that is wrong."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import torch

from cactus_kernels.cli import main
from cactus_kernels.rules import RULES
from cactus_kernels.tools import runs
from cactus_kernels.tools.pair import embedded_pair

SHORT = ["--max-new-tokens", "24", "--seed", "1"]


def test_help_and_version(command):
    code, out, _ = command("--help")
    assert code == 0 and all(name in out for name in ("generate", "check", "info"))
    assert command()[1] == out
    code, out, _ = command("generate", "--help")
    assert code == 0 and all(option in out for option in ("--model", "--delta", "--compare", "--greedy", "--json"))
    words = " ".join(re.sub("[│╭╰─╮╯]", " ", out).split())
    for name in RULES.keys() - {"sps", "coupled"}:
        assert name in words.partition("--strength")[2].partition("--delta")[0]
    assert command("--version") == (0, "0.1.0\n", "")


def test_the_installed_command_runs_and_help_loads_no_transformers():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from cactus_kernels.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Commands" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported and not imported & {"transformers", "triton"}


@pytest.mark.parametrize(
    "arguments", [["check", "--minutes", "0"], ["check", "--minutes", "nan"], ["frobnicate"], ["info", "x"]]
)
def test_bad_commands_end_in_one_line(command, arguments):
    code, out, err = command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert arguments[0] in err or "minutes" in err or "argument" in err


def test_bad_probabilities_while_running_end_in_one_line(command, monkeypatch):
    def broken(**kwargs):
        model, *others = embedded_pair(**kwargs)
        model.model.norm.weight.data.fill_(float("nan"))
        return model, *others

    monkeypatch.setattr("cactus_kernels.tools.pair.embedded_pair", broken)
    code, _, err = command("generate", *SHORT, "--json")
    assert code == 1 and err.count("\n") == 1 and "bad values in requests [0]" in err


def test_a_full_device_ends_in_one_line(command, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(runs, "run_speculative", full)
    code, _, err = command("generate", *SHORT, "--json")
    assert (code, err) == (1, "cactus-kernels: CUDA out of memory. Tried to allocate\n")


def test_bugs_are_not_swallowed(monkeypatch):
    monkeypatch.setattr(runs, "run_speculative", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        main(["generate", *SHORT, "--json"])


def test_an_interrupt_ends_quietly(command, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_speculative", interrupt)
    assert command("generate", *SHORT, "--json") == (130, "", "\n")


def test_a_closed_pipe_is_no_error():
    code = "from cactus_kernels.cli import main; main(['generate', '--max-new-tokens', '100'])"
    done = subprocess.run(f'"{sys.executable}" -c "{code}" | head -c 1', shell=True, capture_output=True, text=True)
    assert done.stdout == "Q" and "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]], ids=" ".join)
def test_a_full_device_ends_the_command_in_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from cactus_kernels.cli import main; main()", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"cactus-kernels: .*No space left on device\n", done.stderr), done.stderr
