"""Verification by every rule, relative to SpS, from probabilities: B = 8, m = 4, V = 151,936.

    python benchmarks/bench_rules.py                    # ratios measured in turn in one process, ends in one JSON line

What is measured is the host's wall clock of one call (with the device waited for on a GPU). SpS, Cactus, Capped and
Interpolation read one row pair a request; Optimal(cap) the same, a few times over where a token was rejected; the rules
below them every drafted target row, or row pair. Beside them, the sampling step of transformers' assisted generation,
which takes one request: its time is that of B calls.
"""

import json

import torch
from bench_verify import Case, batch
from measure import medians
from peers import PROBS, transformers_verify

from cactus_kernels import verify
from cactus_kernels.rules import (
    AdaptiveCactus,
    Block,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Mentored,
    Optimal,
    SpS,
    TopK,
    Typical,
)

B, M, V = 8, 4, 151_936
RULES = {
    "SpS": SpS(),
    "Cactus": Cactus(0.05),
    "Cactus, KL": Cactus(0.05, "kl"),
    "Capped": Capped(1.2),
    "Interpolation": Interpolation(0.8),
    "Optimal, cap": Optimal(cap=1.2),
    "Typical": Typical(),
    "TopK": TopK(10),
    "AdaptiveCactus": AdaptiveCactus(0.05),
    "Coupled": Coupled(),
    "Block": Block(),
    "Optimal, price": Optimal(price=1.5),
    "Mentored": Mentored(0.05),
}


def ways():
    """The calls to be timed, by name."""
    target, draft, ids = batch(Case(PROBS, B, M, V))
    offset = iter(range(0, 1 << 40, M + 1))

    def by(rule):
        return lambda: verify(target, draft, ids, rule, seed=0, offset=next(offset))

    def with_budget():
        budget = torch.full((B,), 0.1, dtype=torch.float64)
        verify(target, draft, ids, Cactus(0.05), seed=0, offset=next(offset), budget=budget)

    logits, draft_logits = target.log(), draft.log()

    def transformers():
        return [transformers_verify(*request) for request in zip(logits, draft_logits, ids, strict=True)]

    calls = {name: by(rule) for name, rule in RULES.items()}
    return calls | {"Cactus with a budget": with_budget, "transformers": transformers}


def main(rounds=9):
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), median of {rounds} rounds in turn")
    seconds = medians(ways(), rounds)
    for name, t in seconds.items():
        print(f"{name:22} {t * 1e3:8.2f} ms   {t / seconds['SpS']:6.2f} x SpS")
    milliseconds = {name: t * 1e3 for name, t in seconds.items()}
    print(json.dumps({"benchmark": "rules", "B": B, "m": M, "V": V, "milliseconds": milliseconds}))


if __name__ == "__main__":
    main()
