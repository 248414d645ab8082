"""Rules that accept or reject a drafted token by the target alone, without a coin."""

import math
from dataclasses import dataclass, replace

import torch

from .base import Rule, as_strength, check_strength, one_strength
from .elementary import exp
from .languages import torch_language as m
from .registry import register


def typical_accept(q_n, p_n, stat, epsilon, alpha):
    entropy, largest = stat
    threshold = m.minimum(exp(-entropy) * m.minimum(alpha, 1.0), epsilon)
    # The largest probability is at least e^-H: without rounding, the second condition adds a row of equal ones alone.
    accepted = (q_n > threshold) | (q_n >= largest)
    return m.where(accepted, m.where(q_n > 0.0, 1.0, 0.0), 0.0)


def typical_recover(q, q_n, h_n, stat, epsilon, alpha):
    return m.where(q >= stat[1], q, 0.0)


def top_k_accept(q_n, p_n, stat, k):
    return m.where(q_n >= stat[0], m.where(q_n > 0.0, 1.0, 0.0), 0.0)


def top_k_recover(q, q_n, h_n, stat, k):
    return m.where(q >= stat[0], q, 0.0)


def top_k_recover_upstream(q, q_n, h_n, stat, k):
    return m.where(q >= stat[0], m.where(q > 0.0, 1.0, 0.0), 0.0)


@dataclass(frozen=True, eq=False)
class Typical(Rule):
    """Typical acceptance, lossy: n is accepted iff `q_n > min(epsilon, alpha e^-H(q))`; else the target's most likely token.

    Reads every drafted target row.

    With one parameter, `alpha = sqrt(epsilon)` (TAS); with two, Medusa's form. Deterministic: p does not count, and where
    nothing is accepted the text is that of greedy decoding, whatever the temperature. Tokens that tie for most likely come
    out equally often; the most likely token is always accepted, since its probability is at least e^-H. H is the entropy of
    the target row in nats, within 2e-6 of its size.

    Args:
        epsilon: the highest threshold, a number in [0, 1] or a float tensor [B].
        alpha: a number in [0, 1] or a float tensor [B], larger entries of which count as 1; None: sqrt(epsilon).

    Raises:
        ValueError, TypeError: as for `Cactus`.

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774) for the criterion; vLLM's typical acceptance sampler (removed in July
    2025) for the recovered token and for alpha = sqrt(epsilon) by default. vLLM added 1e-5 inside its logarithm.
    """

    epsilon: float | torch.Tensor = 0.09
    alpha: float | torch.Tensor | None = None

    name = "typical"
    accept = staticmethod(typical_accept)
    recover = staticmethod(typical_recover)
    statistics = ("entropy", "largest")
    subtracts_draft = False

    def __post_init__(self):
        check_strength("epsilon", self.epsilon, most=1.0)
        if self.alpha is not None:
            check_strength("alpha", self.alpha, most=1.0)

    @property
    def strengths(self) -> tuple:
        epsilon = as_strength(self.epsilon)
        if self.alpha is not None:
            return epsilon, as_strength(self.alpha)
        return epsilon, m.sqrt_rn(epsilon) if isinstance(epsilon, torch.Tensor) else as_strength(math.sqrt(epsilon))


@dataclass(frozen=True)
class TopK(Rule):
    """Top-k acceptance, lossy: n is accepted iff q_n is among the target's k largest; else a token is drawn from those.

    Reads every drafted target row.

    So the output is always one of the k tokens that the target finds most likely; all that tie with the k-th count.
    Deterministic but for recovery, p does not count in acceptance.

    Args:
        k: an int, at least 1. From the vocabulary's size on, every token that the target allows is accepted.
        recovery: "target", from q among the k; or "upstream", from norm((1[x among the k] - p(x))+), as the code published
            with Cactus has it, where all of the k weigh nearly alike.

    Raises:
        TypeError: k is not an int. ValueError: k below 1, or 2^31 and more; another recovery.
    """

    k: int = 10
    recovery: str = "target"

    accept = staticmethod(top_k_accept)
    strengths = one_strength("k")

    @property
    def name(self) -> str:
        return "top-k" if self.recovery == "target" else "top-k-upstream"

    @property
    def recover(self):
        return top_k_recover if self.recovery == "target" else top_k_recover_upstream

    @property
    def subtracts_draft(self) -> bool:
        return self.recovery == "upstream"

    @property
    def statistics(self) -> tuple:
        return (("k-th largest", self.k),)

    def __post_init__(self):
        if self.recovery not in ("target", "upstream"):
            raise ValueError(f'recovery must be "target" or "upstream", got {self.recovery!r}')
        if isinstance(self.k, bool) or not isinstance(self.k, int):
            raise TypeError(f"k must be an int, got {self.k!r}")
        if not 1 <= self.k < 2**31:
            raise ValueError(f"k must be at least 1 and fit in 32 bits, got {self.k}")


def _top_k(k=10):
    return TopK(int(k) if isinstance(k, float) and k.is_integer() else k)  # as a strength, it comes as a float


def _top_k_upstream(k=10):
    return replace(_top_k(k), recovery="upstream")


ODD_THRESHOLDS = {"epsilon": (0.0, 1e-6, 0.09, 0.5, 0.9, 1.0), "alpha": (None, None, 0.0, 0.3, 0.99, 1.0)}
register("typical", Typical, (0.5, 0.3, 0.2, 0.09, 0.03, 0.01, 0.001), ODD_THRESHOLDS)
KS, ODD_KS = (1, 2, 3, 5, 10, 20, 50), {"k": (1, 2, 3, 10, 1000, 5000)}
register("top-k", _top_k, KS, ODD_KS)
register("top-k-upstream", _top_k_upstream, KS, ODD_KS)
