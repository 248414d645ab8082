"""One row pair in Triton: the weights that a token is drawn from, and the race between the chunks of a block's share."""

import triton
import triton.language as tl

from .. import definition
from .race import BAD, CHUNK, ONE, race
from .row import is_bad, prob

TARGET, RESIDUAL, REST = (tl.constexpr(kind) for kind in (definition.TARGET, definition.RESIDUAL, definition.REST))
SPLIT_CHUNKS = tl.constexpr(256)  # chunks one block can hold sums of: V <= 262,144 in one split


@triton.jit
def load(rows, at, token, mask, stats):
    """fp32 probabilities of tokens, 0 where the mask is False. at: their offsets. stats: (), or `load_stats` of logits."""
    if len(stats) == 0:
        return tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
    else:
        return prob(tl.load(rows + at, mask=mask, other=-float("inf")).to(tl.float32), token, stats)


@triton.jit
def _stream(row, at, token, stats):
    """The same without a mask, for what is read once."""
    x = tl.load(row + at, eviction_policy="evict_first").to(tl.float32)
    if len(stats) == 0:
        return x
    else:
        return prob(x, token, stats)


@triton.jit
def _recovery(q, judged, RECOVER: tl.constexpr):
    """The rule's r of tokens that are not n, at least q times what `judged` says. judged: as in `scan`."""
    q_n, h_n, least, given = judged
    r = RECOVER(q, q_n, h_n, *given)
    if len(least) > 0:
        r = tl.maximum(r, q * least[0])
    return r


@triton.jit
def _fixed_weight(q, p, judged, RECOVER: tl.constexpr, KIND: tl.constexpr):
    """Weights of tokens that are not n, in units of 2^-52."""
    w = q
    if KIND != TARGET:
        w = _recovery(q, judged, RECOVER)
    if KIND == RESIDUAL:
        w = tl.maximum(w - p, 0.0)
    return (w * ONE).to(tl.int64)


@triton.jit
def _sums(
    rows, first, q_end, p_end, judged, RECOVER: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """STEP tokens of each of WARPS chunks, `first` being the first: their sums int64 [WARPS], bad ones int32 [WARPS, LANES]."""
    # The order of the axes makes triton give a lane VEC neighbours and a warp one chunk, so that no warp waits for another.
    repeat = tl.arange(0, STEP // (LANES * VEC))[:, None, None, None] * (LANES * VEC)
    warp = tl.arange(0, WARPS)[None, :, None, None] * CHUNK
    lane = tl.arange(0, LANES)[None, None, :, None] * VEC
    token = repeat + warp + lane + tl.arange(0, VEC)[None, None, None, :]
    q_row, p_row, q_stats, p_stats = rows
    p = 0.0
    if MASKED:
        q = load(q_row + first, token, token + first, token < q_end - first, q_stats)
        if KIND == RESIDUAL:
            p = load(p_row + first, token, token + first, token < p_end - first, p_stats)
    else:
        q = _stream(q_row + first, token, token + first, q_stats)
        if KIND == RESIDUAL:
            p = _stream(p_row + first, token, token + first, p_stats)
    # Of logits, the statistics say whether a row is bad.
    bad = tl.zeros_like(q) != 0.0
    if len(q_stats) == 0:
        bad = is_bad(q)
    if KIND == RESIDUAL:
        if len(p_stats) == 0:
            bad = bad | is_bad(p)
    weights = _fixed_weight(q, p, judged, RECOVER, KIND)
    if MASKED:
        weights = tl.where(token < q_end - first, weights, 0)  # a rule may give mass to tokens without any
    return tl.sum(tl.sum(tl.sum(weights, 3), 0), 1), tl.sum(tl.sum(bad.to(tl.int32), 3), 0)


@triton.jit
def scan(
    rows, drafted, judged, first, end, V, V_draft, stream, RECOVER: tl.constexpr, KIND: tl.constexpr,
    PURPOSE: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """The word of the race between chunks first .. end - 1, at most SPLIT_CHUNKS.

    rows: pointers to the rows, [V] and [V_draft], and for each () or its `load_stats`. drafted: n, and its entries in them.
    judged: (q_n, h_n, least, given): `least` holds what recovery multiplies q by at least, or nothing; `given` is what the
    rule's functions get beside rows, (stat, *strengths).
    """
    n, q_at_n, p_at_n = drafted
    q_end = tl.minimum(end * CHUNK, V)
    p_end = q_end
    if KIND == RESIDUAL:
        p_end = tl.minimum(q_end, V_draft)
    rounds = tl.cdiv(end - first, WARPS)
    full = tl.minimum(tl.maximum(p_end // CHUNK - first, 0) // WARPS, rounds)
    column = tl.arange(0, SPLIT_CHUNKS // WARPS)[None, :]
    sums = tl.zeros((WARPS, SPLIT_CHUNKS // WARPS), tl.int64)
    bad = tl.zeros((WARPS, LANES), tl.int32)
    STEPS: tl.constexpr = CHUNK // STEP
    for t in range(0, full * STEPS):
        token = (first + t // STEPS * WARPS) * CHUNK + (t - t // STEPS * STEPS) * STEP
        s, b = _sums(rows, token, q_end, p_end, judged, RECOVER, KIND, False, WARPS, LANES, STEP, VEC)
        sums += tl.where(column == t // STEPS, s[:, None], 0)
        bad += b
    # The tail is masked, which takes registers: shorter steps make up for them.
    TAIL_VEC: tl.constexpr = 4 if VEC > 4 else VEC
    TAIL: tl.constexpr = 4 * LANES
    TAILS: tl.constexpr = CHUNK // TAIL
    for t in range(full * TAILS, rounds * TAILS):
        token = (first + t // TAILS * WARPS) * CHUNK + (t - t // TAILS * TAILS) * TAIL
        s, b = _sums(rows, token, q_end, p_end, judged, RECOVER, KIND, True, WARPS, LANES, TAIL, TAIL_VEC)
        sums += tl.where(column == t // TAILS, s[:, None], 0)
        bad += b
    chunk = first + column * WARPS + tl.arange(0, WARPS)[:, None]
    if KIND != TARGET:
        # The drafted token weighs nothing: what the loop added for it is taken off again, exactly.
        added = _fixed_weight(q_at_n, p_at_n, judged, RECOVER, KIND)
        sums -= tl.where(chunk == tl.where(n < V, n // CHUNK, -1), added, 0)
    bad = tl.sum(bad).to(tl.int64)
    word = race(tl.where(chunk < end, sums, 0), chunk, stream, PURPOSE, bad)
    return tl.where(bad > 0, BAD, word)


@triton.jit
def chunk_weights(
    rows, n, judged, chunk, q_end, p_end, RECOVER: tl.constexpr, RESIDUE: tl.constexpr
):  # fmt: skip
    """fp32 weights of one chunk [CHUNK]. Rows end at q_end and p_end: a p_end of 0 leaves the rest, h without n."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    q_row, p_row, q_stats, p_stats = rows
    w = load(q_row, token, token, token < q_end, q_stats)
    w = tl.where(n >= 0, _recovery(w, judged, RECOVER), w)
    if RESIDUE == RESIDUAL:
        w -= load(p_row, token, token, token < p_end, p_stats)
    return tl.where((token == n) | (token >= q_end), 0.0, tl.maximum(w, 0.0))
