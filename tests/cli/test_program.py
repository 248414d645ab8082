"""The command from its arguments to its exit code: what it loads, and one clear line for everything that is wrong."""

import os
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import torch

from cactus_kernels.cli import main
from cactus_kernels.cli.commands import COMMANDS
from cactus_kernels.rules import RULES
from cactus_kernels.tools import runs
from cactus_kernels.tools.pair import embedded_pair

SHORT = ["--max-new-tokens", "24", "--seed", "1"]
RUN = "from cactus_kernels.cli import main; main()"
STOPS_AT = """
import sys
class Stop:
    def find_spec(self, name, *_):
        if name == "{module}":
            print("loading", flush=True)
            sys.stdin.read(1)
sys.meta_path.insert(0, Stop())
"""


def test_help_and_version(command):
    code, out, _ = command("--help")
    assert code == 0 and all(name in out for name in ("generate", "check", "info"))
    assert command()[1] == out
    code, out, _ = command("generate", "--help")
    assert code == 0 and all(option in out for option in ("--model", "--delta", "--compare", "--greedy", "--json"))
    words = " ".join(re.sub("[│╭╰─╮╯]", " ", out).split())
    for name in RULES.keys() - {"block", "coupled", "sps"}:
        assert name in words.partition("--strength")[2].partition("--delta")[0]
    assert command("--version") == (0, "0.1.0\n", "")


def imported_by(*arguments):
    """Every module that the command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", RUN, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_what_the_command_says_of_itself_needs_no_torch(argument):
    imported = imported_by(argument)
    assert "typer" in imported and not imported & {"torch", "numpy", "triton", "transformers", "matplotlib"}


def test_info_loads_no_transformers():
    imported = imported_by("info", "--json")
    assert "torch" in imported and "transformers" not in imported


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_its_line_in_the_help_says(command, name):
    code, out, _ = command(name, "--help")
    words = " ".join(re.sub("[│╭╰─╮╯]", " ", out).split())
    assert code == 0 and f"Usage: cactus-kernels {name} " in words and COMMANDS[name] in words


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
@pytest.mark.parametrize("module", ["typer", "torch._C", "transformers"])
def test_an_interrupt_while_modules_load_ends_quietly(module):
    """The process tells when it comes to the module, and waits there for the signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS_AT.format(module=module) + RUN, "generate"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\n")


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


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_closed_pipe_is_no_error(argument):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", RUN, argument], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_text_for_a_pipe_that_closes_is_no_error():
    command = f'"{sys.executable}" -c "{RUN}" generate --max-new-tokens 100 | head -c 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "Q" and not done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], pytest.param(["info"], marks=pytest.mark.slow)], ids=" ".join
)
def test_a_full_device_ends_the_command_in_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", RUN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"cactus-kernels: .*No space left on device\n", done.stderr), done.stderr
