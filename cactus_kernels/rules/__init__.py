"""Acceptance rules, each written once for every backend: see `Rule`."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

from .base import Rule, bind
from .budget import MOST, UNIT, cap, spend, within
from .cactus import AdaptiveCactus, Cactus, SpS
from .clipped import Capped, Interpolation, Lenience, Mentored, Optimal
from .coupled import Coupled
from .languages import torch_language as m
from .thresholds import TopK, Typical

__all__ = [
    "MOST",
    "UNIT",
    "AdaptiveCactus",
    "Cactus",
    "Capped",
    "Coupled",
    "Interpolation",
    "Lenience",
    "Mentored",
    "Optimal",
    "Rule",
    "SpS",
    "TopK",
    "Typical",
    "bind",
    "cap",
    "given",
    "m",
    "passed_on",
    "rebuild",
    "resolve_rule",
    "spend",
    "strength_name",
    "strengths",
    "table",
    "within",
]


def _top_k(k=10):
    return TopK(int(k) if isinstance(k, float) and k.is_integer() else k)  # as a strength, it comes as a float


# What makes a rule of each name: from its strengths, or with the default ones.
RULES: dict[str, Callable[..., Rule]] = {
    "sps": SpS,
    "cactus": Cactus,
    "cactus-kl": lambda delta=1.0: Cactus(delta, "kl"),
    "adaptive": AdaptiveCactus,
    "adaptive-uncertain": lambda delta=1.0: AdaptiveCactus(delta, "uncertain"),
    "capped": Capped,
    "lenience": Lenience,
    "optimal-cap": lambda cap=2.0: Optimal(cap=cap),
    "optimal-price": lambda price=2.0: Optimal(price=price),
    "mentored": Mentored,
    "interpolation": Interpolation,
    "typical": Typical,
    "top-k": _top_k,
    "coupled": Coupled,
}
CLASSES = {name: type(make()) for name, make in RULES.items()}


def table() -> str:
    """The rules as a table in Markdown, from their signatures and docstrings: README.md holds it."""
    lines = ["| rule | by name | what it does | reads |", "|---|---|---|---|"]
    for rule in (SpS, Cactus, AdaptiveCactus, Capped, Interpolation, Optimal, Mentored, Typical, TopK, Coupled):
        written = ", ".join(map(str, inspect.signature(rule).parameters.values()))
        written = re.sub(r": [^=,]+ = ", "=", written)
        names = ", ".join(f'`"{name}"`' for name in RULES if isinstance(resolve_rule(name), rule))
        what, *rest = (inspect.getdoc(rule) or "").split("\n\n")
        reads = next(part.removeprefix("Reads ").rstrip(".") for part in rest if part.startswith("Reads "))
        cells = (
            f"`{rule.__name__}({written})`",
            names,
            *(" ".join(x.split()).replace("|", "\\|") for x in (what, reads)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def strength_name(name: str) -> str | None:
    """What the strength is called, such as "delta", in the rule of that name: the first if there are two, None if none."""
    return next(iter(inspect.signature(RULES[name]).parameters), None)


def strengths() -> str:
    """What the strength of each rule is, with its default: the help of the command holds it."""
    rules: dict[tuple, list[str]] = {}
    for name, make in RULES.items():
        if what := strength_name(name):
            rules.setdefault((what, inspect.signature(make).parameters[what].default), []).append(name)
    return "; ".join(f"{what} of {', '.join(names)} ({default:g})" for (what, default), names in rules.items())


def given(rule: Rule) -> dict:
    """The fields of a rule of the package that were given, name -> value: its strength, and what differs from defaults."""
    values = [(f, getattr(rule, f.name)) for f in fields(cast(Any, rule)) if getattr(rule, f.name) is not None]
    return {f.name: value for i, (f, value) in enumerate(values) if i == 0 or value != f.default}


def resolve_rule(rule) -> Rule:
    """A rule from a `Rule` or its name (default strength). Raises ValueError or TypeError, naming it."""
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str):
        if rule in RULES:
            return RULES[rule]()
        raise ValueError(
            f"unknown rule {rule!r}: use one of {', '.join(map(repr, RULES))} or a Rule such as Cactus(0.5)"
        )
    raise TypeError(f"rule must be a Rule or its name, got {type(rule).__name__}")


def passed_on(rule: Rule) -> str:
    """The name from which, with its strengths, `rebuild` makes the rule again; of a rule that is not the package's own,
    one that `rebuild` refuses."""
    return rule.name if CLASSES.get(rule.name) is type(rule) else f"{rule.name} of the class {type(rule).__name__}"


def rebuild(name: str, strengths) -> Rule:
    """A rule of the package from what `passed_on` gave and its strengths. Raises ValueError for another one."""
    if name not in RULES:
        raise ValueError(
            f"torch.compile takes the rules {', '.join(RULES)} of the package, got {name}: call verify outside of it"
        )
    return RULES[name](*strengths)
