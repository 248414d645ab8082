"""Verification of a batch from probabilities: ours beside the dense torch way.

    pytest benchmarks/bench_verify.py                                 # a table by pytest-benchmark
    python benchmarks/bench_verify.py                                 # ratios measured in turn, ends in one JSON line

What is measured is the host's wall clock of one call (with the device waited for on a GPU). Least traffic is one row pair
a request, 2 B V elements, whatever the number of drafted tokens; the dense way reads and writes every row several times.
"""

import json
import statistics
import time

import pytest
import torch
from peers import dense_verify

from cactus_kernels import Cactus, verify

DELTA = 0.05
SIZES = [(8, 4, 32_000), (1, 4, 151_936), (8, 4, 151_936)]  # B, m, V


def case(B, m, V, dtype=torch.float32):
    """A draft that resembles its target, with drafted tokens drawn from it."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(B, m + 1, V, generator=generator)
    p = (logits[:, :m] + torch.randn(B, m, V, generator=generator)).softmax(-1)
    ids = torch.multinomial(p.view(-1, V), 1, generator=generator).view(B, m)
    return logits.softmax(-1).to(dtype), p.to(dtype), ids


def ways(B, m, V):
    """The calls to be timed, by name."""
    target, draft, ids = case(B, m, V)
    offset = iter(range(0, 1 << 40, m + 1))
    return {
        "cactus_kernels.verify": lambda: verify(target, draft, ids, Cactus(DELTA), seed=0, offset=next(offset)),
        "dense torch": lambda: dense_verify(target, draft, ids, DELTA),
    }


@pytest.mark.parametrize(("B", "m", "V"), SIZES)
@pytest.mark.parametrize("way", ["cactus_kernels.verify", "dense torch"])
def test_verify(benchmark, way, B, m, V):
    benchmark.group = f"B={B} m={m} V={V}"
    benchmark(ways(B, m, V)[way])


def medians(calls, rounds):
    """Median seconds of each call, measured in turn after one warm-up."""
    seconds = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(rounds=15):
    print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} thread(s), median of {rounds} rounds in turn")
    results = []
    for B, m, V in SIZES:
        t = medians(ways(B, m, V), rounds)
        ours, dense = t["cactus_kernels.verify"], t["dense torch"]
        print(
            f"B={B:3} m={m} V={V:7,}: verify {ours * 1e3:7.2f} ms, dense {dense * 1e3:7.2f} ms, ratio {dense / ours:5.1f}"
        )
        results.append(
            {"B": B, "m": m, "V": V, "verify_ms": ours * 1e3, "dense_ms": dense * 1e3, "ratio": dense / ours}
        )
    print(json.dumps({"benchmark": "verify", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
