"""What a rule is. See `Rule`.

The two functions of a rule are elementwise, over a module `m` that has the names of `triton.language`: the host runs them over
numpy, the law over torch, the kernel with `triton.language` itself. They may call other functions of that kind.
"""

import dis
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch


class Solve(NamedTuple):
    """What b and c of the law clip(p, b q, c q) are solved for.

    what: "cap": c is the strength, b is such that the law sums to 1; "price": c / b is the strength; "kl": KL(q || law) is,
        in nats. b is the largest fp32 number at which no more is recovered than was rejected.
    strength: which of the rule's strengths that is.
    """

    what: str
    strength: int = 0

    @property
    def where_rejected(self) -> bool:
        """Whether it is solved after a drafted token was rejected; else before it is judged."""
        return self.what == "cap"


class Rule:
    """An acceptance rule: two functions, their strengths, and what they read of the rows. Nothing else of it is looked at.

    `accept(q_n, p_n, stat, *strengths) -> h_n` judges the drafted token n: it is accepted iff u * p_n < h_n, so with
    probability min(1, h_n / p_n). `recover(q, q_n, h_n, stat, *strengths) -> r` weighs every other token after a rejection:
    one is drawn from norm((r - p)+) without n; from norm(r) without n where `subtracts_draft` is False. Both are plain
    module-level functions over `m`.

        q           target probability of a token that is not n, in [0, 1]
        q_n, p_n    target and draft probability of the drafted token n, in [0, 1]
        h_n         what n was accepted with: that of `accept`, or less where a budget caps it
        stat        a tuple: the statistics named in `statistics`, or (b, c) of what `solves` names; None without any

    Attributes:
        name: what `resolve_rule` knows it by.
        statistics: names of row statistics, see `cactus_kernels.host.statistics`.
        solves: what is solved before the functions see a row pair, see `Solve`. A cap is solved where n was rejected only, so
            `accept` must not read its b. A price and a divergence are solved for drafted tokens with u * p_n >= q_n: since
            c >= 1, the others are accepted, and have b = c = 1.
        whole_draft: the name under which `cactus_kernels.backends` knows the verification of a rule that judges a draft as a
            whole and has neither function; None: token by token.
        lossless: whether what is emitted follows the target whatever the draft, so that nothing of a budget is ever spent.
        keeps_proportions: whether h_n >= min(p_n, q_n), and wherever p_n > q_n, r(x) is q(x) times a number in
            [(1 - h_n) / (1 - q_n), 1]: then a budget for the sequence can be kept.
        subtracts_draft: whether recovery takes the draft's probabilities off.
        strengths: the rule's strengths in the order its functions take them: numbers or fp32 tensors [B].
    """

    name: str
    accept: Callable[..., Any]
    recover: Callable[..., Any]
    statistics: tuple = ()
    solves: Solve | None = None
    whole_draft: str | None = None
    lossless: bool = False
    keeps_proportions: bool = False
    subtracts_draft: bool = True
    strengths: tuple = ()

    @property
    def reads_rows(self) -> bool:
        """Whether whole rows are read before a drafted token is judged, or before the rejected row is drawn from."""
        return bool(self.statistics or self.solves or self.whole_draft)


def bind(function, language, wrap=lambda bound: bound):
    """A function of a rule with `m` meaning `language`, and `wrap` applied to it and to every function that it calls."""
    names = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
    functions = {name: function.__globals__.get(name) for name in names}
    called = {name: bind(f, language, wrap) for name, f in functions.items() if isinstance(f, FunctionType)}
    return wrap(FunctionType(function.__code__, {**function.__globals__, **called, "m": language}, function.__name__))


def check_strength(name, value, least=0.0, most=math.inf, meaning=""):
    """Raise unless `value` is a number in [least, most], finite in fp32, or a float tensor [B].

    Entries of a tensor are not looked at here, which would wait for the device: a negative, infinite or NaN one makes its
    request invalid.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name} must be a number or a float tensor [B], got dtype {value.dtype}")
        if value.dim() != 1:
            raise ValueError(f"{name} must have shape [B], one strength a request, got {tuple(value.shape)}")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or a float tensor [B], got {type(value).__name__}")
    if not (least <= value <= most and math.isfinite(fp32(value))):
        wanted = f"finite and at least {least:g}" if most == math.inf else f"in [{least:g}, {most:g}]"
        raise ValueError(f"{name} must be {wanted}{meaning}, got {value}")


def as_strength(value):
    """A strength as the functions of a rule take it: an fp32 value or an fp32 tensor [B]."""
    return value.float() if isinstance(value, torch.Tensor) else fp32(value)


def one_strength(field):
    """`Rule.strengths` of a rule whose one strength is a field of that name."""
    return property(lambda self: (as_strength(getattr(self, field)),))


def fp32(x: float) -> float:
    """The nearest number in fp32, in operations that torch.compile carries out while it traces."""
    if not math.isfinite(x):
        return x
    step = 2.0 ** (max(math.frexp(x)[1], -125) - 24)
    nearest = round(x / step) * step
    return math.copysign(nearest if abs(nearest) < 2.0**128 else math.inf, x)
