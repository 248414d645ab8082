"""A rule of one's own, checked: its functions make sense, and the backends agree on it."""

import inspect
from types import FunctionType

import torch

from ..host import statistics
from ..rules import Rule
from .fuzz import fuzz_case
from .parity import Place, best_backend, difference


def check_rule(rule: Rule, *, distribution: bool = True, cases: int = 20, second: Place | None = None) -> bool:
    """Check a rule of one's own: its functions make sense, and both backends give the same tokens, bit for bit.

    What a GPU refuses, such as a method of arrays, and what it computes otherwise, such as a plain division, shows on a GPU or
    in the interpreter alone.

    Args:
        rule: a `Rule` whose strengths are numbers.
        distribution: whether h_n and r(x) of the other tokens must sum to 1, as for SpS and Cactus. False for a rule that
            recovers from weights which are not its h off n, such as Capped.
        cases: fuzzed batches to compare on.
        second: (backend, device) to compare with torch on the CPU, such as ("triton", "cuda"); None: triton on a GPU where
            there is one, else in the interpreter where TRITON_INTERPRET=1 was set; without triton nothing is compared.

    Returns:
        Whether the backends were compared.

    Raises:
        TypeError: not a `Rule`, one without a name, strengths that are tensors, or functions that are no module-level ones of
            (q_n, p_n, stat, *strengths) and (q, q_n, h_n, stat, *strengths).
        ValueError: what is wrong, with the values that show it.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be a Rule, got {type(rule).__name__}")
    if any(not isinstance(s, float) for s in rule.strengths):
        raise TypeError(f"check_rule takes a rule whose strengths are floats, got {rule.strengths}")
    if not isinstance(getattr(rule, "name", None), str):
        raise TypeError(f"{type(rule).__name__} must have a name, a str")
    _check_signature(rule)
    if rule.solves is None:
        _check_body(rule, distribution)
    if second is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if best_backend(device) != "triton":
            return False
        second = "triton", device.type
    for seed in range(cases):
        case = {name: value for name, value in fuzz_case(seed).items() if name != "budget"} | {"rule": rule}
        found = difference(case, second=second)
        if found is not None:
            raise ValueError(f"the backends differ on fuzz_case({seed}): {found}")
    return True


def _check_signature(rule: Rule) -> None:
    for name, takes in (("accept", "q_n, p_n, stat"), ("recover", "q, q_n, h_n, stat")):
        function, count = getattr(rule, name, None), len(takes.split(",")) + len(rule.strengths)
        if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
            raise TypeError(f"{rule.name}.{name} must be staticmethod(a function defined by def), got {function!r}")
        if function.__code__.co_argcount != count:
            raise TypeError(
                f"{rule.name}.{name} must take ({takes}, *strengths), {count} arguments with its "
                f"{len(rule.strengths)} strengths, got {inspect.signature(function)}"
            )


def _check_body(rule: Rule, distribution: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for V in (1, 2, 5, 50):
        p, q = (3 * torch.randn(2, 30, V, generator=generator, dtype=torch.float32, device="cpu")).softmax(-1)
        q[:5] *= torch.rand(5, V, generator=generator, dtype=torch.float32, device="cpu") < 0.5
        stat = tuple(statistics.of_rows(name, q)[:, None] for name in rule.statistics) or None
        for n in range(V):
            q_n, p_n = q[:, n, None], p[:, n, None]
            h_n = rule.accept(q_n, p_n, stat, *rule.strengths)
            r = rule.recover(q, q_n, h_n, stat, *rule.strengths)
            rest = r.sum(1, keepdim=True) - r[:, n, None]
            wrong = {
                "h_n must be in [0, 1]": ~((h_n >= 0) & (h_n <= 1)),
                "r must be finite and >= 0": ~((r >= 0) & (r < float("inf"))).all(1, keepdim=True),
            }
            if distribution:
                # Where q holds nothing but n, or sums to less than 1, there is no h to give.
                whole = ((q.sum(1, keepdim=True) - 1).abs() < 1e-5) & (q_n < 1 - 1e-5)
                wrong["h_n and r of the other tokens must sum to 1"] = whole & ((h_n + rest - 1).abs() > 1e-4)
            for what, where in wrong.items():
                if where.any():
                    i = int(where.flatten().nonzero()[0])
                    raise ValueError(
                        f"{rule.name}: {what}, got h_n {h_n[i].item():g}, a sum of {rest[i].item():g} elsewhere, at "
                        f"q_n {q_n[i].item():g}, p_n {p_n[i].item():g}"
                    )
