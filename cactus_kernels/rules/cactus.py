"""SpS and Cactus: verification against the target, and against the target with the drafted token raised."""

from dataclasses import dataclass

import torch

from .base import Rule, check_strength, one_strength
from .elementary import log, log_ratio
from .languages import torch_language as m
from .registry import register


def sps_accept(q_n, p_n, stat):
    return q_n


def sps_recover(q, q_n, h_n, stat):
    return q


def room(q_n, h_n):
    """What the other tokens of q are multiplied by, to make room for h_n at n: (1 - h_n) / (1 - q_n)."""
    # q_n = 1 gives h_n = 1 and 0, not 0/0.
    return m.div_rn(1.0 - h_n, m.where(q_n < 1.0, 1.0 - q_n, 1.0))


def proportional_recover(q, q_n, h_n, stat, delta):
    return q * room(q_n, h_n)  # q is multiplied as a whole: where h_n = q_n it stays q, bit for bit


def taylor(q_n, delta):
    # The product of the q's comes first: it is at most 1/2, so no finite delta overflows.
    return m.minimum(q_n + m.sqrt_rn(2.0 * q_n * (1.0 - q_n) * delta), 1.0)


def cactus_accept(q_n, p_n, stat, delta):
    return taylor(q_n, delta)


def kl_root(q_n, delta):
    """The largest x in [q_n, 1] with x ln(x / q_n) + (1 - x) ln((1 - x) / (1 - q_n)) <= delta."""
    y = 1.0 - q_n
    log_q = log(q_n)
    # Where the root is close to 1: 1 - x = excess / (1 + ln(y / q_n) - ln(1 - x)), with a rough 1 - x on the right.
    excess = m.maximum(-log_q - delta, 1e-30)
    slope = 1.0 + (log(m.maximum(y, 1e-30)) - log_q)
    rough = m.minimum(m.div_rn(excess, m.maximum(slope, 1.0)), 1.0)
    near_1 = 1.0 - m.minimum(m.div_rn(excess, slope - log(rough)), 0.5 * y)
    x = m.minimum(taylor(q_n, delta), near_1)
    # Newton's steps on a convex function. The first may end beyond 1; five are enough for 3e-7.
    for _ in m.static_range(5):
        up, down = log_ratio(x, q_n, x - q_n), log_ratio(1.0 - x, y, q_n - x)
        step = m.div_rn((x * up + (1.0 - x) * down) - delta, m.maximum(up - down, 1e-30))
        x = m.where(x - step < 1.0, x - step, m.maximum(0.5 * (1.0 + x), near_1))
        x = m.minimum(m.maximum(x, q_n), 0.99999994)
    x = m.where(delta + 0.0 * q_n > 0.0, x, q_n)
    x = m.where(-log_q <= delta, 1.0, x)
    return m.where(q_n > 0.0, x, 0.0)  # last, since `log` of 0 is finite


def kl_accept(q_n, p_n, stat, delta):
    return kl_root(q_n, delta)


def adaptive_accept(q_n, p_n, stat, delta):
    return taylor(q_n, delta * m.minimum(stat[0], 1.0))


@dataclass(frozen=True)
class SpS(Rule):
    """Speculative sampling, lossless: `h = q`, so emitted tokens follow the target exactly.

    Reads one row pair.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """

    name = "sps"
    lossless = True
    keeps_proportions = True
    accept = staticmethod(sps_accept)
    recover = staticmethod(sps_recover)


@dataclass(frozen=True, eq=False)
class Cactus(Rule):
    """Cactus, lossy: `h_n = min(q_n + sqrt(2 delta q_n (1 - q_n)), 1)`, the other tokens scaled to make h sum to 1.

    Reads one row pair.

    `h_n >= q_n`, so it accepts at least what SpS accepts; `delta = 0` is SpS. `delta` bounds the divergence of h for one
    drafted token (chi-square at most 2 delta), not the law of the emitted token: `cactus_kernels.law` gives that exactly.

    With `divergence="kl"`, h_n is the largest x with `x ln(x / q_n) + (1 - x) ln((1 - x) / (1 - q_n)) <= delta`, so that
    KL(h || q) <= delta for every drafted token; h_n = 1 where q_n >= e^-delta. The closed form is its second-order
    approximation.

    Args:
        delta: strength, finite and >= 0, or a float tensor [B] with one for each request. A bad value in a tensor makes
            that request invalid, since looking at it here would wait for the device.
        divergence: "taylor", the closed form; or "kl", solved to 2e-7.

    Raises:
        ValueError: a number that is negative, NaN or infinite in fp32; a tensor that is not one-dimensional; another
            divergence.
        TypeError: neither a number nor a floating-point tensor.

    Source: Hao & Mou 2026 (arXiv 2604.04987), the closed form of gamma* and the KL problem that it approximates.
    """

    delta: float | torch.Tensor = 1.0
    divergence: str = "taylor"

    keeps_proportions = True
    recover = staticmethod(proportional_recover)
    strengths = one_strength("delta")

    def __post_init__(self):
        check_strength("delta", self.delta, meaning=" (0 is SpS)")
        if self.divergence not in ("taylor", "kl"):
            raise ValueError(f'divergence must be "taylor" or "kl", got {self.divergence!r}')

    @property
    def name(self) -> str:
        return "cactus" if self.divergence == "taylor" else "cactus-kl"

    @property
    def accept(self):
        return cactus_accept if self.divergence == "taylor" else kl_accept


@dataclass(frozen=True, eq=False)
class AdaptiveCactus(Rule):
    """Cactus with a delta that follows the target row's entropy: `delta (1 - H(q) / ln V)`, or `delta H(q) / ln V`.

    Reads every drafted target row, and one row pair.

    `spend="certain"` spends the budget where the target is certain, `spend="uncertain"` where many tokens would do.

    Args:
        delta: the largest strength, as for `Cactus`.
        spend: "certain" or "uncertain".

    Raises:
        ValueError, TypeError: as for `Cactus`; another `spend`.
    """

    delta: float | torch.Tensor = 1.0
    spend: str = "certain"

    keeps_proportions = True
    accept = staticmethod(adaptive_accept)
    recover = staticmethod(proportional_recover)
    strengths = one_strength("delta")

    def __post_init__(self):
        check_strength("delta", self.delta, meaning=" (0 is SpS)")
        if self.spend not in ("certain", "uncertain"):
            raise ValueError(f'spend must be "certain" or "uncertain", got {self.spend!r}')

    @property
    def statistics(self) -> tuple:
        return ("certainty" if self.spend == "certain" else "relative entropy",)

    @property
    def name(self) -> str:
        return "adaptive" if self.spend == "certain" else "adaptive-uncertain"


DELTAS = (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0)
ODD_DELTAS = {"delta": (0.0, 1e-30, 1e-3, 0.05, 0.5, 1.0, 30.0, 3e38)}
register("sps", SpS)
register("cactus", Cactus, DELTAS, ODD_DELTAS)
register("cactus-kl", lambda delta=1.0: Cactus(delta, "kl"), DELTAS, ODD_DELTAS)
register("adaptive", AdaptiveCactus, DELTAS, ODD_DELTAS)
register("adaptive-uncertain", lambda delta=1.0: AdaptiveCactus(delta, "uncertain"), DELTAS, ODD_DELTAS)
