"""Rules that clip the draft between multiples of the target: what is emitted, or nearly, is clip(p, b q, c q)."""

from dataclasses import dataclass

import torch

from .base import Rule, Solve, as_strength, check_strength, one_strength
from .languages import torch_language as m
from .registry import register


def target_recover(q, q_n, h_n, stat, strength):
    return q


def interpolation_accept(q_n, p_n, stat, weight):
    # (h - p)+ = weight (q - p)+: the token is drawn from (q - p)+.
    w = m.minimum(weight, 1.0)
    return w * q_n + (1.0 - w) * p_n


def capped_accept(q_n, p_n, stat, cap):
    return m.minimum(q_n * m.maximum(cap, 1.0), 1.0)


def multiple(q_n, c):
    """min(c q_n, 1); 0 for a denormal fp32 q_n, which c may be too coarse for: that errs to rejecting."""
    return m.where(q_n >= 1.1754943508222875e-38, m.minimum(q_n * c, 1.0), 0.0)


def optimal_cap_accept(q_n, p_n, stat, cap):
    return multiple(q_n, m.maximum(cap, 1.0))


def solved_accept(q_n, p_n, stat, strength):
    return multiple(q_n, stat[1])


def solved_recover(q, q_n, h_n, stat, strength):
    return q * stat[0]


@dataclass(frozen=True, eq=False)
class Interpolation(Rule):
    """Interpolation, lossy: verify against `h = weight q + (1 - weight) p`; the emitted law is h itself.

    Reads one row pair.

    n is accepted with probability `min(1, weight q_n / p_n + 1 - weight)`; recovery from (h - p)+, which is (q - p)+ but for a
    factor. `weight = 1` is SpS, `weight = 0` accepts every draft.

    Args:
        weight: the target's share, a number in [0, 1] or a float tensor [B], larger entries of which count as 1.

    Raises:
        ValueError, TypeError: as for `Cactus`.

    Source: an ensemble of draft and target (arXiv 2604.07622); transformers' `assistant_ensemble_weight`.
    """

    weight: float | torch.Tensor = 0.5

    name = "interpolation"
    keeps_proportions = True
    accept = staticmethod(interpolation_accept)
    recover = staticmethod(target_recover)
    strengths = one_strength("weight")

    def __post_init__(self):
        check_strength("weight", self.weight, most=1.0)


@dataclass(frozen=True, eq=False)
class Capped(Rule):
    """Lenience, lossy: n is accepted with probability `min(1, cap q_n / p_n)`, recovery from plain `(q - p)+`.

    Reads one row pair.

    No token comes out with more than `cap` times its target probability, so KL(P || q) <= ln cap. `cap = 1` is SpS.
    `Lenience(l)` is `Capped(1 / l)`. `Optimal(cap=...)` has the same cap and acceptance, less divergence, and a solve more.

    Args:
        cap: a number, finite and at least 1, or a float tensor [B], smaller entries of which count as 1.

    Raises:
        ValueError, TypeError: as for `Cactus`.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5, "lenience".
    """

    cap: float | torch.Tensor = 2.0

    name = "capped"
    keeps_proportions = True
    accept = staticmethod(capped_accept)
    recover = staticmethod(target_recover)
    strengths = one_strength("cap")

    def __post_init__(self):
        check_strength("cap", self.cap, least=1.0, meaning=" (1 is SpS)")


def Lenience(lenience: float = 0.5) -> Capped:
    """`Capped(1 / lenience)`: n is accepted with probability min(1, q_n / (lenience p_n)). A number in (0, 1]."""
    if isinstance(lenience, bool) or not isinstance(lenience, (int, float)):
        raise TypeError(f"lenience must be a number, got {type(lenience).__name__}")
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must be in (0, 1] (1 is SpS), got {lenience}")
    return Capped(1 / lenience)


@dataclass(frozen=True, eq=False)
class Optimal(Rule):
    """The least divergence for its acceptance, lossy: what is emitted is exactly `clip(p, b q, c q)`, b <= 1 <= c.

    Reads one row pair (cap), or those of all drafted tokens that SpS would reject (price), some five times.

    n is accepted with probability `min(1, c q_n / p_n)`; recovery from `(b q - p)+`, with b such that the law sums to 1. For
    every f-divergence the largest acceptance at a given divergence has this form (docs/law.md). The law does not depend on
    the drafted token, and KL(P || q) <= ln c.

    `Optimal(cap=c)` fixes c, and solves for b where a token was rejected. `Optimal(price=k)` fixes c / b = k at every position:
    the best for KL averaged over positions; it solves every drafted row pair that SpS would not accept already.

    Args:
        cap: c, a number, finite and at least 1, or a float tensor [B], smaller entries of which count as 1.
        price: k, of the same kind. One of the two.

    Raises:
        ValueError: both or neither; otherwise ValueError, TypeError as for `Cactus`.
    """

    cap: float | torch.Tensor | None = None
    price: float | torch.Tensor | None = None

    recover = staticmethod(solved_recover)

    def __post_init__(self):
        if (self.cap is None) == (self.price is None):
            raise ValueError("Optimal takes one of cap=c and price=k")
        check_strength(*(("cap", self.cap) if self.price is None else ("price", self.price)), least=1.0)

    @property
    def solves(self) -> Solve:
        return Solve("cap" if self.price is None else "price")

    @property
    def name(self) -> str:
        return f"optimal-{self.solves.what}"

    @property
    def accept(self):
        return optimal_cap_accept if self.price is None else solved_accept

    @property
    def strengths(self) -> tuple:
        return (as_strength(self.cap if self.price is None else self.price),)


@dataclass(frozen=True, eq=False)
class Mentored(Rule):
    """Mentored decoding, lossy: `clip(p, b q, c q)`, b and c solved at every position for `KL(q || P) = kl`.

    Reads the row pairs of all drafted tokens that SpS would reject, some fifteen times.

    KL(q || P) is met within 1e-5 of kl and the rounding of the rows, for every q_n that is a normal fp32 number (2^-126 and
    more); a drafted token with a smaller q_n is rejected. Where KL(q || p) <= kl, every draft is accepted.
    The family of `Optimal`, with another multiplier at each position.

    Args:
        kl: nats, a number, finite and >= 0 (0 is SpS), or a float tensor [B].

    Raises:
        ValueError, TypeError: as for `Cactus`.

    Source: Tran-Thien 2023, "An optimal lossy variant of speculative decoding".
    """

    kl: float | torch.Tensor = 0.1

    name = "mentored"
    solves = Solve("kl")
    accept = staticmethod(solved_accept)
    recover = staticmethod(solved_recover)
    strengths = one_strength("kl")

    def __post_init__(self):
        check_strength("kl", self.kl, meaning=" (0 is SpS)")


CAPS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
PRICES = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 14.0, 20.0, 50.0)
ODD_CAPS = (1.0, 1.0000001, 1.5, 4.0, 3e38)
WEIGHTS = (0.95, 0.85, 0.7, 0.5, 0.35, 0.2, 0.1)
register("capped", Capped, CAPS, {"cap": ODD_CAPS})
register("lenience", Lenience)
register("optimal-cap", lambda cap=2.0: Optimal(cap=cap), CAPS, {"cap": ODD_CAPS})
register("optimal-price", lambda price=2.0: Optimal(price=price), PRICES, {"price": (1.0, 1.0000001, 1.5, 4.0, 1e30)})
register("mentored", Mentored, (0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8), {"kl": (0.0, 1e-6, 0.05, 1.0, 30.0)})
register("interpolation", Interpolation, WEIGHTS, {"weight": (0.0, 1e-30, 0.3, 0.9, 1.0)})
