"""Every rule with its brute force (support/exact.py)."""

import numpy as np

from cactus_kernels.rules import (
    AdaptiveCactus,
    Cactus,
    Capped,
    Interpolation,
    Lenience,
    Mentored,
    Optimal,
    SpS,
    TopK,
    Typical,
)
from support import exact


def f(x):
    """A strength as rules hold it."""
    return float(np.float32(x))


def within_kl(p, q, kl):
    """b and c of the law clip(p, b q, c q) at KL(q || law) = kl."""

    def excess(c):
        return exact.kl(q, np.clip(p, exact.clip(p, q, c)[0] * q, c * q)) - kl

    return exact.clip(p, q, exact._root(excess, 1.0, (p[q > 0] / q[q > 0]).max()))


# (rule, function of p and q that gives what `exact.emitted_by` takes), by name.
LAWS = {
    "sps": (SpS(), exact.sps),
    "cactus 0.5": (Cactus(0.5), lambda p, q: exact.cactus(p, q, f(0.5))),
    "cactus-kl 0.05": (Cactus(0.05, "kl"), lambda p, q: exact.cactus(p, q, f(0.05), "kl")),
    "cactus-kl 0.5": (Cactus(0.5, "kl"), lambda p, q: exact.cactus(p, q, f(0.5), "kl")),
    "adaptive, certain": (AdaptiveCactus(0.5), lambda p, q: exact.adaptive(p, q, f(0.5), "certain")),
    "adaptive, uncertain": (AdaptiveCactus(0.5, "uncertain"), lambda p, q: exact.adaptive(p, q, f(0.5), "uncertain")),
    "capped 1.5": (Capped(1.5), lambda p, q: exact.capped(p, q, 1.5)),
    "lenience 0.2": (Lenience(0.2), lambda p, q: exact.capped(p, q, f(5))),
    "interpolation 0.7": (Interpolation(0.7), lambda p, q: exact.interpolation(p, q, f(0.7))),
    "typical": (Typical(0.09), lambda p, q: exact.typical(p, q, f(0.09), f(0.3))),
    "medusa": (Typical(0.3, 0.6), lambda p, q: exact.typical(p, q, f(0.3), f(0.6))),
    "optimal, cap 1.5": (Optimal(cap=1.5), lambda p, q: exact.clipped(p, q, *exact.clip(p, q, 1.5))),
    "optimal, price 2": (Optimal(price=2.0), lambda p, q: exact.clipped(p, q, *exact.clip(p, q, price=2))),
    "mentored 0.1": (Mentored(0.1), lambda p, q: exact.clipped(p, q, *within_kl(p, q, f(0.1)))),
    "top-k 3": (TopK(3), lambda p, q: exact.top_k(p, q, 3)),
    "top-k 3, upstream": (TopK(3, "upstream"), lambda p, q: exact.top_k(p, q, 3, upstream=True)),
}


def draws_of(rule, most):
    """Rows that have to be solved take their time."""
    return 2_000 if rule.name == "mentored" else min(most, 10_000) if rule.solves else most
