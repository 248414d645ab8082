"""Where top-k, top-p and min-p cut a row of logits, in Triton: a search on the integer images of the logits, without a sort."""

import triton
import triton.language as tl

from .race import CHUNK
from .row import ARGMAX, MAX, NORM, UNIT, conclude, fixed_sum, kept_sums, min_p_cutoff, settings_of

CHUNKS = tl.constexpr(4)  # looked at at once


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
def cut(
    row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW: tl.constexpr,
    PER_REQUEST: tl.constexpr, ENTROPY_TOO: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p and min-p of one row, if it has one of the first two: new statistics, and a new draw."""
    temperature, top_k, top_p, min_p, inverse, bad = settings_of(settings, request, PER_REQUEST)
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
        total = fixed_sum(sums * tl.exp(delta))
        floor = _image(-float("inf") + tl.full((), 0.0, tl.float32))
        if by_count:
            floor = _search(row, V, words, maxima, floor, k, largest, inverse, False)
        if top_p < 1.0:
            pivot = floor - 1
            mass, _, _ = _above(row, V, words, pivot, (pivot, pivot, pivot), largest, inverse, True)
            share = mass.to(tl.float64) * top_p.to(tl.float64)
            need = share.to(tl.int64)
            need += (need.to(tl.float64) < share).to(tl.int64)
            floor = _search(row, V, words, maxima, floor, tl.maximum(need, 1), largest, inverse, True)
        cutoff = _value(floor)
        if min_p > 0.0:
            cutoff = tl.maximum(cutoff, min_p_cutoff(largest, temperature, min_p))
        weights, wlogw = kept_sums(row, V, maxima, c, largest, inverse, cutoff, BLOCK_C)
        conclude(
            row, V, stats, token_id, token_prob, bad, largest, cutoff, inverse, argmax, total, fixed_sum(weights), weights,
            wlogw, c, stream, DRAW, ENTROPY_TOO,
        )  # fmt: skip
