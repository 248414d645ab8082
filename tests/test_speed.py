"""Ratios that the package promises on a CPU, each measured in turn in one run. Absolute times are not tested."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    """Threads make small operations slow wherever another process is running."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_verification_is_ten_times_as_fast_as_the_dense_way():
    import bench_verify
    import measure

    calls = bench_verify.ways(bench_verify.Case("probabilities", 8, 4, 151_936))
    seconds = measure.medians({way: calls[way] for way in ("verify", "dense torch")}, rounds=9)
    ratio = seconds["dense torch"] / seconds["verify"]
    print(f"dense / verify = {ratio:.1f}")
    assert ratio > 10


def test_a_sampled_round_takes_less_outside_the_models_than_transformers_does():
    import bench_generate

    milliseconds = bench_generate.medians(rounds=3)
    ratio = milliseconds["cactus"] / milliseconds["transformers"]
    print(f"cactus / transformers = {ratio:.2f}")
    assert ratio < 0.4  # a quarter where the machine is quiet; contention hits many small operations hardest
