"""Verification of a batch, from probabilities and from logits: ours beside the dense torch way and transformers' step.

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
from peers import dense_verify, transformers_verify

from cactus_kernels import Cactus, RowStats, row_stats, verify, verify_from_logits

DELTA = 0.05
SIZES = [(8, 4, 32_000), (1, 4, 151_936), (8, 4, 151_936)]  # B, m, V
LOGIT_SIZES = [(1, 5, 32_000), (1, 5, 151_936), (8, 5, 151_936)]


def case(B, m, V, dtype=torch.float32):
    """A draft that resembles its target, with drafted tokens drawn from it."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(B, m + 1, V, generator=generator)
    p = (logits[:, :m] + torch.randn(B, m, V, generator=generator)).softmax(-1)
    ids = torch.multinomial(p.view(-1, V), 1, generator=generator).view(B, m)
    return logits.softmax(-1).to(dtype), p.to(dtype), ids


def logit_ways(B, m, V):
    """The same from logits, the draft's statistics given as `sample` leaves them; the peer takes one request at a time."""
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(B, m + 1, V, generator=generator)
    draft = target[:, :m] + torch.randn(B, m, V, generator=generator)
    ids = torch.multinomial(draft.softmax(-1).view(-1, V), 1, generator=generator).view(B, m)
    stats = RowStats(row_stats(draft.flatten(0, 1)).packed.view(B, m, -1))
    offset = iter(range(0, 1 << 40, m + 1))
    return {
        "cactus_kernels.verify_from_logits": lambda: verify_from_logits(
            target, draft, ids, "sps", seed=0, offset=next(offset), draft_stats=stats
        ),
        "transformers": lambda: [transformers_verify(*request) for request in zip(target, draft, ids, strict=True)],
    }


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
    for B, m, V in LOGIT_SIZES:
        t = medians(logit_ways(B, m, V), rounds)
        ours, theirs = t["cactus_kernels.verify_from_logits"], t["transformers"]
        print(
            f"B={B:3} m={m} V={V:7,}: verify_from_logits {ours * 1e3:7.2f} ms, transformers {theirs * 1e3:7.2f} ms, "
            f"ratio {theirs / ours:5.1f}"
        )
        results.append({"B": B, "m": m, "V": V, "from_logits_ms": ours * 1e3, "transformers_ms": theirs * 1e3})
    print(json.dumps({"benchmark": "verify", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
