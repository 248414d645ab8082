"""Verification of `Coupled`: the target's own draw in every row, compared with the draft."""

import torch

from . import philox
from .contract import Logits
from .sampling import Sampling


def verify(inputs, out, draw):
    """Write the tokens of checked `Inputs` to `out` (a `VerifyOutput`).

    draw: function of rows [R, V], seed and offset int64 [R], and a `Sampling` of R requests or None, that gives int64 [R],
        -1 where a row is bad.
    """
    if inputs.bonus_token_ids is not None:
        raise ValueError("Coupled draws the bonus token with the noise of its position: leave bonus_token_ids out")
    B, m, V, device = inputs.batch_size, inputs.max_draft_tokens, inputs.vocab_size, inputs.device
    request = torch.arange(B, dtype=torch.int64, device=device)[:, None]
    j = torch.arange(m + 1, dtype=torch.int64, device=device)
    rows = inputs.target.values.reshape(-1, V)

    # 1. The drafted tokens [B, m + 1], -1 beyond each draft, and the request and position of every row of the target.
    ids = inputs.draft_token_ids.long()
    disorder = torch.zeros((B, 1), dtype=torch.bool, device=device)
    if inputs.cu_draft_tokens is None:
        ids = torch.nn.functional.pad(ids, (0, 1), value=-1)
        index = request * (m + 1) + j
        of_row, position = (x.reshape(-1) for x in torch.broadcast_tensors(request, j))
    else:
        cu = inputs.cu_draft_tokens.long()
        start, length = cu[:-1, None], cu.diff()[:, None]
        disorder = (start < 0) | (length < 0) | (start + length > len(ids)) | (length > m)
        start, length = start.masked_fill(disorder, 0), length.masked_fill(disorder, 0)
        index = (start + request + j).clamp(max=len(rows) - 1)
        padded = torch.nn.functional.pad(ids, (0, 1), value=-1)
        ids = padded[(start + j).clamp(max=len(ids))].masked_fill(j >= length, -1)
        of_row, position = (torch.zeros(len(rows), dtype=torch.int64, device=device) for _ in range(2))
        mine = (j <= length) & ~disorder  # a request that is invalid notes nothing in the rows of others
        of_row[index[mine]], position[index[mine]] = request.expand_as(index)[mine], j.expand_as(index)[mine]

    # 2. A draw in every row, with the words of its position.
    seed = inputs.seed
    if isinstance(seed, int):
        seed = philox.request_seeds(seed, B, device)
    offset = inputs.offset if isinstance(inputs.offset, int) else inputs.offset[of_row]
    sampling = inputs.target.sampling if isinstance(inputs.target, Logits) else None
    if sampling is not None:
        sampling = Sampling(*(s[of_row] if isinstance(s, torch.Tensor) else s for s in sampling.settings()))
    drawn = draw(rows, seed[of_row], offset + position, sampling)[index]

    # 3. Accept while they are equal.
    bad = (ids < -1) | (ids >= max(V, inputs.draft_vocab_size)) | (drawn < 0) | disorder
    accepted = (ids == drawn) & (ids >= 0) & ~bad
    stop = (~accepted).int().argmax(1, keepdim=True)
    valid = ~bad.gather(1, stop)
    out.token_ids.copy_(torch.where(j < stop, ids, torch.where((j == stop) & valid, drawn, -1)))
    out.num_accepted.copy_(stop[:, 0])
    out.valid.copy_(valid[:, 0])
