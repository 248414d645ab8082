"""Microbenchmarks of the kernels by pytest-benchmark: ours and every installed peer (`peers.py`), one group for each size.

    pytest benchmarks --benchmark-only                                              # under a minute on a CPU
    pytest benchmarks --benchmark-only --B 1,64 --m 1,8 --V 128256 --dtype bf16,fp32
    pytest benchmarks --benchmark-only -k draw --benchmark-storage=/tmp/times --benchmark-save=before
    pytest benchmarks --benchmark-only -k draw --benchmark-storage=/tmp/times --benchmark-compare      # in another tree

They run on a GPU where there is one; a call is then timed until the device has finished. `bench_verify.py` measures the
device's own time, with inputs out of its cache, and prints the distance from the speed of a copy.
"""

from functools import lru_cache

import pytest
import torch
from bench_verify import DTYPES, OURS, Case, batch, ways
from peers import LOGITS, PEERS, PROBS, exponential_race

from cactus_kernels import Sampling, draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLING = Sampling(temperature=0.6, top_k=20, top_p=0.95)
PEERS_OF = {rows: [p.name for p in PEERS if p.is_installed and rows in (p.target, LOGITS)] for rows in (PROBS, LOGITS)}
DRAWS = {
    "draw": lambda probs: draw(probs, seed=0, offset=0),
    "torch.multinomial": lambda probs: torch.multinomial(probs, 1),
    "exponential race": exponential_race,
}
WAYS = {
    "test_verify": [OURS[PROBS], *PEERS_OF[PROBS]],
    "test_verify_from_logits": [OURS[LOGITS], *PEERS_OF[LOGITS]],
    "test_truncated": [OURS[LOGITS], *PEERS_OF[LOGITS]],
    "test_draw": list(DRAWS),
}
# Short: a fifth of a second for each benchmark, or five calls.
pytestmark = pytest.mark.benchmark(max_time=0.2, min_rounds=5, warmup=True, warmup_iterations=1)


@lru_cache(maxsize=1)  # the ways of a size follow one another
def calls(rows, B, m, V, dtype, sampling=None):
    return ways(Case(rows, B, m, V), DTYPES[dtype], DEVICE, sampling=sampling)


@lru_cache(maxsize=1)
def probabilities(B, V, dtype):
    return batch(Case(PROBS, B, 1, V), DTYPES[dtype], DEVICE)[0][:, 0].contiguous()


def run(benchmark, call, group):
    def to_the_end():
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{group}, {DEVICE.type}"
    benchmark.extra_info["threads"] = torch.get_num_threads()
    benchmark(to_the_end)


def test_verify(benchmark, dtype, V, m, B, way):
    """From probabilities, by Cactus."""
    run(benchmark, calls(PROBS, B, m, V, dtype)[way], f"from probabilities, {B=}, {m=}, V={V:,}, {dtype}")


def test_verify_from_logits(benchmark, dtype, V, m, B, way):
    """By SpS, with the draft's statistics as `sample` leaves them."""
    run(benchmark, calls(LOGITS, B, m, V, dtype)[way], f"from logits, {B=}, {m=}, V={V:,}, {dtype}")


def test_truncated(benchmark, dtype, V, m, B, way):
    """From logits with a temperature, top-k and top-p: `bench_verify.ways` says what peers are given."""
    run(benchmark, calls(LOGITS, B, m, V, dtype, SAMPLING)[way], f"truncated logits, {B=}, {m=}, V={V:,}, {dtype}")


def test_draw(benchmark, dtype, V, B, way):
    """One token from each of B rows of probabilities."""
    rows = probabilities(B, V, dtype)
    run(benchmark, lambda: DRAWS[way](rows), f"draw, {B=}, V={V:,}, {dtype}")
