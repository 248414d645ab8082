"""Verification in one Triton launch, grid (request, vocabulary split). The same bits as `host.verify`, on every device.

Every block gathers its request's pairs (q_n, p_n) and finds the position where the draft stops: a few hundred bytes,
cheaper repeated than communicated. It scans its share of that one row pair and races its chunks. The last block to arrive
draws the token from the winning chunk, writes every output and leaves the scratch words as it found them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import definition, rules
from ..contract import Logits, Probs
from ..sampling import COLUMNS, INVERSE_TEMPERATURE, RowStats
from . import clip, statistics
from .judge import find_stops, jitted, judge, judge_arguments
from .layout import draft_rows, drafted_tokens, is_aligned, is_nvidia, lanes, target_rows
from .race import BAD, CHUNK, LOWEST, ONE, race, row_at
from .row import load_stats
from .rows import BLOCKS, NUM_WARPS, reduce_rows
from .scan import RESIDUAL, REST, SPLIT_CHUNKS, TARGET, chunk_weights, scan
from .scratch import with_scratch

UNIT = tl.constexpr(rules.UNIT)


class Out(NamedTuple):
    """Where verification writes, as the kernel takes it. Strides are in elements."""

    token_ids: Any  # [B, m + 1]
    num_accepted: Any  # int32 [B]
    valid: Any  # bool [B]
    spent: Any  # float64 [B], or None
    by_request: Any  # of token_ids
    by_column: Any
    num_accepted_by: Any
    valid_by: Any
    spent_by: Any


@triton.jit(do_not_specialize=["seed", "offset", "slots", "num_rows", "N", "m", "share"])
def verify_kernel(
    out,  # `Out`
    scratch,  # int64 [B, 2]: the best word and the number of blocks that arrived, both 0 before and after
    target, draft,  # `Rows`, [B, m + 1, V] and [B, m, V_draft], or flat [N + B, V] and [N, V_draft]
    drafted,  # `Drafted`
    given,  # `Given`
    seed, offset,  # int64 [B] or one number
    slots, num_rows,  # of the draft where there is a row_map; rows of the target
    N, m,  # drafted tokens in all and at most in a request
    share,  # chunks of a split, a multiple of WARPS
    H: tl.constexpr, R: tl.constexpr,  # the rule's accept and recover
    PER_REQUEST: tl.constexpr,  # bit k: strength k is a tensor
    STATS_GIVEN: tl.constexpr,  # the draft's statistics lie as its rows do, flat or by slot; else by request
    READS: tl.constexpr, SUBTRACTS: tl.constexpr,  # what the rule reads beside q and p; whether recovery takes the draft off
    PICK_CHUNK: tl.constexpr, PICK_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0), tl.program_id(1)
    wide = request.to(tl.int64)
    V, V_draft = target.size, draft.size

    # 1. Where the draft stops.
    stop, length, bad_request, (key, position), starts, entries, rejected, judged, spent = judge(
        request, target, draft, drafted, given, seed, offset, slots, num_rows, N, m, H, PER_REQUEST, STATS_GIVEN, READS,
        BLOCK_M,
    )  # fmt: skip
    q_at, p_at, q_stats_at, p_stats_at = starts
    n, _, _ = entries
    at = position + stop
    stream = (key, at.to(tl.uint32), (at >> 32).to(tl.uint32))
    if given.budget is not None:
        tl.store(out.spent + request * out.spent_by, spent.to(tl.float64) / UNIT)

    # 2. This block's share of the one row pair. A bonus token that is given has no row, a bad request need not have one.
    has_token = stop < 0
    nothing = has_token
    if drafted.bonus_token_ids is not None:
        has_token = (stop >= length) & (bad_request == 0)
        nothing = has_token | bad_request
    q_row = row_at(target.data, q_at + stop * target.by_row, VEC > 1)
    q_stats = ()
    if target.stats is not None:
        q_stats = load_stats(target.stats, q_stats_at + stop * target.stats_by_row, has_token == 0)
    if draft.data is None or not SUBTRACTS:
        p_row, p_stats = q_row, ()
        RESIDUE: tl.constexpr = REST
    else:
        p_row, p_stats = row_at(draft.data, p_at + stop * draft.by_row, VEC > 1), ()
        if draft.stats is not None:
            p_stats = load_stats(draft.stats, p_stats_at + stop * draft.stats_by_row, rejected)
        RESIDUE: tl.constexpr = RESIDUAL
    rows = (q_row, p_row, q_stats, p_stats)
    first = split * share
    end = tl.where(nothing, first, tl.minimum(first + share, tl.cdiv(V, CHUNK)))
    if rejected:
        word = scan(
            rows, entries, judged, first, end, V, V_draft, stream, R, RESIDUE, PICK_CHUNK, WARPS, LANES, STEP, VEC
        )  # fmt: skip
    else:
        word = scan(
            rows, entries, judged, first, end, V, V_draft, stream, R, TARGET, PICK_CHUNK, WARPS, LANES, STEP, VEC
        )  # fmt: skip
    word = tl.where(bad_request, BAD, word)

    # 3. The last block to arrive knows the best chunk: it finishes the request.
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
                w = chunk_weights(rows, n, judged, c, V, p_end, R, RESIDUE)
                total = tl.sum((w * ONE).to(tl.int64), 0) + tl.zeros((1,), tl.int64)
                word = tl.maximum(word, race(total, c + tl.arange(0, 1), stream, PICK_CHUNK, word))
        ok = (word > 0) & (word < BAD)
        if drafted.bonus_token_ids is not None:
            bonus = tl.load(drafted.bonus_token_ids + request).to(tl.int64)
            ok = tl.where(has_token, (bonus >= 0) & (bonus < V), ok)
        # The accepted tokens are read again, and all else is written before the draw: both spare registers.
        tl.store(out.num_accepted + wide * out.num_accepted_by, stop.to(tl.int32))
        tl.store(out.valid + wide * out.valid_by, ok)
        j = tl.arange(0, BLOCK_M)
        start = q_at * 0
        if drafted.cu_draft_tokens is not None:
            start += tl.load(drafted.cu_draft_tokens + request)
        ids_at = wide * drafted.by_request + (start + j) * drafted.by_column
        kept = tl.load(drafted.token_ids + ids_at, mask=j < stop, other=-1)
        to = out.token_ids + wide * out.by_request
        others = (j <= m) & (j != tl.where(ok, stop, -1))
        tl.store(to + j * out.by_column, kept.to(out.token_ids.dtype.element_ty), mask=others)
        chunk = (word & LOWEST) ^ LOWEST
        drawn = ok & (has_token == 0)
        q_end, p_end = tl.where(drawn, V, 0), tl.where(drawn, p_end, 0)
        w = chunk_weights(rows, n, judged, chunk, q_end, p_end, R, RESIDUE)
        winner = race(w, tl.arange(0, CHUNK), stream, PICK_TOKEN, word)
        winner = chunk * CHUNK + ((winner & LOWEST) ^ LOWEST)
        if drafted.bonus_token_ids is not None:
            winner = tl.where(has_token, bonus, winner)
        tl.store(to + stop * out.by_column, winner.to(out.token_ids.dtype.element_ty), mask=ok)


def verify(inputs, out, scratch, splits=None, num_warps=None):
    """Write the tokens of `inputs` (checked `contract.Inputs`) to `out` (a `VerifyOutput`). Never waits for the device.

    Args:
        scratch: of `new_scratch`, or None: kept here. After a launch that raised, make it anew.
        splits, num_warps: override what is derived from the shapes. They change no result.
    """
    if isinstance(inputs.target, Logits):
        return _verify_logits(inputs, out, scratch, splits, num_warps)
    needs = {"batch_size": inputs.batch_size, "vocab_size": inputs.vocab_size, "rows": 0, "entropy": False}
    with_scratch(
        scratch, inputs.device, needs, lambda own: _launch(inputs, out, own.zeros, (None, None), splits, num_warps)
    )


def _verify_logits(inputs, out, scratch, splits, num_warps):
    """Reduce the rows of logits to statistics, then verify."""
    has_bonus, J = inputs.bonus_token_ids is None, inputs.max_draft_tokens + (inputs.bonus_token_ids is None)

    def run(scratch, stats, draft_stats):
        if not inputs.rule.reads_rows:
            return _launch(inputs, out, scratch.zeros, (stats, draft_stats), splits, num_warps)
        written = replace(inputs, target=_written(inputs.target.values, stats[:, :J]))
        if draft_stats is not None:
            written = replace(written, draft=_written(inputs.draft.values, draft_stats))
        return _launch(written, out, scratch.zeros, (None, None), splits, num_warps)

    # Their rules read whole rows of probabilities: those are written first.
    if inputs.rule.reads_rows and (inputs.cu_draft_tokens is not None or inputs.row_map is not None or not has_bonus):
        raise ValueError(
            f"from logits on triton, {inputs.rule.name} takes the padded layout with bonus rows and no row_map: pass that, "
            "probabilities to `verify`, or backend='torch'"
        )
    with_statistics(inputs, scratch, run, splits, num_warps)


def with_statistics(inputs, scratch, run, splits=None, num_warps=None):
    """Reduce the rows of logits to statistics, and call `run(scratch, stats, draft_stats)`: fp32 [..., 8], or None."""
    B, m, has_bonus = inputs.batch_size, inputs.max_draft_tokens, inputs.bonus_token_ids is None
    draft = inputs.draft if isinstance(inputs.draft, Logits) and m else None
    reduced = draft if draft is not None and draft.sampling is not None else None
    J = m + has_bonus
    needs = {"batch_size": B, "vocab_size": max(inputs.vocab_size, inputs.draft_vocab_size), "rows": 2 * m + 1}

    def reduce(scratch):
        stats = scratch.stats[: B * (2 * m + 1) * COLUMNS].view(B, 2 * m + 1, COLUMNS)
        rows = J if reduced is None else J + m
        if rows:
            reduce_rows(
                inputs.target, reduced, inputs.cu_draft_tokens, inputs.row_map, inputs.draft_token_ids.numel(), m,
                stats[:, :rows], scratch, has_bonus=has_bonus, splits=splits, num_warps=num_warps,
            )  # fmt: skip
        draft_stats = None
        if draft is not None:
            draft_stats = draft.stats if reduced is None else stats[:, J:]
        run(scratch, stats, draft_stats)

    with_scratch(scratch, inputs.device, needs | {"entropy": False}, reduce)


def _written(logits, stats) -> Probs:
    """Rows of logits [B, J, V] as the probabilities that their statistics [B, J, 8] make of them, fp32."""
    stats = RowStats(stats)
    inverse = stats.packed[..., INVERSE_TEMPERATURE, None]
    weights = ((logits.float() - stats.max[..., None]) * inverse).exp_()
    weights = weights.masked_fill_(logits < stats.cutoff[..., None], 0)
    greedy = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device) == stats.argmax[..., None]
    return Probs(torch.where(inverse == 0, greedy.float(), weights).mul_(stats.norm[..., None]))


def _read(inputs, target, draft, drafted):
    """What the rule reads beside q and p: fp32 [READS, rows of the target], None where that is nothing."""
    if inputs.rule.solves is None:
        return statistics.compute(inputs)
    if inputs.rule.solves.where_rejected:
        return clip.compute(inputs, at=find_stops(inputs, target, draft, drafted))
    return clip.compute(inputs)


def _launch(inputs, out, scratch, stats, splits, num_warps):
    """stats: statistics of the target's and the draft's rows, fp32 [..., 8], or None for rows of probabilities."""
    target, draft, drafted = target_rows(inputs, stats[0]), draft_rows(inputs, stats[1]), drafted_tokens(inputs)
    rows = [x.data for x in (target, draft) if x.data is not None]
    num_warps = num_warps or NUM_WARPS
    item = min(t.element_size() for t in rows)
    aligned = is_aligned(rows)

    chunks = definition.num_chunks(inputs.vocab_size)
    rounds = triton.cdiv(chunks, num_warps)
    splits = max(min(splits or BLOCKS // inputs.batch_size, rounds), triton.cdiv(chunks, SPLIT_CHUNKS.value), 1)
    share = triton.cdiv(rounds, splits) * num_warps

    read = _read(inputs, target, draft, drafted)
    arguments, constants = judge_arguments(inputs, target, draft, drafted, read)
    spent = None if inputs.budget is None else out.spent
    strides = (
        *out.token_ids.stride(),
        out.num_accepted.stride(0),
        out.valid.stride(0),
        *(spent.stride() if spent is not None else (0,)),
    )
    to = Out(out.token_ids, out.num_accepted, out.valid, spent, *strides)
    # Else the compiler settles for 48 registers on sm_100, and spills.
    limit = {"maxnreg": 64} if is_nvidia() and inputs.rule.solves is not None else {}
    with torch.cuda.device_of(inputs.target.values):
        verify_kernel[inputs.batch_size, triton.cdiv(chunks, share)](
            to, scratch, *arguments, share, R=jitted(inputs.rule.recover), SUBTRACTS=inputs.rule.subtracts_draft,
            PICK_CHUNK=inputs.purposes[0], PICK_TOKEN=inputs.purposes[1], WARPS=num_warps, LANES=lanes(),
            STEP=lanes() * (8 if aligned else 4), VEC=16 // item if aligned else 1, **constants, num_warps=num_warps,
            enable_fp_fusion=False, **limit,
        )  # fmt: skip
