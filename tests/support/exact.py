"""Laws computed here from the definitions alone, in float64 and without the package: what its output is tested against."""

import numpy as np

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
    from scipy import stats  # not needed by `benchmarks/gpu_check.py`, which has no test tools

    return stats.chi2.sf(statistic, len(expected) - 1)


# -- every rule, by its definition: the chance that n is accepted, [V], and the weights to recover from, a function of n


def sps(p, q):
    return _ratio(q, p), lambda n: np.maximum(q - p, 0)


def cactus(p, q, delta, divergence="taylor"):
    def h(n):
        if divergence == "taylor":
            return verified_against(q, n, delta)
        return _raised(q, n, _largest_within_kl(q[n], delta))

    return _ratio(np.array([h(n)[n] for n in range(len(q))]), p), lambda n: np.maximum(h(n) - p, 0)


def adaptive(p, q, delta, spend):
    share = entropy(q) / np.log(len(q)) if len(q) > 1 else 0.0
    return cactus(p, q, delta * (1 - share if spend == "certain" else share))


def capped(p, q, cap):
    return _ratio(cap * q, p), lambda n: np.maximum(q - p, 0)


def interpolation(p, q, weight):
    h = weight * q + (1 - weight) * p
    return _ratio(h, p), lambda n: np.maximum(h - p, 0)


def typical(p, q, epsilon, alpha):
    likeliest = np.where(q == q.max(), q, 0)
    return (q > min(epsilon, alpha * np.exp(-entropy(q)))) | (q == q.max()), lambda n: likeliest


def top_k(p, q, k):
    among = (q >= np.sort(q)[::-1][min(k, len(q)) - 1]) & (q > 0)
    return among, lambda n: np.where(among, q, 0)


def clipped(p, q, b, c):
    return _ratio(c * q, p), lambda n: np.maximum(b * q - p, 0)


def clip(p, q, c=None, price=None):
    """b and c of the law clip(p, b q, c q), which sums to 1: for a c, or for c / b = price. By bisection."""
    b = _root(lambda b: np.clip(p, b * q, (price * b if c is None else c) * q).sum() - 1, 0.0, 1.0)
    return b, price * b if c is None else c


def emitted_by(p, q, accept, recovery):
    """The law of the emitted token by brute force over the drafted token: [V]."""
    law = p * accept
    for n in np.flatnonzero(p * (1 - accept) > 1e-15):
        weights = recovery(n) * (np.arange(len(q)) != n)
        law = law + p[n] * (1 - accept[n]) * weights / weights.sum()
    return law


def meeting(p, q):
    """The chance that two exponential races over p and over q, with the same noise, are both won by x: [V]."""
    chance = np.zeros(len(p))
    for x in np.flatnonzero((p > 0) & (q > 0)):
        chance[x] = 1 / np.maximum(p / p[x], q / q[x]).sum()
    return chance


def entropy(q):
    return -(q[q > 0] * np.log(q[q > 0])).sum()


def kl(a, b):
    some = a > 0
    return (a[some] * np.log(a[some] / b[some])).sum()


def _ratio(h, p):
    return np.where(p > 0, np.minimum(h / np.where(p > 0, p, 1), 1), 1.0)


def _raised(q, n, h_n):
    h = np.zeros_like(q) if q[n] == 1 else q * (1 - h_n) / (1 - q[n])
    h[n] = h_n
    return h


def _largest_within_kl(q_n, delta):
    if q_n in (0, 1) or -np.log(q_n) <= delta:
        return min(q_n * 1e300, 1.0)
    return _root(lambda x: kl(np.array([x, 1 - x]), np.array([q_n, 1 - q_n])) - delta, q_n, 1.0)


def _root(rising, low, high):
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) <= 0 else (low, middle)
    return low
