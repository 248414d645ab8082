"""Verification of `Block` in two Triton launches. The same bits as `host.block`, on every device.

The first sums the residuals of every row pair that may count, grid (request, position, vocabulary split), chunk by chunk; the
second, a program for each request, finds the longest chain that is kept and draws. Both work out the chains' chances from the
pairs (q_n, p_n): a few hundred bytes, cheaper repeated than communicated.
"""

import torch
import triton
import triton.language as tl

from .. import definition, rules
from ..contract import Logits
from ..rules import block
from .judge import locate, pairs
from .layout import dense, draft_rows, drafted_tokens, target_rows
from .race import CHUNK, LOWEST, ONE, race, stream_of, uniform
from .row import is_bad, load_stats
from .scan import load
from .verify import with_statistics

ACCEPT = tl.constexpr(definition.ACCEPT)
SHIFT, UNIT = tl.constexpr(definition.BLOCK_SHIFT), tl.constexpr(2**definition.BLOCK_SHIFT / definition.ONE)
BLOCKS = 1024  # of the first launch, about
_chance_with, _residual, _keeps = (
    rules.bind(f, tl, triton.jit) for f in (block.chance_with, block.residual, block.keeps)
)


@triton.jit
def _entry(x, j, i):
    """x[i] of a vector over j."""
    return tl.sum(tl.where(j == i, x, tl.zeros_like(x)), 0)


@triton.jit
def chains(
    request, target, draft, drafted, slots, N, m, STATS_GIVEN: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """The chains of a request.

    Returns:
        ids and the chances P of 0 .. m tokens [BLOCK_M], 0 beyond the draft's end,
        where it ends, whether that is its whole length, whether a value that counts is bad,
        offsets of the request's first rows in target and draft, and of their statistics.
    """
    _start, length, bad_request, ids, starts = locate(
        request, target, draft, drafted, slots, N, m, STATS_GIVEN, BLOCK_M
    )  # fmt: skip
    j = tl.arange(0, BLOCK_M)
    end = tl.min(tl.where(ids == -1, j, BLOCK_M), 0)
    inside = j < end
    ids = tl.where(inside, ids, -1)
    q, p = pairs(ids, target, draft, starts, inside, inside, BLOCK_M)
    bad = (ids < -1) | (ids >= tl.maximum(target.size, draft.size)) | is_bad(q) | is_bad(p)
    bad_request |= tl.max(tl.where(inside & bad, 1, 0), 0) > 0
    q, p = tl.where(inside & (ids < target.size), tl.minimum(q, 1.0), 0.0), tl.minimum(p, 1.0)
    chance = tl.full((), 1.0, tl.float32)
    chances = tl.where(j == 0, 1.0, 0.0)
    for i in range(0, end):
        chance = _chance_with(chance, _entry(q, j, i), _entry(p, j, i))
        chances = tl.where(j == i + 1, chance, chances)
    return ids, chances, end, end == length, bad_request, starts


@triton.jit
def _row_pair(target, draft, starts, i, q_there, p_there):
    """Pointers to a row pair, and for each () or its statistics."""
    q_at, p_at, q_stats_at, p_stats_at = starts
    q_stats, p_stats = (), ()
    if target.stats is not None:
        q_stats = load_stats(target.stats, q_stats_at + i * target.stats_by_row, q_there)
    p_row = target.data
    if draft.data is not None:
        p_row = draft.data + p_at + i * draft.by_row
        if draft.stats is not None:
            p_stats = load_stats(draft.stats, p_stats_at + i * draft.stats_by_row, p_there)
    return target.data + q_at + i * target.by_row, p_row, q_stats, p_stats


@triton.jit
def _chunk(pair, draft, c, n, chance, V, p_end):
    """Tokens of a chunk, q and the residual, fp32 [CHUNK], and what is bad. n: a one-hot draft, or -1. p_end: of p."""
    q_row, p_row, q_stats, p_stats = pair
    token = c * CHUNK + tl.arange(0, CHUNK)
    q = tl.where(token < V, load(q_row, token, token, token < V, q_stats), 0.0)
    if draft.data is None:
        p = tl.where(token == n, 1.0, 0.0)
    else:
        p_end = tl.minimum(p_end, V)
        p = tl.where(token < p_end, load(p_row, token, token, token < p_end, p_stats), 0.0)
    return token, q, _residual(chance, q, p), is_bad(q) | is_bad(p)


@triton.jit(do_not_specialize=["slots", "N", "m", "share"])
def block_sums_kernel(
    sums,  # out: int64 [B, m + 1, C], of the residual's chunks in units of 2^-52, of those of the target after the whole
    # draft; -1 where one holds a bad value; left as it is where a row pair does not count
    target, draft, drafted, slots, N, m,  # as in `verify_kernel`
    share,  # chunks of a split
    STATS_GIVEN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    request, i, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ids, chances, end, is_whole_length, bad_request, starts = chains(
        request, target, draft, drafted, slots, N, m, STATS_GIVEN, BLOCK_M
    )  # fmt: skip
    V, V_draft, C = target.size, draft.size, tl.cdiv(target.size, CHUNK)
    j = tl.arange(0, BLOCK_M)
    chance, n = _entry(chances, j, i), _entry(ids, j, i)
    counts = ((i == end) | (chance > 0.0)) & (i <= end) & (bad_request == 0)
    if drafted.bonus_token_ids is not None:
        counts = counts & ((i < end) | (is_whole_length == 0))
    rejected = i < end
    # After the whole draft a token is drawn from q itself.
    chance, p_end = tl.where(rejected, chance, 1.0), tl.where(rejected, V_draft, 0)
    pair = _row_pair(target, draft, starts, i.to(tl.int64), counts, counts & rejected)
    first = split * share
    last = tl.where(counts, tl.minimum(first + share, C), first)
    for c in range(first, last):
        _token, _q, w, bad = _chunk(pair, draft, c, n, chance, V, p_end)
        total = tl.sum((w * ONE).to(tl.int64), 0)
        total = tl.where(tl.max(bad.to(tl.int32), 0) > 0, -1, total)
        tl.store(sums + (request.to(tl.int64) * (m + 1) + i) * C + c, total)


@triton.jit(do_not_specialize=["seed", "offset", "slots", "N", "m"])
def block_kernel(
    token_ids, num_accepted, valid,  # out: [B, m + 1], int32 [B], bool [B]
    by_request, by_column, num_accepted_by, valid_by,  # strides of these
    sums,  # of `block_sums_kernel`
    target, draft, drafted, seed, offset, slots, N, m,  # as in `verify_kernel`
    PICK_CHUNK: tl.constexpr, PICK_TOKEN: tl.constexpr,
    STATS_GIVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    wide = request.to(tl.int64)
    ids, chances, end, is_whole_length, bad_request, starts = chains(
        request, target, draft, drafted, slots, N, m, STATS_GIVEN, BLOCK_M
    )  # fmt: skip
    V, V_draft, C = target.size, draft.size, tl.cdiv(target.size, CHUNK)
    key, position = stream_of(seed, offset, request)
    j, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    # The coin of the chain of i tokens has the words of its last token.
    word = position + j - 1
    r0, r1, _, _ = tl.philox(
        key, tl.zeros_like(j).to(tl.uint32), ACCEPT, word.to(tl.uint32), (word >> 32).to(tl.uint32)
    )
    u = uniform(r0, r1)

    # 1. The longest chain that is kept.
    whole = (end == 0) | (_entry(u, j, end) < _entry(chances, j, end))
    given = is_whole_length & (end < 0)
    if drafted.bonus_token_ids is not None:
        given = is_whole_length & whole
    positive = tl.max(tl.where(chances > 0.0, j, 0), 0)
    stop = tl.where(whole, end, tl.minimum(end - 1, positive))
    stop = tl.where(bad_request, 0, stop)
    of_chunks = tl.zeros((BLOCK_C,), tl.int64)
    searching = (bad_request | given) == 0
    while searching:
        at = sums + (wide * (m + 1) + stop) * C + c
        of_chunks = tl.load(at, mask=c < C, other=0)
        bad_row = tl.min(of_chunks, 0) < 0
        total = tl.sum(tl.maximum(of_chunks, 0) >> SHIFT, 0).to(tl.float32) * UNIT
        kept = _keeps(_entry(u, j, stop), _entry(chances, j, stop), total)
        found = whole | bad_row | (stop == 0) | kept
        bad_request |= bad_row
        stop = tl.where(found, stop, stop - 1)
        searching = found == 0

    # 2. The draw; where rounding or bad input left a first row pair nothing, from the target's row without n.
    rejected = stop < end
    pair = _row_pair(target, draft, starts, stop.to(tl.int64), given == 0, rejected)
    n, chance = _entry(ids, j, stop), tl.where(rejected, _entry(chances, j, stop), 1.0)
    p_end = tl.where(rejected, V_draft, 0)
    row = position + stop
    stream = (key, row.to(tl.uint32), (row >> 32).to(tl.uint32))
    word = race(tl.maximum(of_chunks, 0), c, stream, PICK_CHUNK, wide)
    rest = rejected & (word == 0) & (bad_request == 0)
    for k in range(0, tl.where(rest, C, 0)):
        token, q, w, _bad = _chunk(pair, draft, k, n, chance, V, p_end)
        total = tl.sum((tl.where(token == n, 0.0, q) * ONE).to(tl.int64), 0) + tl.zeros((1,), tl.int64)
        word = tl.maximum(word, race(total, k + tl.arange(0, 1), stream, PICK_CHUNK, word))
    ok = (word > 0) & (bad_request == 0)
    chunk = tl.where(ok, (word & LOWEST) ^ LOWEST, 0)
    token, q, w, _bad = _chunk(pair, draft, chunk, n, chance, tl.where(ok, V, 0), p_end)
    if rest:
        w = tl.where(token == n, 0.0, q)
    winner = race(w, tl.arange(0, CHUNK), stream, PICK_TOKEN, word)
    winner = chunk * CHUNK + ((winner & LOWEST) ^ LOWEST)
    if drafted.bonus_token_ids is not None:
        bonus = tl.load(drafted.bonus_token_ids + request).to(tl.int64)
        winner = tl.where(given, bonus, winner)
        ok = tl.where(given, (bonus >= 0) & (bonus < V) & (bad_request == 0), ok)
    stop = tl.where(ok | (whole & (rejected == 0)), stop, 0)
    tl.store(num_accepted + wide * num_accepted_by, stop)
    tl.store(valid + wide * valid_by, ok)
    tokens = tl.where(j < stop, ids, tl.where((j == stop) & ok, winner, -1))
    to = token_ids + wide * by_request + j * by_column
    tl.store(to, tokens.to(token_ids.dtype.element_ty), mask=j <= m)


def verify(inputs, out, scratch, splits=None, num_warps=4):
    """Write the tokens of `inputs` (checked `contract.Inputs`) to `out` (a `VerifyOutput`). Never waits for the device.

    Args:
        scratch: of `new_scratch`, or None: kept here. Of logits alone.
        splits, num_warps: override what is derived from the shapes. They change no result.
    """
    if isinstance(inputs.target, Logits):
        with_statistics(inputs, scratch, lambda _, *stats: _launch(inputs, out, stats, splits, num_warps))
    else:
        _launch(inputs, out, (None, None), splits, num_warps)


def _launch(inputs, out, stats, splits, num_warps):
    """stats: statistics of the target's and the draft's rows, fp32 [..., 8], or None for rows of probabilities."""
    target, draft, drafted = target_rows(inputs, stats[0]), draft_rows(inputs, stats[1]), drafted_tokens(inputs)
    B, J, C = inputs.batch_size, inputs.max_draft_tokens + 1, definition.num_chunks(inputs.vocab_size)
    share = triton.cdiv(C, max(1, splits or BLOCKS // (B * J)))
    sums = torch.empty((B, J, C), dtype=torch.int64, device=inputs.device)
    slots = 0 if draft.data is None else len(draft.data)
    rows = target, draft, drafted
    sizes = slots, inputs.draft_token_ids.numel(), inputs.max_draft_tokens
    options = {
        "STATS_GIVEN": isinstance(inputs.draft, Logits) and inputs.draft.stats is not None,
        "BLOCK_M": triton.next_power_of_2(J), "num_warps": num_warps, "enable_fp_fusion": False,
    }  # fmt: skip
    strides = *out.token_ids.stride(), out.num_accepted.stride(0), out.valid.stride(0)
    with torch.cuda.device_of(inputs.target.values):
        block_sums_kernel[B, J, triton.cdiv(C, share)](sums, *rows, *sizes, share, **options)
        block_kernel[(B,)](
            out.token_ids, out.num_accepted, out.valid, *strides, sums, *rows, dense(inputs.seed), dense(inputs.offset),
            *sizes, PICK_CHUNK=inputs.purposes[0], PICK_TOKEN=inputs.purposes[1],
            BLOCK_C=triton.next_power_of_2(C), **options,
        )  # fmt: skip
