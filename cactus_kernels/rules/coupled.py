"""Verification by shared noise."""

from dataclasses import dataclass

from .base import Rule
from .registry import register


@dataclass(frozen=True)
class Coupled(Rule):
    """Coupling by shared noise, lossless: the target's own draw at every position, accepted while it equals the draft's.

    Reads every target row.

    Target and draft draw with the same random words, those of the token's position: `offset` is the number of tokens before
    it, and advances by the tokens emitted. So the text is a function of the seed and of the target's rows alone: the same
    with speculation on or off, whatever the draft and its length. Draft probabilities are not needed. Its price: a lower
    acceptance than `sum min(p, q)` (.86 for .91, .71 for .76, .49 for .62 on rows like a language model's), and a draw on
    m + 1 rows instead of one.

    Source: coupling by a shared exponential race, arXiv 2408.07978.
    """

    name = "coupled"
    whole_draft = "coupled"
    lossless = True


register("coupled", Coupled)
