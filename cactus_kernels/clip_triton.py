"""`clip` as a kernel, a program for each row pair: it reads the pair once for every step, from the second on from cache."""

import math

import torch
import triton
import triton.language as tl

from . import clip, rules
from .layout_triton import dense, input_strides
from .row_statistics_triton import drafted_row
from .row_triton import is_bad
from .rules import elementary

ONE = tl.constexpr(clip.ONE)
STEPS = tl.constexpr(clip.STEPS)
NAT, LARGEST = tl.constexpr(clip.NAT), tl.constexpr(float(clip.LARGEST))
_log = rules.bind(elementary.log, tl, triton.jit)
BLOCK = 2048


@triton.jit
def _fixed(x, mask):
    return tl.where(mask, (x * ONE).to(tl.int64), 0)


@triton.jit
def _pair(q_row, p_row, n, start, V, V_draft, BLOCK: tl.constexpr):
    """A block of both rows, fp32 [BLOCK], 0 beyond their ends. p_row None: one-hot at n."""
    token = start + tl.arange(0, BLOCK)
    q = tl.load(q_row + token, mask=token < V, other=0.0).to(tl.float32)
    if p_row is None:
        p = tl.where(token == n, 1.0, 0.0)
    else:
        p = tl.load(p_row + token, mask=token < V_draft, other=0.0).to(tl.float32)
    return q, p


@triton.jit
def _at_cap(q_row, p_row, n, end, V, V_draft, cap, BLOCK: tl.constexpr):
    """b, as `clip.at_cap`."""
    zero = tl.zeros((BLOCK,), tl.int64)
    sums = zero
    for start in range(0, end, BLOCK):
        q, p = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
        sums += _fixed(tl.maximum(p - cap * q, 0.0), True)
    rejected = tl.sum(sums, 0)
    b = cap * 0.0 + 1.0
    steps = tl.where(end > 0, STEPS, 0)
    while steps > 0:
        p_s, q_s = zero, zero
        for start in range(0, end, BLOCK):
            q, p = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
            recovered = b * q > p
            p_s += _fixed(p, recovered)
            q_s += _fixed(q, recovered)
        lower = ((tl.sum(p_s, 0) + rejected).to(tl.float64) / tl.sum(q_s, 0).to(tl.float64)).to(tl.float32)
        go = lower < b
        b = tl.where(go, lower, b)
        steps = tl.where(go, steps - 1, 0)
    return b


@triton.jit
def _at_price(q_row, p_row, n, end, V, V_draft, price, BLOCK: tl.constexpr):
    """b, as `clip.at_price`."""
    zero = tl.zeros((BLOCK,), tl.int64)
    b = price * 0.0 + 1.0
    low, high = tl.div_rn(b, price), b
    steps = tl.where(end > 0, STEPS, 0)
    while steps > 0:
        p_s, q_s, p_t, q_t = zero, zero, zero, zero
        for start in range(0, end, BLOCK):
            q, p = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
            recovered, rejected = b * q > p, p > (b * price) * q
            p_s += _fixed(p, recovered)
            q_s += _fixed(q, recovered)
            p_t += _fixed(p, rejected)
            q_t += _fixed(q, rejected)
        up = (tl.sum(p_s, 0) + tl.sum(p_t, 0)).to(tl.float64)
        down = tl.sum(q_s, 0).to(tl.float64) + price.to(tl.float64) * tl.sum(q_t, 0).to(tl.float64)
        newton = (up / down).to(tl.float32)
        go = tl.abs(newton - b) > 0.0
        too_high = b.to(tl.float64) * down > up
        high = tl.where(go & too_high, b, high)
        low = tl.where(go & (too_high == 0), b, low)
        step = tl.where((newton > low) & (newton < high), newton, 0.5 * (low + high))
        b = tl.where(go, step, b)
        go = go & (b > low) & (b < high)
        steps = tl.where(go, steps - 1, 0)
    return b


@triton.jit
def _at_kl(q_row, p_row, n, end, V, V_draft, kl, BLOCK: tl.constexpr):
    """b and c, as `clip.at_kl`."""
    zero = tl.zeros((BLOCK,), tl.int64)
    low = kl * 0.0 + 1.0
    high, c, b = low * LARGEST, low * LARGEST, low
    steps = tl.where(end > 0, STEPS, 0)
    while steps > 0:
        b = _at_cap(q_row, p_row, n, end, V, V_draft, c, BLOCK)
        q_s, q_t, between = zero, zero, zero
        for start in range(0, end, BLOCK):
            q, p = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
            recovered, rejected = b * q > p, p > c * q
            q_s += _fixed(q, recovered)
            q_t += _fixed(q, rejected)
            information = (q * (_log(q) - _log(p)) * NAT).to(tl.int64)
            between += tl.where(recovered | rejected, 0, information)
        q_of_s, q_of_t = tl.sum(q_s, 0).to(tl.float64), tl.sum(q_t, 0).to(tl.float64)
        outside = q_of_s * _log(b).to(tl.float64) + q_of_t * _log(c).to(tl.float64)
        excess = tl.sum(between, 0).to(tl.float64) * (1 / NAT) - outside * (1 / ONE) - kl.to(tl.float64)
        slope = q_of_t * (1 / ONE) * (1 / b.to(tl.float64) - 1 / c.to(tl.float64))
        too_far = excess > 0.0
        first = c == LARGEST
        high = tl.where(too_far, c, high)
        low = tl.where(too_far | first, low, c)
        newton = tl.where(first, 2.0, (c.to(tl.float64) - excess / slope).to(tl.float32))
        step = tl.where((newton > low) & (newton < high), newton, tl.sqrt_rn(low) * tl.sqrt_rn(high))
        go = (step > low) & (step < high) & ((first == 0) | too_far)
        c = tl.where(go, step, c)
        steps = tl.where(go, steps - 1, 0)
    return b, c


@triton.jit(do_not_specialize=["N", "m", "num_rows"])
def clip_kernel(
    out,  # fp32 [2, num_rows]: b and c
    strength,  # fp32 [B] or a number
    at,  # int32 [B]: the one position of each request that is asked for; None: every drafted one
    target, draft, draft_token_ids, cu_draft_tokens, strides, num_rows, N, m, V, V_draft,  # as in `verify_kernel`
    FORM: tl.constexpr,  # what the strength is: "cap", "price" or "kl"
    PER_REQUEST: tl.constexpr,  # it is a tensor
    BLOCK: tl.constexpr,
):  # fmt: skip
    request, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    drafted, q_row, index, row = drafted_row(target, cu_draft_tokens, strides, N, m)
    if at is not None:
        drafted &= tl.load(at + request) == j
    n = tl.load(draft_token_ids + request * strides[4] + row * strides[5], mask=drafted, other=-1).to(tl.int64)
    drafted &= n >= 0
    p_row = None
    if draft is not None:
        p_row = draft + request * strides[2] + row * strides[3]
    if PER_REQUEST:
        strength = tl.load(strength + request)
    if FORM != "kl":
        strength = tl.maximum(strength + 0.0, 1.0)  # a bad one makes its request invalid whatever is solved here
    end = tl.where(drafted, tl.maximum(V, V_draft), 0)

    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, end, BLOCK):
        q, p = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
        bad |= (is_bad(q) | is_bad(p)).to(tl.int32)
    is_bad_row = tl.max(bad, 0) > 0
    end = tl.where(is_bad_row, 0, end)
    strength = strength + tl.sum(bad, 0) * 0.0
    if FORM == "cap":
        b, c = _at_cap(q_row, p_row, n, end, V, V_draft, strength, BLOCK), strength
    elif FORM == "price":
        b = _at_price(q_row, p_row, n, end, V, V_draft, strength, BLOCK)
        c = b * strength
    else:
        b, c = _at_kl(q_row, p_row, n, end, V, V_draft, strength, BLOCK)
    tl.store(out + index, tl.where(is_bad_row, float("nan"), b), mask=drafted)
    tl.store(out + num_rows + index, tl.where(is_bad_row, float("nan"), c), mask=drafted)


def compute(inputs, at=None):
    """fp32 [2, R]: b and c at the R rows of the target, 1 where not asked for. at: int32 [B], as in `clip_kernel`."""
    target, ids = inputs.target, inputs.draft_token_ids
    out = torch.ones((2, math.prod(target.shape[:-1])), device=target.device)
    (strength,) = map(dense, inputs.rule.strengths)
    if inputs.max_draft_tokens:
        with torch.cuda.device_of(target):
            clip_kernel[inputs.batch_size, inputs.max_draft_tokens](
                out, strength, at, target, inputs.draft, ids, dense(inputs.cu_draft_tokens), input_strides(inputs),
                out.shape[1], ids.numel(), inputs.max_draft_tokens, inputs.vocab_size, inputs.draft_vocab_size,
                FORM=inputs.rule.form, PER_REQUEST=isinstance(strength, torch.Tensor), BLOCK=BLOCK, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out
