"""The statistics of `host.statistics` in one small launch, a program for each drafted position."""

import math

import torch
import triton
import triton.language as tl

from .. import definition, rules
from ..rules import elementary
from .layout import drafted_tokens, span_of, target_rows
from .row import is_bad

ONE, CERTAIN_ONE = tl.constexpr(definition.ENTROPY_UNIT), tl.constexpr(definition.CERTAINTY_UNIT)
NEGLIGIBLE = tl.constexpr(definition.NEGLIGIBLE)
BLOCK = 2048
OF_TERMS = {"entropy", "relative entropy", "certainty"}  # sums over a row, one kernel
_log, _without_log = (rules.bind(f, tl, triton.jit) for f in (elementary.log_of_normal, elementary.without_log))


@triton.jit
def drafted_row(target, drafted, N, m):
    """The target row of this program's position: (whether it is drafted, pointer, its number among all, its row by strides)."""
    request, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, length, _ = span_of(request, drafted.cu_draft_tokens, N, m)
    row = start + j
    if drafted.cu_draft_tokens is None:
        index = row + request * (m + 1)
    else:
        index = row + request
    return j < length, target.data + request * target.by_request + row * target.by_row, index, row


@triton.jit(do_not_specialize=["N", "m"])
def entropy_kernel(
    entropy, largest,  # out: fp32 [R] each, or None; the first is the certainty where CERTAINTY
    target, drafted, N, m,  # as in `verify_kernel`
    scale,  # of the entropy or the certainty
    CERTAINTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    asked, row, index, _ = drafted_row(target, drafted, N, m)
    V = target.size
    sums, top, bad = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tl.where(asked, V, 0), BLOCK):
        token = start + tl.arange(0, BLOCK)
        q = tl.load(row + token, mask=token < V, other=0.0).to(tl.float32)
        bad |= is_bad(q).to(tl.int32)
        top = tl.maximum(top, q)
        if CERTAINTY:
            size = V.to(tl.float32)
            t = q * size
            some = t > NEGLIGIBLE
            term = q * _without_log(tl.div_rn(1.0, tl.where(some, t, 1.0)))
            term = tl.where(some, term, tl.div_rn(1.0, size))
            sums += tl.where(token < V, (term * CERTAIN_ONE).to(tl.int64), 0)
        else:
            sums -= (q * _log(q) * ONE).to(tl.int64)
    bad = tl.max(bad, 0) > 0
    if entropy is not None:
        value = tl.sum(sums, 0).to(tl.float32) * (1 / CERTAIN_ONE if CERTAINTY else 1 / ONE) * scale
        tl.store(entropy + index, tl.where(bad, float("nan"), value), mask=asked)
    if largest is not None:
        tl.store(largest + index, tl.where(bad, float("nan"), tl.minimum(tl.max(top, 0), 1.0)), mask=asked)


@triton.jit(do_not_specialize=["N", "m", "k"])
def kth_largest_kernel(
    out,  # fp32 [R]
    target, drafted, N, m,  # as in `verify_kernel`
    k,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Bits of numbers >= 0 are in the order of the numbers: digits of 8 bits, the highest first.
    asked, row, index, _ = drafted_row(target, drafted, N, m)
    V = target.size
    end = tl.where(asked, V, 0)
    bad = tl.zeros((BLOCK,), tl.int32)
    digit = tl.arange(0, 512)
    prefix, left = k * 0, k
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((512,), tl.int32)
        for start in range(0, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            q = tl.load(row + token, mask=token < V, other=0.0).to(tl.float32)
            bad |= is_bad(q).to(tl.int32)
            bits = tl.where(q > 0.0, q, 0.0).to(tl.int32, bitcast=True) >> shift
            counts += tl.histogram(tl.where((bits >> 8) == prefix, bits & 255, 511), 512)
        counts = tl.where(digit < 256, counts, 0)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        found = tl.max(tl.where((at_least >= left) & (digit < 256), digit, 0), 0)
        left -= tl.sum(tl.where(digit == found, at_least - counts, 0), 0)
        prefix = prefix * 256 + found
    value = tl.minimum(prefix.to(tl.float32, bitcast=True), 1.0)
    tl.store(out + index, tl.where(tl.max(bad, 0) > 0, float("nan"), value), mask=asked)


def compute(inputs):
    """fp32 [S, R], those that the rule of `inputs` names, of the R rows of the target; None without names."""
    if not inputs.rule.statistics:
        return None
    target, names = inputs.target.values, inputs.rule.statistics
    shape = len(names), math.prod(target.shape[:-1])
    out = torch.full(shape, float("nan"), dtype=torch.float32, device=target.device)
    N, m, V = inputs.draft_token_ids.numel(), inputs.max_draft_tokens, inputs.vocab_size
    rows = target_rows(inputs), drafted_tokens(inputs), N, m
    given = dict(zip(names, out, strict=True))
    options = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}
    with torch.cuda.device_of(target):
        for name, values in given.items():
            if not m:
                continue
            if name in OF_TERMS:
                scale = 1.0 if name == "entropy" else definition.entropy_scale(V)
                entropy_kernel[inputs.batch_size, m](
                    values, given.get("largest"), *rows, scale, CERTAINTY=name == "certainty", **options
                )
            elif name == "largest":
                if not OF_TERMS & given.keys():
                    entropy_kernel[inputs.batch_size, m](None, values, *rows, 1.0, CERTAINTY=False, **options)
            elif name[0] == "k-th largest":
                kth_largest_kernel[inputs.batch_size, m](values, *rows, name[1], **options)
            else:
                raise ValueError(f"unknown statistic {name!r}")
    return out
