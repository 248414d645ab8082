"""Drafts from a draft model."""

import torch

from ..cache.rollback import RollbackModel
from ..scorer import Scorer, arg_max
from .drafts import CERTAIN, Drafts
from .sampler import DraftSampler


class ModelDrafter:
    """Tokens drawn one by one from a draft model."""

    def __init__(self, scorer: Scorer, sampler: DraftSampler | None):
        """scorer: the draft model over the batch. sampler: None for greedy decoding."""
        self.scorer, self.sampler = scorer, sampler
        self.reads_prompt = True

    @property
    def model(self) -> RollbackModel:
        return self.scorer.model

    def draft(self, offset) -> Drafts:
        """`Drafter.draft`."""
        batch, sampler = self.scorer.batch, self.sampler
        m = max(batch.drafts)
        if not m:
            return Drafts(torch.empty((batch.size, 0), dtype=torch.int64, device=batch.device))
        if sampler:
            sampler.start(offset, m)
        # The last two tokens, since the draft has not seen the last one that was accepted when all were. It writes
        # over what it had, so every row may do the same.
        tokens, positions = batch.block(max(batch.length) if self.reads_prompt else 2, 0)
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
