"""Acceptance rules, each written once for every backend: see `Rule`."""

import inspect
import re

from .. import torch_language as m
from .base import Rule, bind
from .budget import MOST, UNIT, cap, spend, within
from .cactus import AdaptiveCactus, Cactus, SpS
from .clipped import Capped, Interpolation, Lenience, Mentored, Optimal
from .coupled import Coupled
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
    "m",
    "rebuild",
    "resolve_rule",
    "spend",
    "table",
    "within",
]

# What makes a rule of each name: from its strengths, or with the default ones.
RULES = {
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
    "top-k": lambda k=10: TopK(int(k)),
    "coupled": Coupled,
}


def table() -> str:
    """The rules as a table in Markdown, from their signatures and docstrings: README.md holds it."""
    lines = ["| rule | by name | what it does | reads |", "|---|---|---|---|"]
    for rule in (SpS, Cactus, AdaptiveCactus, Capped, Interpolation, Optimal, Mentored, Typical, TopK, Coupled):
        written = ", ".join(map(str, inspect.signature(rule).parameters.values()))
        written = re.sub(r": [^=,]+ = ", "=", written)
        names = ", ".join(f'`"{name}"`' for name in RULES if isinstance(resolve_rule(name), rule))
        what, *rest = inspect.getdoc(rule).split("\n\n")
        reads = next(part.removeprefix("Reads ").rstrip(".") for part in rest if part.startswith("Reads "))
        cells = (
            f"`{rule.__name__}({written})`",
            names,
            *(" ".join(x.split()).replace("|", "\\|") for x in (what, reads)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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


def rebuild(name: str, strengths) -> Rule:
    """A rule of the package from its name and its strengths. Raises ValueError for another one."""
    if name not in RULES:
        raise ValueError(f"torch.compile takes the rules {', '.join(RULES)}, got {name!r}: call verify outside of it")
    return RULES[name](*strengths)
