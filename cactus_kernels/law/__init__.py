"""The exact law of the token emitted at one position, and how far it is from the target's."""

from .exact import (
    Divergences,
    Positions,
    acceptance,
    chi_square,
    divergences,
    emitted,
    kl,
    total_variation,
)

__all__ = [
    "Divergences",
    "Positions",
    "acceptance",
    "chi_square",
    "divergences",
    "emitted",
    "kl",
    "total_variation",
]
