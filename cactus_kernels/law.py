"""The exact law of the token emitted at one position, and how far it is from the target's.

`delta` bounds a distribution h that depends on the drafted token n, not the law of what comes out. That law is

    P(x) = p(x) min(1, h_x(x) / p(x)) + sum over n of p(n) (1 - min(1, h_n(n) / p(n))) g_n(x)

with h_n the rule's distribution for the drafted token n and g_n = norm((h_n - p)+). Here it is computed exactly, in float64
and O(V log V): off n, every rule keeps the target's proportions, h_n(x) = s_n q(x), so g_n depends on n only through the
number s_n, and tokens sorted by p/q enter the residual in order.
"""

import torch

from .rules import resolve_rule


def emitted(p, q, rule) -> torch.Tensor:
    """The distribution of the token emitted where n ~ p is verified against q by a rule.

    Rows are taken as they are, as verification takes them: a draft that sums to 0.996 was sampled from its normalised
    self, while acceptance and residual use its entries.

    Args:
        p, q: draft and target probabilities, [V] of any float dtype; float64 is used throughout.
        rule: a `Rule` with a number for its strength, or its name.

    Returns:
        float64 [V], summing to 1 up to rounding.

    Raises:
        ValueError: shapes differ or are not [V], a strength for each request, bad probabilities, no draft mass.
    """
    p, q, h, s = _evaluate(p, q, rule)
    drafted = p / p.sum()
    accept = torch.where(p > 0, (h / p).clamp(max=1), (h > 0).double())
    reject = drafted * (1 - accept)

    # x is in the residual of n iff p_x / q_x < s_n. Z_n is the residual's mass.
    ratio = torch.where(q > 0, p / q, torch.inf)
    ratio, order = ratio.sort()
    q_below, p_below = (torch.nn.functional.pad(x[order].cumsum(0), (1, 0)) for x in (q, p))
    k = torch.searchsorted(ratio, s)
    z = s * q_below[k] - p_below[k]
    has_residual = (reject > 0) & (z > 0)
    weight = torch.where(has_residual, reject / z, 0.0)

    # sum over n of weight_n (s_n q_x - p_x)+, with sums over the n whose s_n exceeds p_x / q_x.
    s_sorted, by_s = s.sort()
    above = [torch.nn.functional.pad(x[by_s].flip(0).cumsum(0).flip(0), (0, 1)) for x in (weight * s, weight)]
    first = torch.searchsorted(s_sorted, torch.where(q > 0, p / q, torch.inf), right=True)
    recovered = (q * above[0][first] - p * above[1][first]).clamp(min=0)

    # Without a residual the token comes from h without n, which is q without n.
    lost = torch.where((reject > 0) & ~has_residual, reject / (q.sum() - q).clamp(min=torch.finfo(q.dtype).tiny), 0.0)
    recovered += q * (lost.sum() - lost)
    return drafted * accept + recovered


def acceptance(p, q, rule) -> float:
    """The probability that a drafted token is accepted. Arguments and errors as in `emitted`."""
    p, q, h, _ = _evaluate(p, q, rule)
    return float((p / p.sum() * torch.where(p > 0, (h / p).clamp(max=1), 1.0)).sum())


def kl(a, b) -> float:
    """KL(a || b) in nats of two distributions [V]; infinite where a has mass and b has none."""
    a, b = _pair(a, b)
    return float(torch.where(a > 0, a * (a / b).log(), 0.0).sum())


def total_variation(a, b) -> float:
    """Total variation distance, half the sum of |a - b|, of two distributions [V]."""
    a, b = _pair(a, b)
    return float((a - b).abs().sum() / 2)


def chi_square(a, b) -> float:
    """Chi-square divergence, the sum of (a - b)^2 / b, of two distributions [V]."""
    a, b = _pair(a, b)
    return float(torch.where(a != b, (a - b) ** 2 / b, 0.0).sum())


def _pair(p, q):
    """Two distributions in float64, checked: one vector each, of one length, of probabilities that are not all 0."""
    for name, x in (("first", p), ("second", q)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"the {name} distribution must be a tensor [V], got {type(x).__name__}")
    if p.dim() != 1 or p.shape != q.shape:
        raise ValueError(f"both distributions must have shape [V], got {tuple(p.shape)} and {tuple(q.shape)}")
    p, q = p.double(), q.double()
    for name, x in (("first", p), ("second", q)):
        if not ((x >= 0) & (x <= 1.01)).all() or x.sum() == 0:
            raise ValueError(f"the {name} distribution must hold probabilities, finite, in [0, 1] and not all 0")
    return p, q


def _evaluate(p, q, rule):
    """p, q, h_n(n) and s_n for every n, float64 [V]."""
    rule = resolve_rule(rule)
    if any(isinstance(s, torch.Tensor) for s in rule.strengths):
        raise ValueError(f"the law is that of one position: give {rule.name} a number, not one strength a request")
    p, q = (x.clamp(max=1) for x in _pair(p, q))
    h = rule.h(q, q, p, True, None, *rule.strengths)
    s = rule.h(torch.ones_like(q), q, p, False, None, *rule.strengths)
    return p, q, h, s
