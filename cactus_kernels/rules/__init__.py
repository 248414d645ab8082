"""Acceptance rules, each written once for every backend: see `Rule`."""

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
    "resolve_rule",
    "spend",
    "within",
]

# By name, with their default strengths.
RULES = {
    "sps": SpS,
    "cactus": Cactus,
    "cactus-kl": lambda: Cactus(divergence="kl"),
    "adaptive": AdaptiveCactus,
    "capped": Capped,
    "lenience": Lenience,
    "optimal": lambda: Optimal(price=2.0),
    "mentored": Mentored,
    "interpolation": Interpolation,
    "typical": Typical,
    "top-k": TopK,
    "coupled": Coupled,
}


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
