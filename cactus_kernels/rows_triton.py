"""Rows of logits in Triton: statistics and a draw in one launch; with top-k or top-p a second one cuts the rows.

The first launch of `rows_kernel`, grid (request, row of the request, split of the vocabulary), reduces every chunk of 1,024
logits to its largest and its sum of exponentials, whatever the split is; the last block to arrive at a row puts these together.
The second, one block a truncated row, searches the cut-off and sums what is kept. Neither has a temporary of the size of a row.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import philox, race_torch, rows_torch, sampling
from .race_triton import CHUNK, INTERPRETED, LOWEST, ONE, race, row_at, stream_of

MAX, NORM, CUTOFF, INVERSE_TEMPERATURE, ARGMAX, KEPT, ENTROPY = (
    tl.constexpr(column)
    for column in (
        sampling.MAX, sampling.NORM, sampling.CUTOFF, sampling.INVERSE_TEMPERATURE, sampling.ARGMAX, sampling.KEPT,
        sampling.ENTROPY,
    )
)  # fmt: skip
COLUMNS = tl.constexpr(sampling.COLUMNS)
DRAFT_CHUNK, DRAFT_TOKEN = tl.constexpr(philox.DRAFT_CHUNK), tl.constexpr(philox.DRAFT_TOKEN)
LARGEST, MAX_PROB = tl.constexpr(rows_torch.LARGEST), tl.constexpr(rows_torch.MAX_PROB)
# Masses of rows in fixed point: sums of up to 2^20 weights of at most 1 fit in 63 bits. Integer sums have no order.
UNIT = tl.constexpr(2.0**42)
CHUNKS = tl.constexpr(4)  # that a cut looks at at once


@triton.jit
def is_bad(x):
    """Where a probability is bad, as `rows_torch.bad_prob`."""
    return ((x >= 0.0) & (x <= MAX_PROB)) == 0


@triton.jit
def load_stats(stats, at, mask):
    """What makes logits probabilities: (largest, 1 / T, cut-off, the only token or -1, norm). stats: fp32 [..., 8]."""
    inverse = tl.load(stats + at + INVERSE_TEMPERATURE, mask=mask, other=0.0)
    argmax = tl.load(stats + at + ARGMAX, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    return (
        tl.load(stats + at + MAX, mask=mask, other=0.0), inverse, tl.load(stats + at + CUTOFF, mask=mask, other=0.0),
        tl.where(inverse == 0.0, argmax, -1), tl.load(stats + at + NORM, mask=mask, other=1.0),
    )  # fmt: skip


@triton.jit
def prob(x, token, stats):
    """The probability of a token, from its logit and what `load_stats` gave."""
    largest, inverse, cutoff, only, norm = stats
    w = tl.exp((x - largest) * inverse)
    return tl.where((x >= cutoff) & ((only < 0) | (token == only)), w, 0.0) * norm


@triton.jit
def _inverse_of(x):
    return tl.div_rn(tl.full((), 1.0, tl.float32), x)


@triton.jit
def _setting(settings, K: tl.constexpr, request, PER_REQUEST: tl.constexpr):
    s = settings[K]
    if (PER_REQUEST >> K) & 1:
        s = tl.load(s + request)
    return s


@triton.jit
def _settings(settings, request, PER_REQUEST: tl.constexpr):
    """temperature, top-k, top-p, min-p, 1 / T (0: greedy, as `rows_torch.inverse_temperature`), and whether one is bad."""
    temperature = _setting(settings, 0, request, PER_REQUEST) + tl.full((), 0.0, tl.float32)
    top_k = _setting(settings, 1, request, PER_REQUEST)
    top_p = _setting(settings, 2, request, PER_REQUEST)
    min_p = _setting(settings, 3, request, PER_REQUEST)
    bad = ((temperature >= 0.0) & (temperature < float("inf")) & (top_k >= 0)) == 0
    bad = bad | (((top_p >= 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)) == 0)
    divisor = tl.where(bad | (temperature == 0.0), 1.0, temperature)
    inverse = tl.minimum(_inverse_of(divisor), LARGEST)
    return temperature, top_k, top_p, min_p, tl.where(temperature == 0.0, 0.0, inverse), bad


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
def _fixed_sum(x):
    """The sum of a block, in fixed point whatever its order: fp32."""
    return tl.sum((x * UNIT).to(tl.int64), 0).to(tl.float32) * (1.0 / UNIT)


@triton.jit
def _min_p_cutoff(largest, temperature, min_p):
    return largest + temperature * tl.log(min_p + tl.full((), 0.0, tl.float32))


@triton.jit
def _kept(row, V, maxima, c, largest, inverse, cutoff, BLOCK_C: tl.constexpr):
    """The sums of w = exp((l - largest) / T) and of w ln w over what is kept of every chunk c, fp32 [BLOCK_C] each. Only chunks
    that hold something to keep are read."""
    sums, wlogw = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
    keeps = tl.where(maxima >= cutoff, c, BLOCK_C)
    chunk = tl.min(keeps, 0)
    while chunk < BLOCK_C:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(row + token, mask=token < V, other=-float("inf")).to(tl.float32)
        d = (x - largest) * inverse
        w = tl.where(x >= cutoff, tl.exp(d), 0.0)
        s = tl.sum((w * ONE).to(tl.int64), 0).to(tl.float32) * (1.0 / ONE)
        e = tl.sum((tl.where(w > 0.0, w * d, 0.0) * ONE).to(tl.int64), 0).to(tl.float32) * (1.0 / ONE)
        sums, wlogw = tl.where(c == chunk, s, sums), tl.where(c == chunk, e, wlogw)
        chunk = tl.min(tl.where(c > chunk, keeps, BLOCK_C), 0)
    return sums, wlogw


@triton.jit
def _finish(
    row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW: tl.constexpr,
    PER_REQUEST: tl.constexpr, ENTROPY_TOO: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Put the chunks of a row together: its statistics, and a token if one is to be drawn. words: fp32 [2 or 3, C]."""
    temperature, _, _, min_p, inverse, bad = _settings(settings, request, PER_REQUEST)
    greedy = inverse == 0.0
    C = tl.cdiv(V, CHUNK)
    c = tl.arange(0, BLOCK_C)
    # Other blocks wrote these: not from this one's own cache.
    maxima = tl.load(words + c, mask=c < C, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(words + C + c, mask=c < C, other=0.0, cache_modifier=".cg")
    largest = tl.max(maxima, 0)
    bad = bad | (tl.max((sums != sums).to(tl.int32), 0) > 0) | ((largest > -float("inf")) == 0)
    sums = tl.where(sums == sums, sums, 0.0)
    largest = tl.where(largest > -float("inf"), largest, 0.0)
    delta = tl.where(maxima > -float("inf"), maxima - largest, 0.0) * tl.where(greedy, 1.0, inverse)
    scale = tl.exp(delta)
    weights = sums * scale
    wlogw = weights
    if ENTROPY_TOO:
        wlogw = tl.load(words + 2 * C + c, mask=c < C, other=0.0, cache_modifier=".cg")
        wlogw = tl.where(weights > 0.0, (wlogw + sums * delta) * scale, 0.0)
    total = _fixed_sum(weights)

    first = tl.min(tl.where(maxima == largest, c, C - 1), 0)
    token = first * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row + token, mask=token < V, other=-float("inf")).to(tl.float32)
    argmax = tl.min(tl.where(x == largest, token, V - 1), 0)

    cutoff = -float("inf") + tl.full((), 0.0, tl.float32)
    if (min_p > 0.0) & (greedy == 0) & (bad == 0):
        cutoff = _min_p_cutoff(largest, temperature, min_p)
        weights, wlogw = _kept(row, V, maxima, c, largest, inverse, cutoff, BLOCK_C)
    kept = _fixed_sum(weights)
    if greedy:
        cutoff = largest
        weights, wlogw = tl.where(c == first, 1.0, 0.0), tl.zeros_like(wlogw)
        kept = 0.0 * kept + 1.0
        total = kept
    _conclude(
        row, V, stats, token_id, token_prob, bad, largest, cutoff, inverse, argmax, total, kept, weights, wlogw, c, stream,
        DRAW, ENTROPY_TOO,
    )  # fmt: skip


@triton.jit
def _conclude(
    row, V, stats, token_id, token_prob, bad, largest, cutoff, inverse, argmax, total, kept, weights, wlogw, c, stream,
    DRAW: tl.constexpr, ENTROPY_TOO: tl.constexpr,
):  # fmt: skip
    """Write a row's statistics, and draw. weights, wlogw: fp32, the kept sums of chunks c, relative to the largest logit."""
    norm = tl.where(bad, float("nan"), _inverse_of(tl.where(kept > 0.0, kept, 1.0)))
    share = tl.where(bad, float("nan"), tl.div_rn(kept, tl.where(total > 0.0, total, 1.0)))
    entropy = float("nan") + 0.0 * norm
    if ENTROPY_TOO:
        entropy = tl.log(kept) - _fixed_sum(wlogw) * norm
    tl.store(stats + MAX, largest)
    tl.store(stats + NORM, norm)
    tl.store(stats + CUTOFF, cutoff)
    tl.store(stats + INVERSE_TEMPERATURE, inverse)
    tl.store(stats + ARGMAX, argmax.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(stats + KEPT, share)
    tl.store(stats + ENTROPY, entropy)
    if DRAW:
        row_stats = (largest, inverse, cutoff, tl.where(inverse == 0.0, argmax, -1), norm)
        word = race(weights, c, stream, DRAFT_CHUNK, argmax.to(tl.int64))
        chunk = (word & LOWEST) ^ LOWEST
        chunk = tl.where(word > 0, chunk, 0)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        p = prob(tl.load(row + token, mask=token < V, other=-float("inf")).to(tl.float32), token, row_stats)
        p = tl.where((token < V) & (p == p), p, 0.0)
        word = race(p, tl.arange(0, CHUNK), stream, DRAFT_TOKEN, word)
        winner = chunk * CHUNK + ((word & LOWEST) ^ LOWEST)
        p = tl.sum(tl.where(token == winner, p, 0.0), 0)
        tl.store(token_id, tl.where(bad, -1, winner).to(token_id.dtype.element_ty))
        tl.store(token_prob, tl.where(bad, float("nan"), p))


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
def _image(x):
    """A number whose order is that of fp32 x: int64."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(image):
    """What `_image` was of: fp32."""
    bits = image.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, largest, inverse, BY_MASS: tl.constexpr):
    """What a token counts for: its mass in fixed point, or 1. int64."""
    if BY_MASS:
        return (tl.exp((x - largest) * inverse) * UNIT).to(tl.int64)
    else:
        return tl.zeros_like(x).to(tl.int64) + 1


@triton.jit
def _above(row, V, words, lowest, pivots, largest, inverse, BY_MASS: tl.constexpr):
    """The weight of the tokens whose image is above each of three pivots, all above `lowest`: a tuple of int64."""
    s1, s2, s3 = lowest * 0, lowest * 0, lowest * 0
    C = tl.cdiv(V, CHUNK)
    for first in range(0, C, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        token = c[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        top = tl.load(words + c, mask=c < C, other=-float("inf"))
        live = (token < V) & (_image(top) > lowest)[:, None]
        x = tl.load(row + token, mask=live, other=-float("inf")).to(tl.float32)
        image = _image(x)
        w = tl.where(live, _weight(x, largest, inverse, BY_MASS), 0)
        s1 += tl.sum(tl.sum(tl.where(image > pivots[0], w, 0), 1), 0)
        s2 += tl.sum(tl.sum(tl.where(image > pivots[1], w, 0), 1), 0)
        s3 += tl.sum(tl.sum(tl.where(image > pivots[2], w, 0), 1), 0)
    return s1, s2, s3


@triton.jit
def _search(row, V, words, maxima, floor, need, largest, inverse, BY_MASS: tl.constexpr):
    """The smallest image >= floor such that the tokens above it weigh less than `need` > 0: int64."""
    low, high = floor - 1, _image(largest)
    # The largest logits of the chunks show that the answer is above some image: chunks below that are not read.
    limit = high
    while limit - low > 1:
        middle = (low + limit) >> 1
        weight = tl.where(maxima > -float("inf"), _weight(maxima, largest, inverse, BY_MASS), 0)
        enough = tl.sum(tl.where(_image(maxima) > middle, weight, 0), 0) >= need
        low, limit = tl.where(enough, middle, low), tl.where(enough, limit, middle)
    while high - low > 1:
        p1, p2, p3 = low + (high - low) // 4, low + (high - low) // 2, low + 3 * (high - low) // 4
        s1, s2, s3 = _above(row, V, words, low, (p1, p2, p3), largest, inverse, BY_MASS)
        high = tl.where(s1 < need, p1, tl.where(s2 < need, p2, tl.where(s3 < need, p3, high)))
        low = tl.where(s3 >= need, p3, tl.where(s2 >= need, p2, tl.where(s1 >= need, p1, low)))
    return high


@triton.jit
def _cut(
    row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW: tl.constexpr,
    PER_REQUEST: tl.constexpr, ENTROPY_TOO: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p and min-p of one row, if it has one of the first two: new statistics, and a new draw."""
    temperature, top_k, top_p, min_p, inverse, bad = _settings(settings, request, PER_REQUEST)
    k = tl.minimum(top_k, 1 << 24).to(tl.int64)
    norm = tl.load(stats + NORM)
    by_count = (k > 0) & (k < V)
    if (by_count | (top_p < 1.0)) & (inverse != 0.0) & (bad == 0) & (norm == norm):
        largest = tl.load(stats + MAX)
        argmax = tl.load(stats + ARGMAX).to(tl.int32, bitcast=True)
        C = tl.cdiv(V, CHUNK)
        c = tl.arange(0, BLOCK_C)
        maxima = tl.load(words + c, mask=c < C, other=-float("inf"))
        sums = tl.load(words + C + c, mask=c < C, other=0.0)
        delta = tl.where(maxima > -float("inf"), maxima - largest, 0.0) * inverse
        total = _fixed_sum(sums * tl.exp(delta))
        floor = _image(-float("inf") + tl.full((), 0.0, tl.float32))
        if by_count:
            floor = _search(row, V, words, maxima, floor, k, largest, inverse, False)
        if top_p < 1.0:
            pivot = floor - 1
            mass, _, _ = _above(row, V, words, pivot, (pivot, pivot, pivot), largest, inverse, True)
            share = mass.to(tl.float64) * (top_p + tl.full((), 0.0, tl.float32)).to(tl.float64)
            need = share.to(tl.int64)
            need += (need.to(tl.float64) < share).to(tl.int64)
            floor = _search(row, V, words, maxima, floor, tl.maximum(need, 1), largest, inverse, True)
        cutoff = _value(floor)
        if min_p > 0.0:
            cutoff = tl.maximum(cutoff, _min_p_cutoff(largest, temperature, min_p))
        weights, wlogw = _kept(row, V, maxima, c, largest, inverse, cutoff, BLOCK_C)
        _conclude(
            row, V, stats, token_id, token_prob, bad, largest, cutoff, inverse, argmax, total, _fixed_sum(weights), weights,
            wlogw, c, stream, DRAW, ENTROPY_TOO,
        )  # fmt: skip


@triton.jit
def _visit(
    row, V, words, arrivals, stats, token_id, token_prob, settings, request, stream, share, CUT: tl.constexpr,
    DRAW: tl.constexpr, PER_REQUEST: tl.constexpr, ENTROPY_TOO: tl.constexpr, BLOCK_C: tl.constexpr, WARPS: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """This block's share of a row, which the last block to arrive finishes; or the cut of a row."""
    if CUT:
        _cut(
            row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW, PER_REQUEST, ENTROPY_TOO, BLOCK_C
        )  # fmt: skip
    else:
        _, _, _, _, inverse, _ = _settings(settings, request, PER_REQUEST)
        scale = tl.where(inverse == 0.0, 1.0, inverse)
        first = tl.program_id(2) * share
        _scan(row, V, words, first, tl.minimum(first + share, tl.cdiv(V, CHUNK)), scale, ENTROPY_TOO, WARPS, LANES, VEC)
        tl.debug_barrier()  # all of this block's words are written before it arrives
        if tl.atomic_add(arrivals, 1) == tl.num_programs(2) - 1:
            tl.atomic_xchg(arrivals, 0, sem="relaxed")
            _finish(
                row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW, PER_REQUEST, ENTROPY_TOO,
                BLOCK_C,
            )  # fmt: skip


@triton.jit
def span_of(request, cu_draft_tokens, N, m):
    """The first flat row of a request's draft, its length, int64, and whether its prefix sums are out of order (then 0, 0)."""
    start = request.to(tl.int64) * 0
    length = start + m
    disorder = request < 0
    if cu_draft_tokens is not None:
        start = tl.load(cu_draft_tokens + request).to(tl.int64)
        length = tl.load(cu_draft_tokens + request + 1).to(tl.int64) - start
        disorder = (start < 0) | (length < 0) | (start + length > N) | (length > m)
        start, length = tl.where(disorder, 0, start), tl.where(disorder, 0, length)
    return start, length, disorder


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

_scratch = {}  # the private scratch of each (device, stream)


@dataclass(frozen=True)
class Scratch:
    """Working memory of launches over logits. One at a time may use it; after a launch that raised, make it anew.

    Attributes:
        zeros: int64, 0 between launches.
        words: fp32, what blocks tell each other.
        stats: fp32, statistics of rows on the way to verification.
    """

    zeros: torch.Tensor
    words: torch.Tensor
    stats: torch.Tensor


def new_scratch(batch_size, vocab_size, device, rows=1, entropy=False) -> Scratch:
    """Scratch for `batch_size` requests of up to `rows` rows each: 1 for `sample`, 2 m + 1 for `verify_from_logits`."""
    count = batch_size * rows
    words = count * (3 if entropy else 2) * race_torch.num_chunks(vocab_size)
    return Scratch(
        torch.zeros(2 * batch_size + count, dtype=torch.int64, device=device),
        torch.empty(words, dtype=torch.float32, device=device),
        torch.empty(count * sampling.COLUMNS, dtype=torch.float32, device=device),
    )


def with_scratch(scratch, device, needs, run):
    """Call `run(scratch)` with the caller's scratch, or with one kept for the device and its stream.

    needs: arguments of `new_scratch` but for the device, which a scratch has to be large enough for.
    """
    if scratch is not None:
        if not isinstance(scratch, Scratch):
            raise TypeError(f"scratch must be rows_triton.new_scratch(...), got {type(scratch).__name__}")
        if not _fits(scratch, needs):
            raise ValueError(f"scratch is too small: make it with rows_triton.new_scratch and at least {needs}")
        return run(scratch)
    with_own(
        _scratch, device, lambda own: _fits(own, needs), lambda: new_scratch(**needs, device=device), run,
        "rows_triton.new_scratch(...)",
    )  # fmt: skip


def with_own(kept, device, fits, make, run, how):
    """Call `run(scratch)` with what is kept for a device and its stream, or with new scratch; not kept if it raises.

    kept: dict by device and stream. fits: whether what is there will do. how: what a caller makes it with.
    """
    owner = device, None
    if device.type != "cpu":
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"a CUDA graph needs scratch of its own: pass scratch={how}")
        owner = device, torch.cuda.current_stream(device).cuda_stream
    scratch = kept.pop(owner, None)
    if scratch is None or not fits(scratch):
        scratch = make()
    run(scratch)
    kept[owner] = scratch  # after a launch that raised its words may be left anyhow


def _fits(scratch, needs):
    count = needs["batch_size"] * needs["rows"]
    words = count * (3 if needs["entropy"] else 2) * race_torch.num_chunks(needs["vocab_size"])
    sizes = (2 * needs["batch_size"] + count, words, count * sampling.COLUMNS)
    tensors = (scratch.zeros, scratch.words, scratch.stats)
    return all(t.numel() >= n for t, n in zip(tensors, sizes, strict=True))


def row_stats(inputs, out, scratch=None, splits=None, num_warps=None):
    """Write the statistics of `inputs` (a checked `rows.RowInputs`) to `out`, and tokens if it has a seed. Never waits for the
    device. splits, num_warps: override what is derived from the shapes; they change no result."""
    B, V = inputs.logits.shape
    needs = {"batch_size": B, "vocab_size": V, "rows": 1, "entropy": inputs.entropy}

    def run(scratch):
        # A row of its own for each request, as a target without drafts has.
        reduce_rows(
            inputs.logits[:, None], None, None, None, 0, 0, inputs.sampling, None, out.stats.packed[:, None], scratch,
            has_bonus=True, seed=inputs.seed, offset=inputs.offset, token_ids=out.token_ids, probs=out.probs,
            entropy=inputs.entropy, splits=splits, num_warps=num_warps,
        )  # fmt: skip

    with_scratch(scratch, inputs.logits.device, needs, run)


def reduce_rows(
    target, draft, cu_draft_tokens, row_map, num_tokens, max_draft_tokens, sampling, draft_sampling, stats, scratch, *,
    has_bonus, seed=None, offset=None, token_ids=None, probs=None, entropy=False, splits=None, num_warps=None,
):  # fmt: skip
    """Statistics of the target's rows, and of the draft's unless that is None, in one launch; with top-k or top-p two.

    stats: fp32 [B, J, 8], J = max_draft_tokens + has_bonus target rows, then max_draft_tokens of the draft.
    """
    rows = [target] if draft is None else [target, draft]
    B, J = stats.shape[:2]
    num_warps = num_warps or ROW_WARPS
    V, V_draft = target.shape[-1], rows[-1].shape[-1]
    chunks = race_torch.num_chunks(max(V, V_draft))
    aligned = is_aligned(rows)
    rounds = triton.cdiv(chunks, num_warps)
    splits = max(min(splits or BLOCKS // (B * J), rounds), 1)
    share = triton.cdiv(rounds, splits) * num_warps
    settings, per_request = packed_settings(sampling)
    draft_settings, draft_per_request = packed_settings(draft_sampling or sampling)
    flat = cu_draft_tokens is not None
    strides = (*row_strides(target, flat), *((0, 0) if draft is None else row_strides(draft, flat and row_map is None)))
    strides += (*stats.stride()[:2], *((0, 0) if token_ids is None else (token_ids.stride(0), probs.stride(0))))
    truncates = sampling.truncates or (draft is not None and (draft_sampling or sampling).truncates)
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


def packed_settings(sampling):
    """The settings as kernels take them, and which of them are tensors, a bit each."""
    values = sampling.settings()
    values = (values[0], values[1] if isinstance(values[1], torch.Tensor) else min(values[1], 1 << 24), *values[2:])
    bits = sum(1 << k for k, v in enumerate(values) if isinstance(v, torch.Tensor))
    return tuple(dense(v) if isinstance(v, torch.Tensor) else float(v) for v in values), bits


def row_strides(rows, flat):
    """(request, row) strides in elements: flat rows of a request follow those of the one before it."""
    return (0, rows.stride(0)) if flat else rows.stride()[:2]


def input_strides(inputs):
    """In elements, (request, row or column) of target, draft and draft_token_ids of `Inputs`."""
    flat, target, ids = inputs.cu_draft_tokens is not None, inputs.target, inputs.draft_token_ids
    # Flat rows of a request start at cu_draft_tokens[request], in the target one further for each bonus row before it.
    flat_target = flat and inputs.bonus_token_ids is not None
    strides = (0 if flat_target else target.stride(0), target.stride(0) if flat else target.stride(1))
    strides += (0, 0) if inputs.draft is None else row_strides(inputs.draft, flat and inputs.row_map is None)
    return (*strides, *((0, ids.stride(0)) if flat else ids.stride()))


def is_aligned(rows):
    """Whether every row starts at a multiple of 16 bytes."""
    strides = all(x * t.element_size() % 16 == 0 for t in rows for x in t.stride()[:-1])
    return strides and all(t.data_ptr() % 16 == 0 for t in rows)


@functools.cache
def lanes():
    """Threads of a warp."""
    return 32 if INTERPRETED else triton.runtime.driver.active.get_current_target().warp_size


@functools.cache
def is_nvidia():
    return not INTERPRETED and triton.runtime.driver.active.get_current_target().backend == "cuda"


def dense(x):
    return x.contiguous() if isinstance(x, torch.Tensor) else x
