"""Where a draft stops, in Triton: the pairs (q_n, p_n) of a request, what its rule accepts, and the first that is not.

`judge` is the first half of `verify_kernel`; `stops_kernel` runs it alone, for rules whose recovery is solved at that position.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import definition, rules
from ..contract import Logits
from .layout import dense, number, span_of
from .race import stream_of, uniform
from .row import is_bad, load_stats
from .scan import load

ACCEPT = tl.constexpr(definition.ACCEPT)
MOST, UNIT = tl.constexpr(rules.MOST), tl.constexpr(rules.UNIT)
_spend, _cap, _room = (rules.bind(f, tl, triton.jit) for f in (rules.spend, rules.cap, rules.room))


class Given(NamedTuple):
    """What a rule is given beside rows, as kernels take it."""

    strengths: Any  # tuple of fp32 [B] or numbers
    read: Any  # fp32 [READS, num_rows], what the rule reads at the rows of the target; or None
    budget: Any  # float64 [B], or None


@triton.jit
def _statistics(read, num_rows, row, mask, READS: tl.constexpr):
    """What the rule reads at rows of the target beside q and p: a tuple of READS fp32."""
    found = ()
    for k in tl.static_range(READS):
        found = found + (tl.load(read + k * num_rows + row, mask=mask, other=0.0),)  # noqa: RUF005
    return found


@triton.jit
def locate(
    request, target, draft, drafted, slots, N, m, STATS_GIVEN: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Where a request's rows and tokens lie.

    Returns:
        its first flat row, the length of its draft, whether its prefix sums or its slot are out of order,
        drafted ids int64 [BLOCK_M], one more than there can be, -1 beyond the draft,
        offsets of its first rows in target and draft, and of their statistics.
    """
    wide = request.to(tl.int64)
    start, length, disorder = span_of(request, drafted.cu_draft_tokens, N, m)
    slot, draft_start = wide, start
    if drafted.row_map is not None:
        slot, draft_start = tl.load(drafted.row_map + request).to(tl.int64), start * 0
        outside = (slot < 0) | (slot >= slots)
        slot = tl.where(outside, 0, slot)
        disorder |= outside
    j = tl.arange(0, BLOCK_M)
    ids_at = wide * drafted.by_request + (start + j) * drafted.by_column
    ids = tl.load(drafted.token_ids + ids_at, mask=j < length, other=-1).to(tl.int64)
    q_at = wide * target.by_request + start * target.by_row
    p_at = slot * draft.by_request + draft_start * draft.by_row
    # Statistics that came with the draft lie as its rows do, others by request.
    if STATS_GIVEN:
        p_stats_at = slot * draft.stats_by_request + draft_start * draft.stats_by_row
    else:
        p_stats_at = wide * draft.stats_by_request
    return start, length, disorder, ids, (q_at, p_at, wide * target.stats_by_request, p_stats_at)


@triton.jit
def pairs(ids, target, draft, starts, target_counts, draft_counts, BLOCK_M: tl.constexpr):
    """q and p of drafted tokens, fp32 [BLOCK_M], 0 outside a vocabulary. starts: of `locate`. *_counts: which rows have
    statistics that count, if they are logits; of a bad one both are NaN."""
    q_at, p_at, q_stats_at, p_stats_at = starts
    row = tl.arange(0, BLOCK_M).to(tl.int64)
    in_target, in_draft = (ids >= 0) & (ids < target.size), (ids >= 0) & (ids < draft.size)
    stats = ()
    if target.stats is not None:
        stats = load_stats(target.stats, q_stats_at + row * target.stats_by_row, target_counts)
    q = load(target.data, q_at + row * target.by_row + ids, ids, in_target, stats)
    if draft.data is None:
        p = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        stats = ()
        if draft.stats is not None:
            stats = load_stats(draft.stats, p_stats_at + row * draft.stats_by_row, draft_counts)
        p = load(draft.data, p_at + row * draft.by_row + ids, ids, in_draft, stats)
    return q, p


@triton.jit
def judge(
    request, target, draft, drafted, given, seed, offset, slots, num_rows, N, m,  # as in `verify_kernel`
    H: tl.constexpr, PER_REQUEST: tl.constexpr, STATS_GIVEN: tl.constexpr, READS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The first position that is rejected, bad or not there.

    Returns:
        stop, length of the draft, whether a value that counts is bad, (key, position of the stream),
        offsets of the request's first rows in target and draft, and of their statistics,
        (n, its entries in q and p) at the stop, whether n is rejected,
        (q_n, h_n, least, given) as in `scan`, what was spent of a budget int64.
    """
    wide = request.to(tl.int64)
    bad_request = request < 0
    key, position = stream_of(seed, offset, request)
    values = ()
    for k in tl.static_range(len(given.strengths)):
        s = given.strengths[k]
        if (PER_REQUEST >> k) & 1:
            s = tl.load(s + request)
            bad_request |= ((s >= 0.0) & (s < float("inf"))) == 0
        else:
            s = number(s)
        values = values + (s,)  # noqa: RUF005 (triton has no starred tuples)
    start, length, disorder, ids, starts = locate(request, target, draft, drafted, slots, N, m, STATS_GIVEN, BLOCK_M)
    bad_request |= disorder
    # A row of the target past the draft's end counts too, where it is there.
    j = tl.arange(0, BLOCK_M)
    q, p = pairs(ids, target, draft, starts, j < length + (drafted.bonus_token_ids is None), ids >= 0, BLOCK_M)
    bad = (ids < -1) | (ids >= tl.maximum(target.size, draft.size)) | is_bad(q) | is_bad(p)
    q_n, p_n = tl.minimum(q, 1.0), tl.minimum(p, 1.0)

    # What the rule accepts, within what is left of a budget.
    at = position + j
    r0, r1, _, _ = tl.philox(key, tl.zeros_like(j).to(tl.uint32), ACCEPT, at.to(tl.uint32), (at >> 32).to(tl.uint32))
    stat = ()
    first = start + wide
    if drafted.cu_draft_tokens is None:
        first += wide * m
    if READS:
        stat = _statistics(given.read, num_rows, first + j, ids >= 0, READS)
        for k in tl.static_range(READS):
            bad |= (stat[k] != stat[k]) & (ids >= 0)
    h_n = H(q_n, p_n, stat, *values)
    if given.budget is not None:
        whole = tl.load(given.budget + request)
        bad_request |= (whole >= 0.0) == 0
        spends = tl.where(ids >= 0, _spend(h_n, q_n, p_n), 0)
        left = (tl.minimum(tl.where(whole >= 0.0, whole, 0.0), MOST) * UNIT).to(tl.int64)
        if BLOCK_M > 1:
            left = tl.maximum(left - (tl.cumsum(spends, 0) - spends), 0)
        h_n = tl.minimum(h_n, q_n * _cap(left))
    # An id beyond the target's vocabulary is never accepted.
    accepted = (uniform(r0, r1) * p_n < h_n) & (ids >= 0) & (ids < target.size) & (bad == 0)
    stop = tl.min(tl.where(accepted, BLOCK_M, j), 0)
    stop = tl.where(bad_request, 0, stop)
    bad_request |= tl.sum(tl.where(j == stop, bad.to(tl.int32), 0), 0) > 0

    # The position where it stops.
    n = tl.sum(tl.where(j == stop, ids, 0), 0)
    q, p = tl.sum(tl.where(j == stop, q, 0.0), 0), tl.sum(tl.where(j == stop, p, 0.0), 0)
    # By way of int32, which stays in a uniform register: then the loops that follow are uniform too, and cheaper.
    rejected = tl.max(tl.where((j == stop) & (ids >= 0), 1, 0), 0) > 0
    q_n, h_n = tl.minimum(q, 1.0), tl.sum(tl.where(j == stop, h_n, 0.0), 0)
    if READS:
        stat = _statistics(given.read, num_rows, first + stop, rejected, READS)
    least, spent = (), 0
    if given.budget is not None:
        least = (_room(q_n, h_n),)  # the mass that h_n lost to the cap
        spent = tl.sum(tl.where(j < stop, tl.minimum(spends, left), 0), 0)
    judged = q_n, h_n, least, (stat,) + values  # noqa: RUF005
    return (
        stop.to(tl.int64), length, bad_request, (key, position), starts, (n, q, p), rejected, judged, spent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "offset", "slots", "num_rows", "N", "m"])
def stops_kernel(
    stops,  # out: int32 [B]
    target, draft, drafted, given, seed, offset, slots, num_rows, N, m,  # as in `verify_kernel`
    H: tl.constexpr, PER_REQUEST: tl.constexpr, STATS_GIVEN: tl.constexpr, READS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    stop, _, _, _, _, _, _, _, _ = judge(
        request, target, draft, drafted, given, seed, offset, slots, num_rows, N, m, H, PER_REQUEST, STATS_GIVEN, READS,
        BLOCK_M,
    )  # fmt: skip
    tl.store(stops + request, stop.to(tl.int32))


def judge_arguments(inputs, target, draft, drafted, read):
    """What `judge` takes after the request, and the constants by name. target, draft, drafted: `Rows` and `Drafted`."""
    strengths = inputs.rule.strengths
    arguments = (
        target, draft, drafted, Given(tuple(map(dense, strengths)), read, dense(inputs.budget)), dense(inputs.seed),
        dense(inputs.offset), 0 if draft.data is None else len(draft.data), inputs.target.values.shape[:-1].numel(),
        inputs.draft_token_ids.numel(), inputs.max_draft_tokens,
    )  # fmt: skip
    return arguments, {
        "H": jitted(inputs.rule.accept),
        "PER_REQUEST": sum(1 << k for k, s in enumerate(strengths) if isinstance(s, torch.Tensor)),
        "STATS_GIVEN": isinstance(inputs.draft, Logits) and inputs.draft.stats is not None,
        "READS": 0 if read is None else len(read),
        "BLOCK_M": triton.next_power_of_2(inputs.max_draft_tokens + 1),
    }


def find_stops(inputs, target, draft, drafted):
    """int32 [B]: where each draft stops, by a rule that reads no rows for it."""
    arguments, constants = judge_arguments(inputs, target, draft, drafted, None)
    stops = torch.empty(inputs.batch_size, dtype=torch.int32, device=inputs.device)
    with torch.cuda.device_of(stops):
        stops_kernel[(inputs.batch_size,)](stops, *arguments, **constants, num_warps=1, enable_fp_fusion=False)
    return stops


@functools.cache
def jitted(function):
    """A function of a rule as one of the kernels, the same object each time, so that triton's cache knows it."""
    return rules.bind(function, tl, triton.jit)
