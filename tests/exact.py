"""Laws computed here from the definitions alone, in float64 and without the package: what its output is tested against."""

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-8  # of one chi-square test; there are under 100 of them


def verified_against(q, n, delta):
    """h for the drafted token n: Cactus with the closed form of gamma*. delta = 0 is SpS."""
    gamma = min(q[n] + np.sqrt(2 * delta * q[n] * (1 - q[n])), 1.0)
    h = np.zeros_like(q) if q[n] == 1 else q * (1 - gamma) / (1 - q[n])
    h[n] = gamma
    return h


def emitted(p, q, delta):
    """The law of the emitted token by brute force over the drafted token: [V]."""
    law = np.zeros_like(q)
    for n in np.flatnonzero(p):
        h = verified_against(q, n, delta)
        accept = min(1.0, h[n] / p[n])
        law[n] += p[n] * accept
        if accept < 1 - 1e-15:
            residual = np.maximum(h - p, 0)
            law += p[n] * (1 - accept) * residual / residual.sum()
    return law


def chi_square_p_value(counts, law):
    """The p-value of counts [V] under law [V]; cells that expect fewer than 10 are pooled."""
    expected = law / law.sum() * counts.sum()
    assert counts[law == 0].sum() == 0, "a token of probability 0 came out"
    small = expected < 10
    observed, expected = (
        np.append(counts[~small], counts[small].sum()),
        np.append(expected[~small], expected[small].sum()),
    )
    keep = expected > 0
    observed, expected = observed[keep], expected[keep]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return stats.chi2.sf(statistic, len(expected) - 1)
