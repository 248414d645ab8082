"""One row of logits in Triton: what makes it probabilities, and how its chunks of 1,024 are put together."""

import triton
import triton.language as tl

from .. import definition, sampling
from .layout import number
from .race import CHUNK, LOWEST, ONE, race

MAX, NORM, CUTOFF, INVERSE_TEMPERATURE, ARGMAX, KEPT, ENTROPY, UNUSED = (
    tl.constexpr(column)
    for column in (
        sampling.MAX, sampling.NORM, sampling.CUTOFF, sampling.INVERSE_TEMPERATURE, sampling.ARGMAX, sampling.KEPT,
        sampling.ENTROPY, sampling.UNUSED,
    )
)  # fmt: skip
COLUMNS = tl.constexpr(sampling.COLUMNS)
DRAFT_CHUNK, DRAFT_TOKEN = tl.constexpr(definition.DRAFT_CHUNK), tl.constexpr(definition.DRAFT_TOKEN)
LARGEST, MAX_PROB = tl.constexpr(definition.LARGEST), tl.constexpr(definition.MAX_PROB)
# Masses of rows in fixed point: sums of up to 2^20 weights of at most 1 fit in 63 bits. Integer sums have no order.
UNIT = tl.constexpr(2.0**42)


@triton.jit
def is_bad(x):
    """Where a probability is bad, as `host.rows.bad_prob`."""
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
    else:
        s = number(s)
    return s


@triton.jit
def settings_of(settings, request, PER_REQUEST: tl.constexpr):
    """temperature, top-k, top-p, min-p, 1 / T (0: greedy, as `host.reduce.inverse_temperature`), and whether one is bad."""
    # The sum changes no value: without it, ptxas settles for 64 registers where a cut row is drawn from, and spills.
    temperature = _setting(settings, 0, request, PER_REQUEST) + 0.0
    top_k = _setting(settings, 1, request, PER_REQUEST)
    top_p = _setting(settings, 2, request, PER_REQUEST)
    min_p = _setting(settings, 3, request, PER_REQUEST)
    bad = ((temperature >= 0.0) & (temperature < float("inf")) & (top_k >= 0)) == 0
    bad = bad | (((top_p >= 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)) == 0)
    divisor = tl.where(bad | (temperature == 0.0), 1.0, temperature)
    inverse = tl.minimum(_inverse_of(divisor), LARGEST)
    return temperature, top_k, top_p, min_p, tl.where(temperature == 0.0, 0.0, inverse), bad


@triton.jit
def fixed_sum(x):
    """The sum of a block, in fixed point whatever its order: fp32."""
    return tl.sum((x * UNIT).to(tl.int64), 0).to(tl.float32) * (1.0 / UNIT)


@triton.jit
def min_p_cutoff(largest, temperature, min_p):
    return largest + temperature * tl.log(min_p)


@triton.jit
def kept_sums(row, V, maxima, c, largest, inverse, cutoff, BLOCK_C: tl.constexpr):
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
def finish(
    row, V, words, stats, token_id, token_prob, settings, request, stream, DRAW: tl.constexpr,
    PER_REQUEST: tl.constexpr, ENTROPY_TOO: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Put the chunks of a row together: its statistics, and a token if one is to be drawn. words: fp32 [2 or 3, C]."""
    temperature, _, _, min_p, inverse, bad = settings_of(settings, request, PER_REQUEST)
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
    total = fixed_sum(weights)

    first = tl.min(tl.where(maxima == largest, c, C - 1), 0)
    token = first * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row + token, mask=token < V, other=-float("inf")).to(tl.float32)
    argmax = tl.min(tl.where(x == largest, token, V - 1), 0)

    cutoff = -float("inf") + tl.full((), 0.0, tl.float32)
    if (min_p > 0.0) & (greedy == 0) & (bad == 0):
        cutoff = min_p_cutoff(largest, temperature, min_p)
        weights, wlogw = kept_sums(row, V, maxima, c, largest, inverse, cutoff, BLOCK_C)
    tl.store(stats + UNUSED, 0.0)  # a cut, which comes after this, leaves it
    kept = fixed_sum(weights)
    if greedy:
        cutoff = largest
        weights, wlogw = tl.where(c == first, 1.0, 0.0), tl.zeros_like(wlogw)
        kept = 0.0 * kept + 1.0
        total = kept
    conclude(
        row, V, stats, token_id, token_prob, bad, largest, cutoff, inverse, argmax, total, kept, weights, wlogw, c, stream,
        DRAW, ENTROPY_TOO,
    )  # fmt: skip


@triton.jit
def conclude(
    row, V, stats, token_id, token_prob, bad, largest, cutoff, inverse, argmax, total, kept, weights, wlogw, c, stream,
    DRAW: tl.constexpr, ENTROPY_TOO: tl.constexpr,
):  # fmt: skip
    """Write a row's statistics, and draw. weights, wlogw: fp32, the kept sums of chunks c, relative to the largest logit."""
    norm = tl.where(bad, float("nan"), _inverse_of(tl.where(kept > 0.0, kept, 1.0)))
    share = tl.where(bad, float("nan"), tl.div_rn(kept, tl.where(total > 0.0, total, 1.0)))
    entropy = float("nan") + 0.0 * norm
    if ENTROPY_TOO:
        entropy = tl.log(kept) - fixed_sum(wlogw) * norm
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
