"""`plugins.vllm.fallback.fill_invalid` in Triton."""

import torch
import triton
import triton.language as tl

from .race import LOWEST

BLOCK = 4096


@triton.jit(do_not_specialize=["num_rows"])
def fill_kernel(
    token_ids,  # int32 or int64 [B, m + 1]
    num_accepted,  # int32 [B]
    valid,  # bool [B]
    count,  # int64 [1]
    logits,  # [num_rows, V]
    cu_draft_tokens,  # [B + 1]
    strides,  # of token_ids, num_accepted, valid, rows
    num_rows,
    V,
    HAS_BONUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(valid + request * strides[3]) == 0:
        stop = tl.load(num_accepted + request * strides[2]).to(tl.int64)
        start = tl.load(cu_draft_tokens + request).to(tl.int64)
        end = tl.load(cu_draft_tokens + request + 1).to(tl.int64) + HAS_BONUS
        row = start + request * HAS_BONUS + stop
        has_row = (start + stop < end) & (row >= 0) & (row < num_rows)
        largest, token = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32)
        for first in range(0, tl.where(has_row, V, 0), BLOCK):
            id = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * strides[4] + id, mask=id < V, other=float("-inf")).to(tl.float32)
            x = tl.where(tl.abs(x) < float("inf"), x, float("-inf"))  # NaN too
            best = tl.max(x)
            if best > largest:
                largest = best
                token = tl.min(tl.where(x == best, id, LOWEST))
        tl.store(token_ids + request * strides[0] + stop * strides[1], token.to(token_ids.dtype.element_ty))
        tl.atomic_add(count, 1)


def fill_invalid(out, target_logits, cu_draft_tokens, has_bonus, count):
    """See `plugins.vllm.fallback.fill_invalid`; never waits for the device."""
    strides = (*out.token_ids.stride(), out.num_accepted.stride(0), out.valid.stride(0), target_logits.stride(0))
    with torch.cuda.device_of(target_logits):
        fill_kernel[(len(out.valid),)](
            out.token_ids, out.num_accepted, out.valid, count, target_logits, cu_draft_tokens, strides, len(target_logits),
            target_logits.shape[1], HAS_BONUS=has_bonus, BLOCK=BLOCK,
        )  # fmt: skip
