"""Rows of logits in Triton: statistics and a draw in one launch; with top-k or top-p a second one cuts the rows.

The first launch of `rows_kernel`, grid (request, row of the request, split of the vocabulary), reduces every chunk of 1,024
logits to its largest and its sum of exponentials, whatever the split is; the last block to arrive at a row puts these together.
The second, one block a truncated row, searches the cut-off and sums what is kept. Neither has a temporary of the size of a row.
"""

import torch
import triton
import triton.language as tl

from .. import definition
from ..contract import Logits
from .cut import cut
from .layout import dense, is_aligned, is_nvidia, lanes, packed_settings, row_strides, span_of
from .race import CHUNK, ONE, row_at, stream_of
from .row import finish, settings_of
from .scratch import with_scratch


@triton.jit
def _chunks(
    row, first, V, inverse, MASKED: tl.constexpr, ENTROPY_TOO: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """WARPS chunks, `first` being the first token: their largest logits, and the sums of w = exp((l - largest) / T) and of
    w ln w, fp32 [WARPS] each. The sum is NaN where a logit is NaN or +inf."""
    # The order of the axes makes triton give a lane VEC neighbours and a warp one chunk.
    repeat = tl.arange(0, CHUNK // (LANES * VEC))[:, None, None, None] * (LANES * VEC)
    warp = tl.arange(0, WARPS)[None, :, None, None] * CHUNK
    token = repeat + warp + tl.arange(0, LANES)[None, None, :, None] * VEC + tl.arange(0, VEC)[None, None, None, :]
    if MASKED:
        x = tl.load(row + first + token, mask=token < V - first, other=-float("inf")).to(tl.float32)
    else:
        x = tl.load(row + first + token).to(tl.float32)
    is_bad = (x < float("inf")) == 0
    x = tl.where(is_bad, -float("inf"), x)
    bad = tl.max(tl.max(tl.max(is_bad.to(tl.int32), 3), 0), 1)
    largest = tl.max(tl.max(tl.max(x, 3), 0), 1)
    d = (x - tl.where(largest > -float("inf"), largest, 0.0)[None, :, None, None]) * inverse
    w = tl.exp(d)
    total = tl.sum(tl.sum(tl.sum((w * ONE).to(tl.int64), 3), 0), 1).to(tl.float32) * (1.0 / ONE)
    total = tl.where(bad > 0, float("nan"), total)
    wlogw = total
    if ENTROPY_TOO:
        wlogw = tl.where(w > 0.0, w * d, 0.0)
        wlogw = tl.sum(tl.sum(tl.sum((wlogw * ONE).to(tl.int64), 3), 0), 1).to(tl.float32) * (1.0 / ONE)
    return largest, total, wlogw


@triton.jit
def _scan(
    row, V, words, first, end, inverse, ENTROPY_TOO: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Write the largest logit and the sums of chunks first .. end - 1 to words, fp32 [2 or 3, C]."""
    C = tl.cdiv(V, CHUNK)
    rounds = tl.cdiv(end - first, WARPS)
    full = tl.minimum(tl.maximum(V // CHUNK - first, 0) // WARPS, rounds)
    for t in range(0, full):
        chunk = first + t * WARPS
        largest, total, wlogw = _chunks(row, chunk * CHUNK, V, inverse, False, ENTROPY_TOO, WARPS, LANES, VEC)
        to = words + chunk + tl.arange(0, WARPS)
        tl.store(to, largest)
        tl.store(to + C, total)
        if ENTROPY_TOO:
            tl.store(to + 2 * C, wlogw)
    for t in range(full, rounds):
        chunk = first + t * WARPS
        largest, total, wlogw = _chunks(row, chunk * CHUNK, V, inverse, True, ENTROPY_TOO, WARPS, LANES, VEC)
        c = chunk + tl.arange(0, WARPS)
        tl.store(words + c, largest, mask=c < end)
        tl.store(words + C + c, total, mask=c < end)
        if ENTROPY_TOO:
            tl.store(words + 2 * C + c, wlogw, mask=c < end)


@triton.jit
def _visit(
    row, V, words, arrivals, stats, token_id, token_prob, settings, request, stream, share, CUT: tl.constexpr,
    DRAW: tl.constexpr, PER_REQUEST: tl.constexpr, ENTROPY_TOO: tl.constexpr, BLOCK_C: tl.constexpr, WARPS: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """This block's share of a row, which the last block to arrive finishes; or the cut of a row."""
    if CUT:
        cut(
            row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW, PER_REQUEST, ENTROPY_TOO, BLOCK_C
        )  # fmt: skip
    else:
        _, _, _, _, inverse, _ = settings_of(settings, request, PER_REQUEST)
        scale = tl.where(inverse == 0.0, 1.0, inverse)
        first = tl.program_id(2) * share
        _scan(row, V, words, first, tl.minimum(first + share, tl.cdiv(V, CHUNK)), scale, ENTROPY_TOO, WARPS, LANES, VEC)
        tl.debug_barrier()  # all of this block's words are written before it arrives
        if tl.atomic_add(arrivals, 1) == tl.num_programs(2) - 1:
            tl.atomic_xchg(arrivals, 0, sem="relaxed")
            finish(
                row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW, PER_REQUEST, ENTROPY_TOO,
                BLOCK_C,
            )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "offset", "N", "m", "share", "slots"])
def rows_kernel(
    stats,  # out: fp32 [B, J, 8], target rows first, then the draft's
    token_ids, probs,  # out: ids [B], fp32 [B], or None: nothing is drawn
    words,  # scratch: fp32 [B, J, 2 or 3, C], the largest logit and the sums of every chunk
    arrivals,  # scratch: int64 [B, J], 0 before and after
    target, draft,  # logits, [B, m or m + 1, V] or flat, and [B, m, V_draft] or flat, or None
    cu_draft_tokens, row_map,  # [B + 1] prefix sums, or None: padded; [B] slots of the draft's rows, or None
    seed, offset,  # int64 [B] or one number; None: nothing is drawn
    settings, draft_settings,  # temperature, top-k, top-p, min-p: [B] each, or numbers
    strides,  # in elements, (request, row) of target and draft; (request, row) of stats; token_ids, probs
    N, m, slots, V, V_draft,  # drafted tokens in all and at most in a request; rows of row_map's slots; vocabulary sizes
    share,  # chunks of a split, a multiple of WARPS
    CUT: tl.constexpr,  # False: reduce the rows; True: in a launch after that, cut those with top-k or top-p
    HAS_BONUS: tl.constexpr,  # whether the target has a row past the last drafted token
    PER_REQUEST: tl.constexpr, DRAFT_PER_REQUEST: tl.constexpr,  # bit k: setting k is a tensor
    ENTROPY_TOO: tl.constexpr, BLOCK_C: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    request, j = tl.program_id(0), tl.program_id(1)
    wide = request.to(tl.int64)
    start, length, _ = span_of(request, cu_draft_tokens, N, m)
    J = m + HAS_BONUS
    at = stats + wide * strides[4] + j * strides[5]
    C = tl.cdiv(tl.maximum(V, V_draft), CHUNK)
    PLANES: tl.constexpr = 3 if ENTROPY_TOO else 2
    row_number = wide * tl.num_programs(1) + j
    words += row_number * PLANES * C
    arrivals += row_number
    if token_ids is None:
        DRAW: tl.constexpr = False
        stream = (wide, wide.to(tl.uint32), wide.to(tl.uint32))
    else:
        DRAW: tl.constexpr = True
        key, position = stream_of(seed, offset, request)
        stream = (key, position.to(tl.uint32), (position >> 32).to(tl.uint32))
        token_ids += wide * strides[6]
        probs += wide * strides[7]
    if j < J:
        if j < length + HAS_BONUS:
            first = start
            if cu_draft_tokens is not None:
                first += wide * HAS_BONUS
            row = row_at(target, wide * strides[0] + (first + j) * strides[1], VEC > 1)
            _visit(
                row, V, words, arrivals, at, token_ids, probs, settings, request, stream, share, CUT, DRAW, PER_REQUEST,
                ENTROPY_TOO, BLOCK_C, WARPS, LANES, VEC,
            )  # fmt: skip
    else:
        if draft is not None:
            j -= J
            if j < length:
                slot, first = wide, start
                if row_map is not None:
                    slot, first = tl.load(row_map + request).to(tl.int64), first * 0
                    slot = tl.where((slot >= 0) & (slot < slots), slot, 0)
                row = row_at(draft, slot * strides[2] + (first + j) * strides[3], VEC > 1)
                _visit(
                    row, V_draft, words, arrivals, at, token_ids, probs, draft_settings, request, stream, share, CUT, False,
                    DRAFT_PER_REQUEST, ENTROPY_TOO, BLOCK_C, WARPS, LANES, VEC,
                )  # fmt: skip


# Launched with 8 warps of at most 64 registers, four blocks fit a multiprocessor: about one wave on a large GPU.
BLOCKS = 512
NUM_WARPS = 8
ROW_WARPS = 4  # a warp holds a chunk in registers: with 8, one value does not fit
CUT_WARPS = 16  # a block has a row to itself


def row_stats(inputs, out, scratch=None, splits=None, num_warps=None):
    """Write the statistics of `inputs` (checked `contract.RowInputs`) to `out`, and tokens if it has a seed. Never waits for the
    device. splits, num_warps: override what is derived from the shapes; they change no result."""
    B, V = inputs.logits.shape
    needs = {"batch_size": B, "vocab_size": V, "rows": 1, "entropy": inputs.entropy}

    def run(scratch):
        # A row of its own for each request, as a target without drafts has.
        reduce_rows(
            Logits(inputs.logits[:, None], inputs.sampling), None, None, None, 0, 0, out.stats.packed[:, None], scratch,
            has_bonus=True, seed=inputs.seed, offset=inputs.offset, token_ids=out.token_ids, probs=out.probs,
            entropy=inputs.entropy, splits=splits, num_warps=num_warps,
        )  # fmt: skip

    with_scratch(scratch, inputs.logits.device, needs, run)


def reduce_rows(
    target, draft, cu_draft_tokens, row_map, num_tokens, max_draft_tokens, stats, scratch, *,
    has_bonus, seed=None, offset=None, token_ids=None, probs=None, entropy=False, splits=None, num_warps=None,
):  # fmt: skip
    """Statistics of the target's rows, and of the draft's unless that is None, in one launch; with top-k or top-p two.

    target, draft: `Logits` by a `Sampling`. stats: fp32 [B, J, 8], J = max_draft_tokens + has_bonus target rows, then
    max_draft_tokens of the draft.
    """
    sampling, draft_sampling = target.sampling, (draft or target).sampling
    target, draft = target.values, None if draft is None else draft.values
    rows = [target] if draft is None else [target, draft]
    B, J = stats.shape[:2]
    num_warps = num_warps or ROW_WARPS
    V, V_draft = target.shape[-1], rows[-1].shape[-1]
    chunks = definition.num_chunks(max(V, V_draft))
    aligned = is_aligned(rows)
    rounds = triton.cdiv(chunks, num_warps)
    splits = max(min(splits or BLOCKS // (B * J), rounds), 1)
    share = triton.cdiv(rounds, splits) * num_warps
    settings, per_request = packed_settings(sampling)
    draft_settings, draft_per_request = packed_settings(draft_sampling)
    flat = cu_draft_tokens is not None
    strides = (*row_strides(target, flat), *((0, 0) if draft is None else row_strides(draft, flat and row_map is None)))
    strides += (*stats.stride()[:2], *((0, 0) if token_ids is None else (token_ids.stride(0), probs.stride(0))))
    truncates = sampling.truncates or draft_sampling.truncates
    # Of rows that are read an entry at a time, the compiler would spill a value to get by with 80 registers, or 64 of a cut.
    reduces = {"maxnreg": 96} if is_nvidia() and not aligned and token_ids is None else {}
    cuts = {"maxnreg": 128} if is_nvidia() and not aligned else {}
    with torch.cuda.device_of(target):
        for cut in (False, True) if truncates else (False,):
            rows_kernel[B, J, 1 if cut else triton.cdiv(chunks, share)](
                stats, token_ids, probs, scratch.words, scratch.zeros[2 * B :], target, draft, dense(cu_draft_tokens),
                dense(row_map), dense(seed), dense(offset), settings, draft_settings, strides, num_tokens, max_draft_tokens,
                0 if draft is None else draft.shape[0], V, V_draft, share,
                CUT=cut, HAS_BONUS=int(has_bonus), PER_REQUEST=per_request, DRAFT_PER_REQUEST=draft_per_request,
                ENTROPY_TOO=entropy, BLOCK_C=triton.next_power_of_2(chunks), WARPS=num_warps, LANES=lanes(),
                VEC=16 // min(t.element_size() for t in rows) if aligned else 1, num_warps=CUT_WARPS if cut else num_warps,
                enable_fp_fusion=False, **(cuts if cut else reduces),
            )  # fmt: skip
