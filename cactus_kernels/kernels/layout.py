"""How tensors lie in memory, and numbers, as the kernels are told."""

import functools

import torch
import triton
import triton.language as tl

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
