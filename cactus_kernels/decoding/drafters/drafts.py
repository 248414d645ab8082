"""What a drafter hands to the loop."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ...sampling import RowStats
from ..cache.rollback import RollbackModel


@dataclass(frozen=True)
class DraftRows:
    """What drafts were drawn from, as verification takes it: probabilities, or logits with their statistics.

    Nothing at all: each draft was certain (one-hot).

    Attributes:
        probs, logits: [B, m, V]. stats: `RowStats` [B, m] of the logits.
    """

    probs: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    stats: RowStats | None = None


CERTAIN = DraftRows()


@dataclass(frozen=True)
class Drafts:
    """The drafts of a round.

    Attributes:
        token_ids: int64 [B, m], -1 beyond a row's number of drafts.
        rows: what each was drawn from.
    """

    token_ids: torch.Tensor
    rows: DraftRows = CERTAIN


class Drafter(Protocol):
    """Where drafts come from. `model` is the draft model over the batch; None: there is none."""

    @property
    def model(self) -> RollbackModel | None: ...

    def draft(self, offset: torch.Tensor) -> Drafts:
        """The drafts of a round, which are written behind each row's text in the batch as well.

        A drafter that has fewer for a row than `batch.drafts` says so to the batch (`batch.plan`).

        offset: int64 [B], rows that each request has drafted or verified so far, as in `verify`.
        """
        ...
