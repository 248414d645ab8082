"""Bad values that verification met in a round, and whose they are."""

import math

import torch

from ..contract import VerifyOutput
from .batch import Batch, Emitted
from .drafters.drafts import Drafts
from .scorer import Scored

BAD = "NaN, +inf or nothing but -inf"


def raise_if_bad(batch: Batch, verified: VerifyOutput, emitted: list[Emitted], drafts: Drafts, scored: Scored) -> None:
    """Raises ValueError, naming the requests and whose the bad values are, where one counts: not past a row's end."""
    positions = {}
    for b, (valid, drafted) in enumerate(zip(verified.valid.tolist(), drafts.token_ids.tolist(), strict=True)):
        j = emitted[b].accepted
        # A draft that ended before its time did so on bad scores.
        ended_early = j < batch.drafts[b] and drafted[j] < 0
        if not emitted[b].ended and (not valid or ended_early):
            positions[b] = j
    if positions:
        raise ValueError(_message(positions, batch, drafts, scored))


def _message(positions, batch, drafts, scored):
    """positions: of each row with a bad value, the drafted position of it."""
    rows_of: dict[str, list[int]] = {}
    for b, j in positions.items():
        if not _is_law(scored.logits[b, j]):
            whose = f"the target's own logits are {BAD}"
        elif not _is_law(scored.scores[b, j]):
            whose = f"the target's own logits are good, and {BAD} after the logits processors"
        elif j < batch.drafts[b] and drafts.token_ids[b, j] < 0:
            whose = f"the draft's scores are {BAD}, those of the target are good"
        else:
            whose = "the scores are good, but the rule makes no law of them"
        rows_of.setdefault(whose, []).append(b)
    found = [whose + (f" in requests {rows}" if len(rows_of) > 1 else "") for whose, rows in rows_of.items()]
    at = list(positions.values())
    return f"bad values in requests {list(positions)} at drafted positions {at}: {'; '.join(found)}"


def _is_law(scores: torch.Tensor) -> bool:
    """Whether scores [V] make a distribution."""
    return math.isfinite(scores.float().logsumexp(-1).item())
