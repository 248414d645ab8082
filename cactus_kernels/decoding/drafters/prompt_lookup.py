"""Drafts from the text itself: what followed its last tokens where they stood before."""

import torch

from ..batch import Batch
from .drafts import Drafts


class PromptLookup:
    """Tokens that followed the row's last n-gram where it stood before: the longest n-gram, the latest place.

    (Saxena, "Prompt Lookup Decoding", 2023, takes the first place; `generate` does too.) A place with as many tokens
    after it as the row may draft goes before a later one with fewer. Rows without a match draft nothing.
    """

    model = None

    def __init__(self, batch: Batch, max_ngram_size: int):
        self.batch, self.max_ngram_size = batch, max_ngram_size

    def draft(self, offset) -> Drafts:
        """`Drafter.draft`; nothing is drawn, so that `offset` does not matter."""
        batch = self.batch
        start = self._continuations()
        count = torch.where(start > 0, (batch.lengths[:, None] - start).minimum(batch.num_drafts[:, None]), 0)[:, 0]
        batch.plan(count.tolist())
        j = torch.arange(max(batch.drafts), dtype=torch.int64, device=batch.device)
        ids = batch.text.gather(1, start + j)
        batch.write(ids)
        return Drafts(ids.masked_fill(j >= count[:, None], -1))

    def _continuations(self):
        """Where in its text each row's drafts start, int64 [B, 1]; 0: there is no match."""
        batch = self.batch
        text, lengths = batch.text[:, : max(batch.length)], batch.lengths[:, None]
        start = torch.zeros_like(lengths)
        for n in range(min(self.max_ngram_size, text.shape[1] - 1), 0, -1):
            last = text.gather(1, (lengths - n + torch.arange(n, dtype=torch.int64, device=batch.device)).clamp(min=0))
            following = torch.arange(n, text.shape[1] + 1, dtype=torch.int64, device=batch.device)
            match = (text.unfold(1, n, 1) == last[:, None]).all(-1) & (following < lengths)
            whole = match & (following + batch.num_drafts[:, None] <= lengths)
            latest = (whole * following).amax(1, keepdim=True)
            longest = following[match.int().argmax(1)][:, None]
            found = torch.where(whole.any(1, keepdim=True), latest, longest)
            start = torch.where((start == 0) & match.any(1, keepdim=True), found, start)
        return start
