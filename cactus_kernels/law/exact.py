"""The exact law of the token emitted at one position, and how far it is from the target's.

A rule accepts the drafted token n with some probability and else draws from norm((s_n q - p)+), for Cactus with
s_n = (1 - h_n) / (1 - q_n). So the law of what comes out is

    P(x) = p(x) accept(x) + sum over n of p(n) (1 - accept(n)) g_n(x),      g_n = norm((s_n q - p)+)

Here it is computed exactly, in float64 and O(V log V): g_n depends on n only through the number s_n, and tokens sorted by
p/q enter the residual in order.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..definition import CHUNK
from ..rules import resolve_rule
from .by_ratio import ByRatio

CHECKED = 32  # entries at which the form of a rule's recovery is looked at
ROUNDING = 1e-13  # of sums of probabilities in float64


def emitted(p, q, rule) -> torch.Tensor:
    """The distribution of the token emitted where n ~ p is verified against q by a rule.

    Rows are taken as they are, as verification takes them: a draft that sums to 0.996 was sampled from its normalised
    self, while acceptance and residual use its entries.

    Args:
        p, q: draft and target probabilities, [V], or [N, V] for N positions at once, of any float dtype; float64 is used
            throughout.
        rule: a `Rule` with a number for its strength, or its name.

    Returns:
        float64, shaped as p, each row summing to 1 up to rounding.

    Raises:
        ValueError: shapes differ or are not [V] or [N, V], a strength for each request, bad probabilities, no draft mass; a
            rule whose recovery is of no form known here; `Block`, which judges no position by itself.
    """
    positions = Positions(p, q)
    return positions.full(positions.law(rule)[0])


def acceptance(p, q, rule) -> float | torch.Tensor:
    """The probability that a drafted token is accepted: a number, or [N]. Arguments and errors as in `emitted`."""
    return _out(Positions(p, q).law(rule)[1])


class Divergences(NamedTuple):
    """How far a distribution a is from another, b: KL(a || b) and KL(b || a) in nats, infinite where the second lacks mass
    that the first has; total variation, half the sum of |a - b|; chi-square, the sum of (a - b)^2 / b."""

    kl: float | torch.Tensor
    kl_reverse: float | torch.Tensor
    total_variation: float | torch.Tensor
    chi_square: float | torch.Tensor


def divergences(a, b) -> Divergences:
    """All divergences of two distributions [V], or of [N, V] row by row, which gives float64 [N] each."""
    a, b = _pair(a, b)
    return Divergences(*(_out(x) for x in (_kl(a, b), _kl(b, a), _total_variation(a, b), _chi_square(a, b))))


def kl(a, b) -> float | torch.Tensor:
    """KL(a || b), see `divergences`."""
    return _out(_kl(*_pair(a, b)))


def total_variation(a, b) -> float | torch.Tensor:
    """Total variation distance, see `divergences`."""
    return _out(_total_variation(*_pair(a, b)))


def chi_square(a, b) -> float | torch.Tensor:
    """Chi-square divergence of a from b, see `divergences`."""
    return _out(_chi_square(*_pair(a, b)))


def _kl(a, b):
    return torch.where(a > 0, a * (a / b).log(), 0.0).sum(-1)


def _total_variation(a, b):
    return (a - b).abs().sum(-1) / 2


def _chi_square(a, b):
    return torch.where(a != b, (a - b) ** 2 / b, 0.0).sum(-1)


class Positions:
    """Draft and target rows whose laws under several rules are asked for: they are checked and sorted once.

    Of rows that were truncated, most columns are 0 in all of them, for p and q alike: those are left out. `columns` int64 [K]
    are the tokens that are left, `p` and `q` their probabilities, float64 [..., K].
    """

    def __init__(self, p, q):
        """p, q: as in `emitted`."""
        p, q = (x.clamp(max=1) for x in _pair(p, q))
        self.vocab_size = p.shape[-1]
        self.columns = ((p > 0) | (q > 0)).view(-1, self.vocab_size).any(0).nonzero().squeeze(1)
        self.p, self.q = (p, q) if len(self.columns) == self.vocab_size else (x[..., self.columns] for x in (p, q))
        self.drafted = self.p / self.p.sum(-1, keepdim=True)

    def law(self, rule):
        """The emitted law and the probability of acceptance under a rule, float64 [..., K] and [...]."""
        rule = resolve_rule(rule)
        if any(isinstance(s, torch.Tensor) for s in rule.strengths):
            raise ValueError(f"the law is that of one position: give {rule.name} a number, not one strength a request")
        if rule.whole_draft == "coupled":
            return self.q / self.q.sum(-1, keepdim=True), self._coupled()
        if rule.whole_draft is not None:
            raise ValueError(
                f"the law is that of one position, and {rule.name} judges a whole draft: one of a single token as SpS does"
            )
        if rule.solves:
            stat = self._by_ratio.clip(rule.solves.what, rule.strengths[rule.solves.strength])
        else:
            stat = tuple(self._statistic(name) for name in rule.statistics) or None
        subtracts, scales = rule.subtracts_draft, self._check_recovery(rule, stat)
        p, q = self.p, self.q
        h = rule.accept(q, p, stat, *rule.strengths)
        r = rule.recover(torch.ones_like(q) if subtracts and scales else q, q, h, stat, *rule.strengths).double()
        accepted = self.drafted * torch.where(p > 0, (h / p).clamp(max=1), 1.0)
        reject = self.drafted - accepted
        if subtracts and not scales:
            w = (r - p).clamp(min=0)
            some = w.sum(-1, keepdim=True) > w
            recovered = _without(torch.where(some, reject, 0.0), w) + _without(torch.where(some, 0.0, reject), r)
        else:
            recovered = self._from_residual(reject, r) if subtracts else _without(reject, r)
        return accepted + recovered, accepted.sum(-1)

    def full(self, law):
        """A law [..., K] over the whole vocabulary, [..., V]."""
        if law.shape[-1] == self.vocab_size:
            return law
        return law.new_zeros(*law.shape[:-1], self.vocab_size).index_copy(-1, self.columns, law)

    def _check_recovery(self, rule, stat):
        """Recovery must be from q times a number s_n; or from weights that are the same for all n. Whether it is the first.

        Looked at for the largest entries of every position, each with another one as n.
        """
        p, q = self._largest
        h = rule.accept(q, p, stat, *rule.strengths)

        def r(q_x, shift):
            return rule.recover(q_x, q.roll(shift, -1), h.roll(shift, -1), stat, *rule.strengths).double()

        found = r(q, 1)
        scales, is_fixed = (
            torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
            for expected in (q * r(torch.ones_like(q), 1), r(q, 0))
        )
        if not ((scales and rule.subtracts_draft) or is_fixed):
            raise ValueError(
                f"the exact law of {rule.name} is not known: it takes r(x) = q(x) times a number that depends on the drafted "
                "token alone, for a rule that subtracts the draft; or an r that does not depend on the drafted token"
            )
        return scales

    def _statistic(self, name):
        """A row statistic, as in `host.statistics`, in float64: [..., 1]."""
        q, V = self.q, self.vocab_size
        if name == "largest":
            return q.amax(-1, keepdim=True)
        if name in ("entropy", "relative entropy"):
            entropy = -torch.where(q > 0, q * q.log(), 0.0).sum(-1, keepdim=True)
            return entropy if name == "entropy" else entropy / math.log(V) if V > 1 else 0 * entropy
        if name == "certainty":
            terms = torch.where(q > 0, q * (q * V).log(), 0.0) - q
            return (terms.sum(-1, keepdim=True) + 1) / math.log(V) if V > 1 else 0 * q[..., :1]
        if name[0] == "k-th largest":
            return q.topk(name[1], -1)[0][..., -1:] if name[1] <= q.shape[-1] else torch.zeros_like(q[..., :1])
        raise ValueError(f"the law does not know the statistic {name!r}")

    def _from_residual(self, reject, s):
        """The mass that recovery adds to each token: the sum over n of reject_n norm((s_n q - p)+), [..., K]."""
        if (s == s[..., :1]).all():
            w = (s[..., :1] * self.q - self.p).clamp(min=0)
            z, total, mass = (x.sum(-1, keepdim=True) for x in (w, reject, self.p))
            # Where what recovery adds is what was rejected, up to rounding, w is the more exact: it is a sum, not a difference.
            same = (total * mass - z).abs() <= ROUNDING
            recovered, some = w * torch.where(same, 1 / mass, torch.where(z > 0, total / z, 0.0)), z > 0
        else:
            recovered, some = self._by_ratio.recovered(reject, s)
        # Without a residual the token comes from h without n, which is q without n.
        return recovered + _without(torch.where(some, 0.0, reject), self.q)

    def _coupled(self):
        """The probability that draft and target draw the same token with the same noise, [...].

        Their races are between chunks of tokens first, then in the winning chunk, each with its own noise; in two different
        chunks they cannot draw the same token.
        """
        p, q = (self.full(x) for x in (self.p, self.q))
        p, q = (pad(x, (0, -self.vocab_size % CHUNK)).unflatten(-1, (-1, CHUNK)) for x in (p, q))
        return (_both_win(p.sum(-1), q.sum(-1)) * _both_win(p, q).sum(-1)).sum(-1)

    @cached_property
    def _largest(self):
        """p and q of the tokens at which recovery is looked at, [..., CHECKED] each."""
        some = (self.p + self.q).topk(min(CHECKED, self.q.shape[-1]), -1)[1]
        return self.p.gather(-1, some), self.q.gather(-1, some)

    @cached_property
    def _by_ratio(self):
        return ByRatio(self.p, self.q)


def _without(reject, w):
    """The sum over n of reject_n norm(w without n), [..., V]."""
    rest = w.sum(-1, keepdim=True) - w
    share = torch.where(reject > 0, reject / rest.clamp(min=torch.finfo(w.dtype).tiny), 0.0)
    return w * (share.sum(-1, keepdim=True) - share)


def _both_win(p, q):
    """The probability that x wins two exponential races with the same noise, over p and over q: [..., K].

    x wins both iff its noise, over max(p_y / p_x, q_y / q_x), is below that of every y: 1 / the sum of these over y.
    """
    order = torch.where(q > 0, p / q, torch.where(p > 0, torch.inf, 0 * p)).argsort(-1)
    p_sorted, q_sorted = p.gather(-1, order), q.gather(-1, order)
    beyond = p.sum(-1, keepdim=True) - p_sorted.cumsum(-1)  # where p_y / p_x is the larger
    chance = 1 / (beyond.clamp(min=0) / p_sorted + q_sorted.cumsum(-1) / q_sorted)
    chance = torch.where((p_sorted > 0) & (q_sorted > 0), chance, 0.0)
    return torch.zeros_like(p).scatter(-1, order, chance)


def _out(x):
    """A number for one position, float64 [N] for N."""
    return x if x.dim() else float(x)


def _pair(p, q):
    """Two distributions in float64, checked: [V] or [N, V] each, of one shape, rows of probabilities that are not all 0."""
    for name, x in (("first", p), ("second", q)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"the {name} distribution must be a tensor [V] or [N, V], got {type(x).__name__}")
    if p.dim() not in (1, 2) or p.shape != q.shape:
        raise ValueError(
            f"both distributions must have shape [V], or both [N, V], got {tuple(p.shape)} and {tuple(q.shape)}"
        )
    p, q = p.double(), q.double()
    for name, x in (("first", p), ("second", q)):
        if not ((x >= 0) & (x <= 1.01)).all() or (x.sum(-1) == 0).any():
            raise ValueError(f"the {name} distribution must hold probabilities, finite, in [0, 1] and not all 0")
    return p, q
