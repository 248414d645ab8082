"""Drawing tokens from rows of probabilities, outside verification: drafts and plain decoding."""

import torch

from . import philox
from .rules import SpS
from .verify import PROB_DTYPES, Inputs, VerifyOutput, _check_tensor, run


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
    B = probs.shape[0]
    inputs = Inputs(
        target=probs[:, None],
        draft=None,
        draft_token_ids=torch.empty((B, 0), dtype=torch.int64, device=probs.device),
        rule=SpS(),
        seed=seed,
        offset=offset,
        cu_draft_tokens=None,
        max_draft_tokens=0,
        batch_size=B,
        purposes=(philox.DRAFT_CHUNK, philox.DRAFT_TOKEN),
    )
    return run(inputs, out, scratch, backend)
