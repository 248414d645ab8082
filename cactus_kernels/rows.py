"""Drawing tokens from rows of probabilities, outside verification: drafts and plain decoding."""

from dataclasses import replace

import torch

from . import philox, race_torch, verify_torch
from .rules import SpS
from .verify import PROB_DTYPES, Inputs, VerifyOutput, _check_tensor, choose_backend, run

WORDS_AHEAD = 1 << 16  # random words made at once for rows to come: enough to amortise an operation


@torch.no_grad()
def draw(probs, *, seed, offset, out=None, scratch=None, backend=None) -> VerifyOutput:
    """Draw one token from each row, by the race that verification uses, with random words of its own.

    Args:
        probs: [B, V] fp32, bf16 or fp16, unnormalised probabilities at most 1; contiguous in the vocabulary.
        seed, offset, out, scratch, backend: as in `verify`; the word of a draft's row j is addressed by offset + j.

    Returns:
        `VerifyOutput` with token_ids int64 [B, 1] (-1 where a row is bad), num_accepted 0, valid.
    """
    _check_tensor("probs", probs, 2, PROB_DTYPES)
    return run(_inputs(probs, seed, offset), out, scratch, backend)


class DraftDraws:
    """`draw` for the rows of one round of drafting, one after another: row j at offset + j.

    On a CPU the random words of several rows are made at once, since a thousand cost little more than one.
    """

    def __init__(self, seed, offset, count, backend=None):
        """seed, offset: int64 [B]. count: rows to be drawn. backend: as in `verify`."""
        self.seed, self.offset, self.count, self.backend = seed, offset, count, backend
        self.noise = {}

    def __call__(self, probs, j) -> VerifyOutput:
        """Draw row j, as `draw(probs, seed=seed, offset=offset + j)`. probs: [B, V]."""
        inputs = _inputs(probs, self.seed, self.offset + j)
        if choose_backend(self.backend, probs.device) is verify_torch.verify:
            if j not in self.noise:
                words = len(probs) * (race_torch.num_chunks(probs.shape[1]) + race_torch.CHUNK)
                rows = max(1, min(self.count - j, WORDS_AHEAD // words))
                self.noise = dict(enumerate(verify_torch.draw_noise(inputs, rows), j))
            inputs = replace(inputs, noise=self.noise[j])
        return run(inputs, None, None, self.backend)


def _inputs(probs, seed, offset):
    return Inputs(
        target=probs[:, None],
        draft=None,
        draft_token_ids=torch.empty((len(probs), 0), dtype=torch.int64, device=probs.device),
        rule=SpS(),
        seed=seed,
        offset=offset,
        cu_draft_tokens=None,
        max_draft_tokens=0,
        batch_size=len(probs),
        purposes=(philox.DRAFT_CHUNK, philox.DRAFT_TOKEN),
    )
