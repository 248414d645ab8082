"""Acceptance rules, each written once for every backend.

A rule names a distribution h. The drafted token n ~ p is accepted iff u * p(n) < h(n); otherwise a token is drawn from
norm((h - p)+). The body `h(q, q_n, p_n, is_drafted, stat, *strengths)` is elementwise, over a module `m` that has the
names of `triton.language`: the reference runs it with `torch_language`, the kernel with `triton.language` itself. It
returns h at tokens whose target probability is q, where

    q           target probability of the token asked about, in [0, 1]
    q_n, p_n    target and draft probability of the drafted token, in [0, 1]
    is_drafted  True: the token asked about is n itself; False: it is another one
    stat        a statistic of the target row (None for the rules here)
"""

import math
from dataclasses import dataclass
from types import FunctionType

import torch

from . import torch_language as m


def sps_h(q, q_n, p_n, is_drafted, stat):
    return q


def cactus_h(q, q_n, p_n, is_drafted, stat, delta):
    # The product of the q's comes first: it is at most 1/2, so no finite delta overflows.
    h_n = m.minimum(q_n + m.sqrt_rn(2.0 * q_n * (1.0 - q_n) * delta), 1.0)
    # q_n = 1 gives h_n = 1 and a scale of 0, not 0/0. The scale multiplies q as a whole: at delta = 0 it is exactly 1.
    scale = m.div_rn(1.0 - h_n, m.where(q_n < 1.0, 1.0 - q_n, 1.0))
    return m.where(is_drafted, h_n, q * scale)


class Rule:
    """An acceptance rule: its body `h` and its strengths. See `SpS` and `Cactus`."""

    name: str
    h: staticmethod

    @property
    def strengths(self) -> tuple:
        """The rule's strengths in the order its body takes them: floats (fp32 values) or fp32 tensors [B]."""
        return ()


@dataclass(frozen=True)
class SpS(Rule):
    """Speculative sampling, lossless: `h = q`, so emitted tokens follow the target exactly.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """

    name = "sps"
    h = staticmethod(sps_h)


@dataclass(frozen=True, eq=False)
class Cactus(Rule):
    """Cactus, lossy: `h_n = min(q_n + sqrt(2 delta q_n (1 - q_n)), 1)`, the other tokens scaled to make h sum to 1.

    `h_n >= q_n`, so it accepts at least what SpS accepts; `delta = 0` is SpS. `delta` bounds the divergence of h for one
    drafted token (chi-square at most 2 delta), not the law of the emitted token: `cactus_kernels.law` gives that exactly.

    Args:
        delta: strength, finite and >= 0, or a float tensor [B] with one for each request. A bad value in a tensor makes
            that request invalid, since looking at it here would wait for the device.

    Raises:
        ValueError: a number that is negative, NaN or infinite in fp32; a tensor that is not one-dimensional.
        TypeError: neither a number nor a floating-point tensor.

    Source: Hao & Mou 2026 (arXiv 2604.04987), the closed form of gamma*.
    """

    delta: float | torch.Tensor = 1.0

    name = "cactus"
    h = staticmethod(cactus_h)

    def __post_init__(self):
        if isinstance(self.delta, torch.Tensor):
            if not self.delta.is_floating_point():
                raise TypeError(f"delta must be a number or a float tensor [B], got dtype {self.delta.dtype}")
            if self.delta.dim() != 1:
                raise ValueError(f"delta must have shape [B], one strength a request, got {tuple(self.delta.shape)}")
            return
        if isinstance(self.delta, bool) or not isinstance(self.delta, (int, float)):
            raise TypeError(f"delta must be a number or a float tensor [B], got {type(self.delta).__name__}")
        if not (self.delta >= 0 and math.isfinite(_fp32(self.delta))):
            raise ValueError(f"delta must be finite and at least 0 (0 is SpS), got {self.delta}")

    @property
    def strengths(self) -> tuple:
        if isinstance(self.delta, torch.Tensor):
            return (self.delta.float(),)
        return (_fp32(self.delta),)


def resolve_rule(rule) -> Rule:
    """A rule from a `Rule` or its name ("sps", "cactus": default strength). Raises ValueError or TypeError, naming it."""
    if isinstance(rule, Rule):
        return rule
    rules = {r.name: r for r in (SpS, Cactus)}
    if isinstance(rule, str):
        if rule in rules:
            return rules[rule]()
        raise ValueError(
            f"unknown rule {rule!r}: use one of {', '.join(map(repr, rules))} or a Rule such as Cactus(0.5)"
        )
    raise TypeError(f"rule must be a Rule or its name, got {type(rule).__name__}")


def rebuild(name: str, strengths) -> Rule:
    """A rule of the package from its name and its strengths. Raises ValueError for another one."""
    rules = {r.name: r for r in (SpS, Cactus)}
    if name not in rules:
        raise ValueError(f"torch.compile takes the rules {', '.join(rules)}, got {name!r}: call verify outside of it")
    return rules[name](*strengths)


def bind(body, language):
    """The body of a rule with `m` meaning `language`."""
    return FunctionType(body.__code__, {**body.__globals__, "m": language}, body.__name__)


def _fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).float().item()
