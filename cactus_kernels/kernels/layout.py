"""How tensors lie in memory, and numbers, as the kernels are told."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..contract import Logits
from .race import INTERPRETED


@triton.jit
def number(x):
    """A number that the launch was given, as fp32. A GPU is handed just that; the interpreter hands on Python's own float, and
    takes one below 2^-126 for a float64, with all that is computed from it."""
    return tl.full((), x, tl.float32)


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


def packed_settings(sampling):
    """The settings as kernels take them, and which of them are tensors, a bit each."""
    values = sampling.settings()
    values = (values[0], values[1] if isinstance(values[1], torch.Tensor) else min(values[1], 1 << 24), *values[2:])
    bits = sum(1 << k for k, v in enumerate(values) if isinstance(v, torch.Tensor))
    return tuple(dense(v) if isinstance(v, torch.Tensor) else float(v) for v in values), bits


def row_strides(rows, flat):
    """(request, row) strides in elements: flat rows of a request follow those of the one before it."""
    return (0, rows.stride(0)) if flat else rows.stride()[:2]


class Rows(NamedTuple):
    """Rows of a model, as kernels take them. Strides are in elements; flat rows have no stride of requests."""

    data: Any  # [..., V]: probabilities, or logits; None: one-hot drafts
    stats: Any  # fp32 [..., 8] of logits; None: probabilities
    by_request: Any
    by_row: Any
    stats_by_request: Any
    stats_by_row: Any
    size: Any  # V


class Drafted(NamedTuple):
    """Drafted tokens, and what belongs to each request, as kernels take them. Strides are in elements."""

    token_ids: Any  # int32 or int64 [B, m] or flat [N]
    cu_draft_tokens: Any  # [B + 1] prefix sums; None: padded
    row_map: Any  # [B] slots of the draft's rows; None: those of request b are the b-th
    bonus_token_ids: Any  # [B], then the target has no bonus rows; None
    by_request: Any
    by_column: Any


def target_rows(inputs, stats=None) -> Rows:
    """Of checked `Inputs`. stats: fp32 [B, J, 8] of logits."""
    flat, rows = inputs.cu_draft_tokens is not None, inputs.target.values
    # Flat rows of a request start at cu_draft_tokens[request], in the target one further for each bonus row before it.
    by_request = 0 if flat and inputs.bonus_token_ids is not None else rows.stride(0)
    stats_strides = (0, 0) if stats is None else stats.stride()[:2]
    return Rows(rows, stats, by_request, rows.stride(0 if flat else 1), *stats_strides, inputs.vocab_size)


def draft_rows(inputs, stats=None) -> Rows:
    """Of checked `Inputs`. stats: of logits; those that came with them lie as the rows do, others are [B, m, 8]."""
    flat, draft = inputs.cu_draft_tokens is not None and inputs.row_map is None, inputs.draft
    if draft is None:
        return Rows(None, None, 0, 0, 0, 0, inputs.draft_vocab_size)
    given = isinstance(draft, Logits) and draft.stats is not None
    stats_strides = (0, 0) if stats is None else row_strides(stats, flat and given)
    return Rows(draft.values, stats, *row_strides(draft.values, flat), *stats_strides, inputs.draft_vocab_size)


def drafted_tokens(inputs) -> Drafted:
    """Of checked `Inputs`."""
    ids, cu = inputs.draft_token_ids, inputs.cu_draft_tokens
    strides = ids.stride() if cu is None else (0, ids.stride(0))
    return Drafted(ids, dense(cu), dense(inputs.row_map), dense(inputs.bonus_token_ids), *strides)


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
