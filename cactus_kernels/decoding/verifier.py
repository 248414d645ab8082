"""Verification of a batch's drafts, round after round: each row's random stream, and what is left of its budget."""

import torch

from ..contract import VerifyOutput
from ..sampling import Sampling
from ..verification import verify_from_logits
from .batch import Batch
from .call import Call
from .drafters.drafts import Drafts
from .scorer import arg_max


class Verifier:
    """Accepts and recovers by a call's rule, or by the target's arg max.

    Attributes:
        seed: int64 [B]. offset: int64 [B], rows that each request has drafted or verified so far (tokens, with `Coupled`).
        left: nats of each row's budget, float64 [B]; None: no budget.
    """

    def __init__(self, call: Call, batch: Batch, sampling: Sampling | None):
        """sampling: what the target's scores stand for; None: greedy decoding."""
        self.batch, self.rule, self.sampling, self.backend = batch, call.rule, sampling, call.backend
        self.seed = call.seeds(batch.size)
        self.offset = torch.zeros(batch.size, dtype=torch.int64, device=batch.device)
        self.left = self.budget = call.budget

    def verify(self, scores: torch.Tensor, drafts: Drafts) -> VerifyOutput:
        """scores: [B, m + 1, V], the target's. The random words of every drafted row are spent, also of rejected ones."""
        if self.sampling is None:
            return verify_greedy(arg_max(scores), drafts.token_ids)
        rows = drafts.rows
        verified = verify_from_logits(
            scores, rows.logits, drafts.token_ids, self.rule, sampling=self.sampling, draft_probs=rows.probs,
            draft_stats=rows.stats, budget=self.left, seed=self.seed, offset=self.offset, backend=self.backend,
        )  # fmt: skip
        if self.left is not None and verified.spent is not None:
            self.left = self.left - verified.spent
        # Of a coupled draw the words are those of the token's position, whatever was drafted.
        coupled = self.rule.whole_draft == "coupled"
        self.offset = self.offset + ((verified.token_ids >= 0).sum(1) if coupled else self.batch.num_drafts + 1)
        return verified

    @property
    def spent(self) -> list[float] | None:
        """Nats that each row has spent of its budget; None without one."""
        return None if self.budget is None or self.left is None else (self.budget - self.left).tolist()


def verify_greedy(target_token_ids, draft_token_ids) -> VerifyOutput:
    """Verification at temperature 0: a drafted token is accepted iff it is the target's arg max.

    target_token_ids: int64 [B, m + 1], -1 where a row is bad. draft_token_ids: int64 [B, m], -1 where a draft has ended.
    """
    m = draft_token_ids.shape[1]
    accepted = (target_token_ids[:, :m] == draft_token_ids) & (draft_token_ids >= 0)
    num_accepted = accepted.long().cumprod(1).sum(1)
    j = torch.arange(m + 1, dtype=torch.int64, device=target_token_ids.device)
    token_ids = torch.where(j <= num_accepted[:, None], target_token_ids, -1)
    valid = target_token_ids.gather(1, num_accepted[:, None])[:, 0] >= 0
    return VerifyOutput(token_ids, num_accepted.int(), valid)
