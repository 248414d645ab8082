"""Verification of a whole chain of drafted tokens. Its functions are elementwise, over `m`, as those of other rules."""

from dataclasses import dataclass

from .base import Rule
from .languages import torch_language as m
from .registry import register


def chance_with(chance, q_n, p_n):
    """P of a chain that goes on with n: min(P q_n / p_n, 1), and 0 where q_n is."""
    mass = chance * q_n
    less = mass < p_n
    return m.where(less, m.div_rn(mass, m.where(less, p_n, 1.0)), m.where(mass > 0.0, 1.0, 0.0))


def residual(chance, q, p):
    """What the token after a chain is drawn from, if nothing longer is kept: (P q - p)+."""
    return m.maximum(chance * q - p, 0.0)


def keeps(u, chance, total):
    """Whether a chain is kept that could be longer. total: Z, the sum of its residual."""
    return u * (total + (1.0 - chance)) < total


@dataclass(frozen=True)
class Block(Rule):
    """Block verification, lossless: the draft is judged as a whole, and no fewer tokens are expected than by SpS.

    Reads the row pairs of the drafted tokens from the last one down to where the draft stops.

    With P_0 = 1 and P_i = min(P_(i-1) q_i(x_i) / p_i(x_i), 1), the first i of m drafted tokens are kept, i being the largest
    with u_i (Z_i + 1 - P_i) < Z_i, where Z_i is the sum of (P_i q_(i+1) - p_(i+1))+; at i = m, with u_m < P_m. The next token
    is drawn from norm((P_i q_(i+1) - p_(i+1))+), after m from the bonus row. With m = 1 that is SpS.

    Source: Sun et al. 2024 (Block Verification Accelerates Speculative Decoding, arXiv 2403.10444).
    """

    name = "block"
    whole_draft = "block"
    lossless = True


register("block", Block, frontier=None)
