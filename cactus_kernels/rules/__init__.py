"""Acceptance rules, each written once for every backend: see `Rule`."""

from .base import Rule, Solve, bind
from .block import Block
from .budget import MOST, UNIT, cap, spend
from .cactus import AdaptiveCactus, Cactus, SpS, room
from .clipped import Capped, Interpolation, Lenience, Mentored, Optimal
from .coupled import Coupled
from .languages import torch_language as m
from .registry import RULES, given, passed_on, rebuild, resolve_rule, strengths, table
from .thresholds import TopK, Typical

__all__ = [
    "MOST",
    "RULES",
    "UNIT",
    "AdaptiveCactus",
    "Block",
    "Cactus",
    "Capped",
    "Coupled",
    "Interpolation",
    "Lenience",
    "Mentored",
    "Optimal",
    "Rule",
    "Solve",
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
    "room",
    "spend",
    "strengths",
    "table",
]
