"""The microbenchmarks of `benchmarks/test_kernels.py`: what runs, in which groups, and that peers do the same job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cactus_kernels import Sampling, row_stats

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import peers  # noqa: E402 (found on the path above)


def benchmarks(*options):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "benchmarks",
        "--benchmark-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
    ]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }  # xdist turns timing off
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


@pytest.mark.slow  # and .ci/run makes them all
def test_the_microbenchmarks_run_with_peers_as_groups(tmp_path):
    report = tmp_path / "report.json"
    done = benchmarks("--B", "2", "--m", "3", "--V", "1500", "--dtype", "bf16", f"--benchmark-json={report}")
    assert done.returncode == 0, done.stdout + done.stderr
    groups = {}
    for line in json.loads(report.read_text())["benchmarks"]:
        assert line["stats"]["median"] > 0
        groups.setdefault(line["group"].rsplit(", ", 1)[0], []).append(line["params"]["way"])
    size = "V=1,500, bf16"
    expected = {f"draw, B=2, {size}": {"draw", "torch.multinomial", "exponential race"}}
    expected[f"from probabilities, B=2, m=3, {size}"] = {"verify", "dense torch"}
    for rows in ("from logits", "truncated logits"):
        expected[f"{rows}, B=2, m=3, {size}"] = {"verify_from_logits", "dense torch", "transformers"}
    assert groups.keys() == expected.keys()
    assert all(set(groups[name]) >= ways for name, ways in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), [("--dtype", "bf16,fp8"), ("--B", "1,0")])
def test_a_size_that_makes_no_sense_is_refused(option, value):
    done = benchmarks(option, value)
    assert done.returncode == 4 and f"got '{value}'" in done.stderr


@pytest.mark.parametrize(
    "sampling", [Sampling(0.6, 20, 0.95), Sampling(1.0, 0, 0.5), Sampling(2.0, 7, 1.0)], ids=["all", "top-p", "top-k"]
)
def test_peers_keep_the_tokens_that_we_keep(sampling):
    logits = 3 * torch.randn(2, 5, 1025, generator=torch.Generator().manual_seed(0))
    stats = row_stats(logits.flatten(0, 1), sampling=sampling)
    kept = (peers.truncate(logits, sampling) > -torch.inf).flatten(0, 1)
    assert torch.equal(kept, logits.flatten(0, 1) >= stats.cutoff[:, None]) and 1 < kept.sum(1).float().mean() < 1025


def test_the_exponential_race_draws_by_weight():
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3]).expand(20_000, 4)
    torch.manual_seed(0)
    shares = peers.exponential_race(probs).bincount(minlength=4) / len(probs)
    assert shares.tolist() == pytest.approx([0.5, 0.0, 0.2, 0.3], abs=0.02) and shares[1] == 0
