"""`cactus-kernels check`: what it checks, and that it sees what is wrong."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from cactus_kernels import philox
from cactus_kernels.testing import selfcheck


def test_check_on_a_cpu_says_what_it_cannot_check(command, monkeypatch):
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr("cactus_kernels.kernels.race.INTERPRETED", False)
    code, out, err = command("check", "--minutes", "0.001", "--seed", "5")
    assert (code, err) == (0, "") and out.splitlines()[-1] == "ok"
    assert "fails less than once in a million checks" in out
    assert "Checking torch on cpu for 0.001 min, seed 5." in out and "TRITON_INTERPRET=1" in out
    for size in selfcheck.LAW_SIZES:
        for name in ("sps", "cactus 0.5", "draw"):
            assert f"law of {name}, V = {size} " in out


def test_check_finds_a_wrong_law(command, monkeypatch):
    """The deliberate error: acceptance uniforms that end at 1/2."""
    uniform = philox.uniform
    monkeypatch.setattr(philox, "uniform", lambda *words: 0.5 * uniform(*words))
    code, out, _ = command("check", "--minutes", "0.001", "--backend", "torch", "--seed", "5")
    assert code == 1 and "ok" not in out.split()
    assert "failed: law of sps, V = 7: " in out and "failed: law of cactus 0.5, V = 7: " in out
    assert out.count("again with --seed 5") >= 2 and "failed: law of draw" not in out


def test_check_finds_other_bits_and_names_the_seed_of_the_case(command, monkeypatch):
    pytest.importorskip("triton")
    seen = []
    monkeypatch.setattr("cactus_kernels.kernels.race.INTERPRETED", True)

    def difference(seed, *_):
        seen.append(seed)
        return "token_ids differ" if seed == 7 else None

    monkeypatch.setattr(selfcheck, "_difference", difference)
    code, out, _ = command("check", "--minutes", "0.01", "--seed", "5")
    assert code == 1 and seen == [5, 6, 7]
    assert "Checking triton on cpu" in out and "TRITON_INTERPRET" not in out
    assert out.splitlines()[-1] == "failed: parity: token_ids differ; again with --seed 7"


def test_check_in_the_interpreter():
    pytest.importorskip("triton")
    arguments = ["check", "--minutes", "0.01", "--device", "cpu", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-c", "from cactus_kernels.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "triton on cpu against torch on cpu" in done.stdout and "every bit equal" in done.stdout
