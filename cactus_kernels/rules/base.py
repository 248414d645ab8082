"""What a rule is. See `Rule`.

A body is elementwise, over a module `m` that has the names of `triton.language`: the reference runs it with
`languages.torch_language`, the kernel with `triton.language` itself. A body may call other functions of that kind.
"""

import dis
import math
from types import FunctionType

import torch


class Rule:
    """An acceptance rule: a body `h`, its strengths, and what it reads of the rows. Nothing else of it is looked at.

    The body `h(q, q_n, p_n, is_drafted, stat, *strengths)` is a plain module-level function over `m`:

        q           target probability of the token asked about, in [0, 1]
        q_n, p_n    target and draft probability of the drafted token n, in [0, 1]
        is_drafted  True: the token asked about is n itself; False: it is another one
        stat        a tuple of the statistics named in `statistics`, None without any

    Asked about n, it returns h_n: n is accepted iff u * p_n < h_n, so with probability min(1, h_n / p_n). Asked about another
    token x, it returns r(x): after a rejection the token is drawn from norm((r - p)+) without n; from norm(r) without n where
    `subtracts_draft` is False.

    Attributes:
        name: what `resolve_rule` knows it by.
        statistics: names of row statistics, see `cactus_kernels.row_statistics`.
        solved: "drafted" or "rejected": which row pairs `cactus_kernels.clip` is solved for before the body sees them; its
            `stat` is then (b, c). Of the drafted ones, only where u * p_n >= q_n: since c >= 1, the others are accepted, and
            have b = c = 1. Of the rejected ones b alone is new to the body: h_n must be min(c q_n, 1), as that of `Capped`.
            None: not solved.
        form: what the one strength of a rule that is solved means: "cap" is c, "price" is c / b, "kl" is KL(q || P) in nats.
            "rejected" needs "cap". None: not solved.
        lossless: whether what is emitted follows the target whatever the draft, so that nothing of a budget is ever spent.
        keeps_proportions: whether h_n >= min(p_n, q_n), and wherever p_n > q_n, r(x) is q(x) times a number in
            [(1 - h_n) / (1 - q_n), 1]: then a budget for the sequence can be kept.
        subtracts_draft: whether recovery takes the draft's probabilities off.
    """

    name: str
    h: staticmethod
    statistics: tuple = ()
    solved: str | None = None
    form: str | None = None
    lossless: bool = False
    keeps_proportions: bool = False
    subtracts_draft: bool = True

    @property
    def strengths(self) -> tuple:
        """The rule's strengths in the order its body takes them: floats (fp32 values) or fp32 tensors [B]."""
        return ()


def bind(body, language, wrap=lambda function: function):
    """The body of a rule with `m` meaning `language`, and `wrap` applied to it and to every function that it calls."""
    names = {i.argval for i in dis.get_instructions(body) if i.opname == "LOAD_GLOBAL"}
    functions = {name: body.__globals__.get(name) for name in names}
    called = {name: bind(f, language, wrap) for name, f in functions.items() if isinstance(f, FunctionType)}
    return wrap(FunctionType(body.__code__, {**body.__globals__, **called, "m": language}, body.__name__))


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
    """A strength as bodies take it: an fp32 value or an fp32 tensor [B]."""
    return value.float() if isinstance(value, torch.Tensor) else fp32(value)


def fp32(x: float) -> float:
    """The nearest number in fp32, in operations that torch.compile carries out while it traces."""
    if not math.isfinite(x):
        return x
    step = 2.0 ** (max(math.frexp(x)[1], -125) - 24)
    nearest = round(x / step) * step
    return math.copysign(nearest if abs(nearest) < 2.0**128 else math.inf, x)
