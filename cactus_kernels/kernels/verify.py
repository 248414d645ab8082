"""Verification in one Triton launch, grid (request, vocabulary split). The same bits as `host.verify`, on every device.

Every block gathers its request's pairs (q_n, p_n) and finds the position where the draft stops: a few hundred bytes,
cheaper repeated than communicated. It scans its share of that one row pair and races its chunks. The last block to arrive
draws the token from the winning chunk, writes every output and leaves the scratch words as it found them.
"""

import functools
import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from .. import definition, rules
from ..rules import Capped
from ..sampling import COLUMNS, INVERSE_TEMPERATURE, RowStats
from . import clip, statistics
from .layout import dense, input_strides, is_aligned, lanes, number, row_strides, span_of
from .race import BAD, CHUNK, LOWEST, ONE, race, row_at, stream_of, uniform
from .row import is_bad, load_stats
from .rows import BLOCKS, NUM_WARPS, reduce_rows
from .scan import RESIDUAL, REST, SPLIT_CHUNKS, TARGET, chunk_weights, load, scan
from .scratch import with_own, with_scratch

ACCEPT = tl.constexpr(definition.ACCEPT)
MOST, UNIT = tl.constexpr(rules.MOST), tl.constexpr(rules.UNIT)
_spend, _cap = (rules.bind(f, tl, triton.jit) for f in (rules.spend, rules.cap))


@triton.jit
def _statistics(read, num_rows, row, mask, READS: tl.constexpr):
    """What the rule reads at rows of the target beside q and p: a tuple of READS fp32."""
    found = ()
    for k in tl.static_range(READS):
        found = found + (tl.load(read + k * num_rows + row, mask=mask, other=0.0),)  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["seed", "offset", "N", "m", "share", "slots", "num_rows"])
def verify_kernel(
    token_ids, num_accepted, valid, spent,  # out: ids [B, m + 1], int32 [B], bool [B], float64 [B] or None
    scratch,  # int64 [B, 2]: the best word and the number of blocks that arrived, both 0 before and after
    target, draft,  # [B, m + 1, V] and [B, m, V_draft], or flat [N + B, V] and [N, V_draft]; draft or None
    target_stats, draft_stats,  # None: the rows are probabilities; else they are logits, and these fp32 [..., 8]
    bonus_token_ids,  # [B], then the target has no bonus rows; or None
    row_map, slots,  # [B] slots of draft rows [slots, K, V_draft], or None; how many there are
    draft_token_ids,  # int32 or int64 [B, m] or flat [N]
    cu_draft_tokens,  # [B + 1] prefix sums, or None: padded
    seed, offset,  # int64 [B] or one number
    strengths,  # tuple of fp32 [B] or numbers
    read, num_rows,  # fp32 [READS, num_rows], what the rule reads at the rows of the target; or None
    budget,  # float64 [B], or None
    strides,  # in elements, (request, row or column) of target, draft, draft_token_ids, token_ids; num_accepted, valid
    stats_strides,  # in elements, (request, row) of target_stats and draft_stats
    N, m, V, V_draft,  # drafted tokens in all and at most in a request; vocabulary sizes
    share,  # chunks of a split, a multiple of WARPS
    PER_REQUEST: tl.constexpr,  # bit k: strength k is a tensor
    STATS_GIVEN: tl.constexpr,  # draft_stats lie as the draft's rows do, flat or by slot; else by request
    G: tl.constexpr,  # H, or H within the budget: for tokens that are not n
    READS: tl.constexpr, SUBTRACTS: tl.constexpr,  # SUBTRACTS: recovery takes the draft off
    H: tl.constexpr, PICK_CHUNK: tl.constexpr, PICK_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0), tl.program_id(1)
    wide = request.to(tl.int64)

    # 1. The request's numbers, and where they are bad.
    bad_request = request < 0
    key, position = stream_of(seed, offset, request)
    values = ()
    for k in tl.static_range(len(strengths)):
        s = strengths[k]
        if (PER_REQUEST >> k) & 1:
            s = tl.load(s + request)
            bad_request |= ((s >= 0.0) & (s < float("inf"))) == 0
        else:
            s = number(s)
        values = values + (s,)  # noqa: RUF005 (triton has no starred tuples)
    start, length, disorder = span_of(request, cu_draft_tokens, N, m)
    bad_request |= disorder
    slot, draft_start = wide, start
    if row_map is not None:
        slot, draft_start = tl.load(row_map + request).to(tl.int64), start * 0
        outside = (slot < 0) | (slot >= slots)
        slot = tl.where(outside, 0, slot)
        bad_request |= outside

    # 2. q and p of the drafted tokens, one slot more than there can be, and the first that is rejected, bad or not there.
    j = tl.arange(0, BLOCK_M)
    row = start + j
    ids = tl.load(draft_token_ids + wide * strides[4] + row * strides[5], mask=j < length, other=-1).to(tl.int64)
    in_target = (ids >= 0) & (ids < V)  # an id beyond the target's vocabulary is never accepted
    q_at = wide * strides[0] + row * strides[1] + ids
    if target_stats is None:
        q = load(target, q_at, ids, in_target, ())
    else:
        # A row past the draft's end counts too, where it is there.
        counts = j < length + (bonus_token_ids is None)
        q = load(
            target,
            q_at,
            ids,
            in_target,
            load_stats(target_stats, wide * stats_strides[0] + j * stats_strides[1], counts),
        )
    in_draft = (ids >= 0) & (ids < V_draft)
    p_at = slot * strides[2] + (draft_start + j) * strides[3] + ids
    if draft is None:
        p = tl.full((BLOCK_M,), 1.0, tl.float32)
    elif draft_stats is None:
        p = load(draft, p_at, ids, in_draft, ())
    else:
        # Statistics that came with the draft lie as its rows do, others by request.
        if STATS_GIVEN:
            stats_at = slot * stats_strides[2] + draft_start * stats_strides[3]
        else:
            stats_at = wide * stats_strides[2]
        p = load(draft, p_at, ids, in_draft, load_stats(draft_stats, stats_at + j * stats_strides[3], ids >= 0))
    bad = (ids < -1) | (ids >= tl.maximum(V, V_draft)) | is_bad(q) | is_bad(p)
    q_n, p_n = tl.minimum(q, 1.0), tl.minimum(p, 1.0)
    at = position + j
    r0, r1, _, _ = tl.philox(key, tl.zeros_like(j).to(tl.uint32), ACCEPT, at.to(tl.uint32), (at >> 32).to(tl.uint32))
    stat = 0.0
    if READS:
        if cu_draft_tokens is None:
            target_row = row + wide * (m + 1)
        else:
            target_row = row + wide
        stat = _statistics(read, num_rows, target_row, ids >= 0, READS)
        for k in tl.static_range(READS):
            bad |= (stat[k] != stat[k]) & (ids >= 0)
    h_n = H(q_n, q_n, p_n, True, stat, *values)
    if budget is not None:
        whole = tl.load(budget + request)
        bad_request |= (whole >= 0.0) == 0
        spends = tl.where(ids >= 0, _spend(h_n, q_n, p_n), 0)
        left = (tl.minimum(tl.where(whole >= 0.0, whole, 0.0), MOST) * UNIT).to(tl.int64)
        if BLOCK_M > 1:
            left = tl.maximum(left - (tl.cumsum(spends, 0) - spends), 0)
        cap = _cap(left)
        h_n = tl.minimum(h_n, q_n * cap)
    accepted = (uniform(r0, r1) * p_n < h_n) & in_target & (bad == 0)
    stop = tl.min(tl.where(accepted, BLOCK_M, j), 0)
    stop = tl.where(bad_request, 0, stop)
    bad_request |= tl.sum(tl.where(j == stop, bad.to(tl.int32), 0), 0) > 0
    n = tl.sum(tl.where(j == stop, ids, 0), 0)
    drafted = (n, tl.sum(tl.where(j == stop, q, 0.0), 0), tl.sum(tl.where(j == stop, p, 0.0), 0))
    # By way of int32, which stays in a uniform register: then the loops below are uniform too, and cheaper.
    rejected = tl.max(tl.where((j == stop) & (ids >= 0), 1, 0), 0) > 0
    at = position + stop
    stream = (key, at.to(tl.uint32), (at >> 32).to(tl.uint32))

    if READS:
        stat = _statistics(read, num_rows, tl.sum(tl.where(j == stop, target_row, 0), 0), rejected, READS)
    if budget is not None:
        cap = tl.sum(tl.where(j == stop, cap, 0.0), 0)
        if READS:
            stat = stat + (cap,)  # noqa: RUF005
        else:
            stat = (cap,)
        spends = tl.sum(tl.where(j < stop, tl.minimum(spends, left), 0), 0)
        tl.store(spent + request * strides[10], spends.to(tl.float64) / UNIT)
    values = (stat,) + values  # noqa: RUF005

    # 3. This block's share of the one row pair. A bonus token that is given has no row, a bad request need not have one.
    given = stop < 0
    nothing = given
    if bonus_token_ids is not None:
        given = (stop >= length) & (bad_request == 0)
        nothing = given | bad_request
    q_row = row_at(target, wide * strides[0] + (start + stop) * strides[1], VEC > 1)
    q_stats = ()
    if target_stats is not None:
        q_stats = load_stats(target_stats, wide * stats_strides[0] + stop * stats_strides[1], given == 0)
    if draft is None or not SUBTRACTS:
        p_row, p_stats = q_row, ()
        RESIDUE: tl.constexpr = REST
    else:
        p_row, p_stats = row_at(draft, slot * strides[2] + (draft_start + stop) * strides[3], VEC > 1), ()
        if draft_stats is not None:
            p_stats = load_stats(draft_stats, stats_at + stop * stats_strides[3], rejected)
        RESIDUE: tl.constexpr = RESIDUAL
    rows = (q_row, p_row, q_stats, p_stats)
    first = split * share
    end = tl.where(nothing, first, tl.minimum(first + share, tl.cdiv(V, CHUNK)))
    if rejected:
        word = scan(
            rows, drafted, first, end, V, V_draft, stream, values, G, RESIDUE, PICK_CHUNK, WARPS, LANES, STEP, VEC
        )  # fmt: skip
    else:
        word = scan(
            rows, drafted, first, end, V, V_draft, stream, values, G, TARGET, PICK_CHUNK, WARPS, LANES, STEP, VEC
        )  # fmt: skip
    word = tl.where(bad_request, BAD, word)

    # 4. The last block to arrive knows the best chunk: it finishes the request.
    best, arrivals = scratch + wide * 2, scratch + wide * 2 + 1
    tl.atomic_max(best, word, sem="relaxed")
    if tl.atomic_add(arrivals, 1) == tl.num_programs(1) - 1:
        word = tl.atomic_xchg(best, 0, sem="relaxed")
        tl.atomic_xchg(arrivals, 0, sem="relaxed")
        p_end = tl.where(rejected, V_draft, 0)
        if rejected & (word == 0):
            # No residual, by rounding or bad input: what is left of h without n. Rare, so one chunk at a time will do.
            p_end = 0 * p_end
            for c in range(0, tl.cdiv(V, CHUNK)):
                w = chunk_weights(rows, drafted, c, V, p_end, values, G, RESIDUE)
                total = tl.sum((w * ONE).to(tl.int64), 0) + tl.zeros((1,), tl.int64)
                word = tl.maximum(word, race(total, c + tl.arange(0, 1), stream, PICK_CHUNK, word))
        ok = (word > 0) & (word < BAD)
        if bonus_token_ids is not None:
            bonus = tl.load(bonus_token_ids + request).to(tl.int64)
            ok = tl.where(given, (bonus >= 0) & (bonus < V), ok)
        # The accepted tokens are read again, and all else is written before the draw: both spare registers.
        tl.store(num_accepted + wide * strides[8], stop.to(tl.int32))
        tl.store(valid + wide * strides[9], ok)
        to = token_ids + wide * strides[6]
        kept = tl.load(draft_token_ids + wide * strides[4] + row * strides[5], mask=j < stop, other=-1)
        tl.store(
            to + j * strides[7], kept.to(token_ids.dtype.element_ty), mask=(j <= m) & (j != tl.where(ok, stop, -1))
        )
        chunk = (word & LOWEST) ^ LOWEST
        drawn = ok & (given == 0)
        q_end, p_end = tl.where(drawn, V, 0), tl.where(drawn, p_end, 0)
        w = chunk_weights(rows, drafted, chunk, q_end, p_end, values, G, RESIDUE)
        winner = race(w, tl.arange(0, CHUNK), stream, PICK_TOKEN, word)
        winner = chunk * CHUNK + ((winner & LOWEST) ^ LOWEST)
        if bonus_token_ids is not None:
            winner = tl.where(given, bonus, winner)
        tl.store(to + stop * strides[7], winner.to(token_ids.dtype.element_ty), mask=ok)


_scratch = {}  # the private scratch words of each (device, stream)


def new_scratch(batch_size, device):
    """Scratch words for up to `batch_size` requests: int64 [B, 2], zero. One launch at a time may use them."""
    return torch.zeros((batch_size, 2), dtype=torch.int64, device=device)


def verify(inputs, out, scratch, splits=None, num_warps=None):
    """Write the tokens of `inputs` (checked `contract.Inputs`) to `out` (a `VerifyOutput`). Never waits for the device.

    Args:
        scratch: `new_scratch(at least B, device)`, or None: kept here. After a launch that raised, make it anew.
        splits, num_warps: override what is derived from the shapes. They change no result.
    """
    device, B = inputs.target.device, inputs.batch_size
    if inputs.sampling is not None:
        return _verify_logits(inputs, out, scratch, splits, num_warps)
    stats = None, None
    if scratch is not None:
        if not isinstance(scratch, torch.Tensor) or scratch.dtype != torch.int64:
            raise TypeError(f"scratch must be kernels.verify.new_scratch(B, device), got {_describe(scratch)}")
        if scratch.dim() != 2 or len(scratch) < B or scratch.shape[1] != 2 or not scratch.is_contiguous():
            raise ValueError(f"scratch must be contiguous, int64 [at least {B}, 2], got {_describe(scratch)}")
        return _launch(inputs, out, scratch, stats, splits, num_warps)
    with_own(
        _scratch, device, lambda own: len(own) >= B, lambda: new_scratch(B, device),
        lambda own: _launch(inputs, out, own, stats, splits, num_warps), f"verify_triton.new_scratch({B}, {device})",
    )  # fmt: skip


def _verify_logits(inputs, out, scratch, splits, num_warps):
    """Reduce the rows of logits to statistics, then verify."""
    B, m, has_bonus = inputs.batch_size, inputs.max_draft_tokens, inputs.bonus_token_ids is None
    reduced = inputs.draft if inputs.draft_sampling is not None and m else None
    J = m + has_bonus
    needs = {"batch_size": B, "vocab_size": max(inputs.vocab_size, inputs.draft_vocab_size), "rows": 2 * m + 1}

    def run(scratch):
        stats = scratch.stats[: B * (2 * m + 1) * COLUMNS].view(B, 2 * m + 1, COLUMNS)
        rows = J if reduced is None else J + m
        if rows:
            reduce_rows(
                inputs.target, reduced, inputs.cu_draft_tokens, inputs.row_map, inputs.draft_token_ids.numel(), m,
                inputs.sampling, inputs.draft_sampling, stats[:, :rows], scratch, has_bonus=has_bonus, splits=splits,
                num_warps=num_warps,
            )  # fmt: skip
        draft_stats = inputs.draft_stats.packed if inputs.draft_stats is not None else None
        if reduced is not None:
            draft_stats = stats[:, J:]
        if not (inputs.rule.statistics or inputs.rule.solved):
            return _launch(inputs, out, scratch.zeros, (stats, draft_stats), splits, num_warps)
        written = replace(inputs, target=_written(inputs.target, stats[:, :J]), sampling=None, draft_stats=None)
        if draft_stats is not None and m:
            written = replace(written, draft=_written(inputs.draft, draft_stats), draft_sampling=None)
        return _launch(written, out, scratch.zeros, (None, None), splits, num_warps)

    # Their rules read whole rows of probabilities: those are written first.
    if (inputs.rule.statistics or inputs.rule.solved) and (
        inputs.cu_draft_tokens is not None or inputs.row_map is not None or not has_bonus
    ):
        raise ValueError(
            f"from logits on triton, {inputs.rule.name} takes the padded layout with bonus rows and no row_map: pass that, "
            "probabilities to `verify`, or backend='torch'"
        )
    with_scratch(scratch, inputs.target.device, needs | {"entropy": False}, run)


def _written(logits, stats):
    """Rows of logits [B, J, V] as the probabilities that their statistics [B, J, 8] make of them, fp32."""
    stats = RowStats(stats)
    inverse = stats.packed[..., INVERSE_TEMPERATURE, None]
    weights = ((logits.float() - stats.max[..., None]) * inverse).exp_()
    weights = weights.masked_fill_(logits < stats.cutoff[..., None], 0)
    greedy = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device) == stats.argmax[..., None]
    return torch.where(inverse == 0, greedy.float(), weights).mul_(stats.norm[..., None])


def _read(inputs, out, launch):
    """What the rule's body reads beside q and p: fp32 [S, rows of the target], None where that is nothing.

    launch: function of inputs that verifies them.
    """
    rule = inputs.rule
    if rule.solved is None:
        return statistics.compute(inputs)
    if rule.solved == "drafted":
        return clip.compute(inputs)
    # What is accepted does not depend on b: find the rejected rows first.
    (cap,) = rule.strengths
    launch(replace(inputs, rule=Capped(cap if isinstance(cap, torch.Tensor) else max(cap, 1.0))))
    return clip.compute(inputs, at=out.num_accepted.contiguous())


def _launch(inputs, out, scratch, stats, splits, num_warps):
    """stats: statistics of the target's and the draft's rows, fp32 [..., 8], or None for rows of probabilities."""
    read = _read(inputs, out, lambda others: _launch(others, out, scratch, stats, splits, num_warps))
    body = inputs.rule.h if inputs.budget is None else rules.within(inputs.rule.h)
    target, draft, ids, flat = inputs.target, inputs.draft, inputs.draft_token_ids, inputs.cu_draft_tokens is not None
    rows = [target] if draft is None else [target, draft]
    strengths = inputs.rule.strengths
    num_warps = num_warps or NUM_WARPS
    item = min(t.element_size() for t in rows)
    aligned = is_aligned(rows)

    chunks = definition.num_chunks(inputs.vocab_size)
    rounds = triton.cdiv(chunks, num_warps)
    splits = max(min(splits or BLOCKS // inputs.batch_size, rounds), triton.cdiv(chunks, SPLIT_CHUNKS.value), 1)
    share = triton.cdiv(rounds, splits) * num_warps

    strides = input_strides(inputs)
    strides += (*out.token_ids.stride(), out.num_accepted.stride(0), out.valid.stride(0))
    strides += (0,) if inputs.budget is None else out.spent.stride()
    target_stats, draft_stats = stats
    given = inputs.draft_stats is not None
    stats_strides = (0, 0) if target_stats is None else target_stats.stride()[:2]
    if draft_stats is None:
        stats_strides += (0, 0)
    else:
        stats_strides += row_strides(draft_stats, given and flat and inputs.row_map is None)
    with torch.cuda.device_of(target):
        verify_kernel[inputs.batch_size, triton.cdiv(chunks, share)](
            out.token_ids, out.num_accepted, out.valid, None if inputs.budget is None else out.spent, scratch,
            target, draft, target_stats, draft_stats, dense(inputs.bonus_token_ids), dense(inputs.row_map),
            0 if draft is None else len(draft), ids, dense(inputs.cu_draft_tokens), dense(inputs.seed),
            dense(inputs.offset), tuple(map(dense, strengths)), read, math.prod(target.shape[:-1]), dense(inputs.budget),
            strides, stats_strides, ids.numel(), inputs.max_draft_tokens, inputs.vocab_size, inputs.draft_vocab_size, share,
            PER_REQUEST=sum(1 << k for k, s in enumerate(strengths) if isinstance(s, torch.Tensor)), STATS_GIVEN=given,
            READS=0 if read is None else len(read), SUBTRACTS=inputs.rule.subtracts_draft, G=_jitted(body),
            H=_jitted(inputs.rule.h), PICK_CHUNK=inputs.purposes[0], PICK_TOKEN=inputs.purposes[1],
            BLOCK_M=triton.next_power_of_2(inputs.max_draft_tokens + 1), WARPS=num_warps, LANES=lanes(),
            STEP=lanes() * (8 if aligned else 4), VEC=16 // item if aligned else 1, num_warps=num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip


@functools.cache
def _jitted(body):
    """The body of a rule as a function of the kernel, the same object each time, so that triton's cache knows it."""
    return rules.bind(body, tl, triton.jit)


def _describe(x):
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
