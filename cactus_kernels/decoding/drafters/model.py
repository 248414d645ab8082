"""Drafts from a draft model."""

import torch

from ..cache.rollback import RollbackModel
from ..cache.support import table_positions
from ..scorer import Scorer, arg_max
from .drafts import CERTAIN, Drafts
from .sampler import DraftSampler


class ModelDrafter:
    """Tokens drawn one by one from a draft model."""

    def __init__(self, scorer: Scorer, sampler: DraftSampler | None):
        """scorer: the draft model over the batch. sampler: None for greedy decoding."""
        self.scorer, self.sampler = scorer, sampler
        self.reads_prompt, self.unread = True, 2
        self.positions = table_positions(scorer.model.model)

    @property
    def model(self) -> RollbackModel:
        return self.scorer.model

    def draft(self, offset) -> Drafts:
        """`Drafter.draft`."""
        batch, sampler = self.scorer.batch, self.sampler
        self._stop_where_positions_end()
        m = max(batch.drafts)
        if not m:
            self.unread += 1  # the round gives each row one token
            return Drafts(torch.empty((batch.size, 0), dtype=torch.int64, device=batch.device))
        if sampler:
            sampler.start(offset, m)
        # The last two tokens, since the draft has not seen the last one that was accepted when all were. It writes
        # over what it had, so every row may do the same.
        tokens, positions = batch.block(max(batch.length) if self.reads_prompt else self.unread, 0)
        self.unread = 2
        if positions is not None and self.positions is not None:
            positions = positions.masked_fill(positions >= self.positions, -1)  # of rows that draft no more
        _, draft_positions = batch.block(0, m)
        self.reads_prompt = False
        drafted = []
        for j in range(m):
            scores = self.scorer.scores(self.scorer.logits(tokens, positions, ahead=j, keep=1), ahead=j)[:, 0]
            token = sampler.draw(scores, j) if sampler else arg_max(scores)
            drafted.append(token)
            tokens = token.clamp(min=0)[:, None]
            positions = draft_positions if draft_positions is None else draft_positions[:, j : j + 1]
            batch.write(tokens, j)
        steps = torch.arange(m, dtype=torch.int64, device=batch.device)
        ids = torch.stack(drafted, 1).masked_fill(steps >= batch.num_drafts[:, None], -1)
        return Drafts(ids, sampler.drawn_from() if sampler else CERTAIN)

    def _stop_where_positions_end(self):
        """A row whose text has come past the draft's last position drafts no more; the target goes on alone."""
        if self.positions is not None:
            batch = self.scorer.batch
            # The first draft comes after the row's last token.
            left = [max(self.positions - n + 1, 0) for n in batch.length]
            batch.plan([min(pair) for pair in zip(batch.drafts, left, strict=True)])
