"""`clip` as a kernel, a program for each row pair: it reads the pair once for every step, from the second on from cache."""

import math

import torch
import triton
import triton.language as tl

from .. import definition, rules
from ..rules import elementary
from .layout import dense, draft_rows, drafted_tokens, is_nvidia, lanes, number, target_rows
from .race import stream_of, uniform
from .row import is_bad
from .statistics import drafted_row

ACCEPT = tl.constexpr(definition.ACCEPT)
ONE = tl.constexpr(definition.ONE)
ONE_BITS = tl.constexpr(definition.ONE_BITS)
STEPS, CLOSE, TINY = tl.constexpr(definition.STEPS), tl.constexpr(definition.CLOSE), tl.constexpr(definition.TINY)
NAT, LARGEST = tl.constexpr(definition.NAT), tl.constexpr(float(definition.LARGEST_MULTIPLE))
_log, _without_log = (rules.bind(f, tl, triton.jit) for f in (elementary.log_of_number, elementary.without_log))


WARPS = 8


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
def _power_below(c):
    """As `clip.power_below`."""
    return (tl.maximum(c, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _fixed_up(q, ratio, c, power):
    """q of tokens of T, else 0, as `clip._fixed_up`: int64."""
    q = tl.where(ratio > c, q, 0.0)
    return (q * power * ONE).to(tl.int64) + (q > 0.0).to(tl.int64)


@triton.jit
def _sums(rows, b, c, BLOCK: tl.constexpr):
    """The sums of p and q over S, where p/q < b, and over T, where p/q > c. rows: (q_row, p_row, n, end, V, V_draft).

    Units are 2^-52, that of q over T 2^-52 / `_power_below(c)`.
    """
    q_row, p_row, n, end, V, V_draft = rows
    power = _power_below(c)
    p_s = tl.zeros((BLOCK,), tl.int64)
    q_s, p_t, q_t = p_s, p_s, p_s
    for start in range(0, end, BLOCK):
        q, p = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
        ratio = tl.div_rn(p, q)
        fixed_p, fixed_q = (p * ONE).to(tl.int64), (q * ONE).to(tl.int64)
        p_s += tl.where(ratio < b, fixed_p, 0)
        q_s += tl.where(ratio < b, fixed_q, 0)
        p_t += tl.where(ratio > c, fixed_p, 0)
        q_t += _fixed_up(q, ratio, c, power)
    return tl.sum(p_s, 0), tl.sum(q_s, 0), tl.sum(p_t, 0), tl.sum(q_t, 0)


@triton.jit
def _information(rows, b, c, BLOCK: tl.constexpr):
    """The sum of q (p/q - 1 - ln(p/q)) over what is between S and T; those of p over S and T, of q over S, of q over T in
    the units of `_sums`."""
    q_row, p_row, n, end, V, V_draft = rows
    power = _power_below(c)
    information = tl.zeros((BLOCK,), tl.int64)
    p, q_s, q_t = information, information, information
    for start in range(0, end, BLOCK):
        q_x, p_x = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
        ratio = tl.div_rn(p_x, q_x)
        fixed_q = (q_x * ONE).to(tl.int64)
        p += tl.where((ratio < b) | (ratio > c), (p_x * ONE).to(tl.int64), 0)
        q_s += tl.where(ratio < b, fixed_q, 0)
        q_t += _fixed_up(q_x, ratio, c, power)
        between = (ratio >= b) & (ratio <= c)
        information += tl.where(between, (_without_log(ratio) * q_x * NAT + 0.5).to(tl.int64), 0)
    return tl.sum(information, 0), tl.sum(p, 0), tl.sum(q_s, 0), tl.sum(q_t, 0)


@triton.jit
def _b(rows, strength, b, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """As `clip.at_price`, or else `clip.at_cap`, the search beginning at b."""
    low = (b * 0.0).to(tl.int32)
    high = low + (ONE_BITS + 1)
    steps = tl.where(rows[3] > 0, STEPS, 0)
    while steps > 0:
        if FORM == "price":
            c = b * strength
            p_s, q_s, p_t, q_t = _sums(rows, b, c, BLOCK)
            x = (p_s + p_t).to(tl.float64)
            y = q_s.to(tl.float64) + strength.to(tl.float64) * (q_t.to(tl.float64) / _power_below(c).to(tl.float64))
            found = x < 0.0
        else:
            p_s, q_s, p_t, q_t = _sums(rows, b, strength, BLOCK)
            of_t = q_t.to(tl.float64) / _power_below(strength).to(tl.float64)
            rejected = p_t.to(tl.float64) - strength.to(tl.float64) * of_t
            x, y = p_s.to(tl.float64) + rejected, q_s.to(tl.float64)
            found = rejected <= 0.0
        bits, before = b.to(tl.int32, bitcast=True), low
        enough = b.to(tl.float64) * y <= x
        low = tl.where(found, 0, tl.where(enough, bits, low))
        high = tl.where(enough, high, bits)
        newton = tl.where(y > 0.0, tl.minimum(x / y, 1.0), 1.0).to(tl.float32).to(tl.int32, bitcast=True)
        newton += tl.where(newton == bits, tl.where(bits == low, 1, -1), 0)
        step = (low + high) // 2
        some = (x > 0.0) | (y > 0.0)
        step = tl.where(some & (low < newton) & (newton < high), newton, step)
        step = tl.where((some == 0) & (bits > before + 1), bits + 1, step)
        b = step.to(tl.float32, bitcast=True)
        steps = tl.where(found | (high - low <= 1), 0, steps - 1)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _at_kl(rows, kl, c, difference, BLOCK: tl.constexpr):
    """b and c, as `clip.at_kl`, the search beginning at c. difference: of the sums of q and p."""
    low = kl * 0.0 + 1.0
    high, b = low * LARGEST, low
    steps = tl.where(rows[3] > 0, STEPS, 0)
    while steps > 0:
        b = _b(rows, c, b, "cap", BLOCK)
        information, p, q_s, q_t = _information(rows, b, c, BLOCK)
        b_, c_ = b.to(tl.float64), c.to(tl.float64)
        of_s, over_b = q_s.to(tl.float64), 1.0 / tl.maximum(b_, TINY)
        of_t = q_t.to(tl.float64) / _power_below(c).to(tl.float64)
        between = information.to(tl.float64) * (1 / NAT) + ((difference - q_s + p).to(tl.float64) - of_t) * (1 / ONE)
        outside = of_s * _log(b) + of_t * _log(c)
        left = tl.where(b < 1.0, (b_ * of_s + c_ * of_t - p.to(tl.float64)) * over_b, 0.0)
        excess = between + (left - outside) * (1 / ONE) - kl.to(tl.float64)
        slope = of_t * (1 / ONE) * (over_b - 1.0 / c_)
        every = (excess <= 0.0) & (q_t == 0)
        high = tl.where(excess > 0.0, c, high)
        low = tl.where(excess > 0.0, low, c)
        newton = tl.where(slope != 0.0, c_ - excess / slope, LARGEST).to(tl.float32)
        step = tl.where((newton > low) & (newton < high), newton, tl.sqrt_rn(low) * tl.sqrt_rn(high))
        done = (tl.abs(excess) <= kl.to(tl.float64) * CLOSE) | ((newton == c) & (b > 0.0))
        done = done | (((step > low) & (step < high)) == 0)
        steps = tl.where(every | done, 0, steps - 1)
        c = tl.where(every, LARGEST, tl.where(done, c, step))
    return b, c


@triton.jit(do_not_specialize=["seed", "offset", "N", "m", "num_rows"])
def clip_kernel(
    out,  # fp32 [2, num_rows]: b and c
    strength,  # fp32 [B] or a number
    at,  # int32 [B]: the one position of each request that is asked for; None: every one where n is not accepted at c = 1
    seed, offset,  # int64 [B] or one number
    target, draft, drafted, num_rows, N, m,  # as in `verify_kernel`
    FORM: tl.constexpr,  # what the strength is: "cap", "price" or "kl"
    PER_REQUEST: tl.constexpr,  # it is a tensor
    BLOCK: tl.constexpr,
):  # fmt: skip
    request, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    V, V_draft = target.size, draft.size
    asked, q_row, index, row = drafted_row(target, drafted, N, m)
    if at is not None:
        asked &= tl.load(at + request) == j
    id_at = request * drafted.by_request + row * drafted.by_column
    n = tl.load(drafted.token_ids + id_at, mask=asked, other=-1).to(tl.int64)
    asked &= n >= 0
    p_row = None
    if draft.data is not None:
        p_row = draft.data + request * draft.by_request + row * draft.by_row
    if at is None:
        p_n = 1.0
        if p_row is not None:
            p_n = tl.minimum(tl.load(p_row + n, mask=asked & (n < V_draft), other=0.0).to(tl.float32), 1.0)
        q_n = tl.load(q_row + n, mask=asked & (n < V), other=0.0).to(tl.float32)
        key, position = stream_of(seed, offset, tl.program_id(0))
        word = position + j
        zero = tl.zeros((), tl.uint32)
        r0, r1, _, _ = tl.philox(key, zero, ACCEPT, word.to(tl.uint32), (word >> 32).to(tl.uint32))
        asked &= (uniform(r0, r1) * p_n < q_n) == 0
    if PER_REQUEST:
        strength = tl.load(strength + request)
    else:
        strength = number(strength)
    if FORM != "kl":
        strength = tl.maximum(strength, 1.0)  # a bad one makes its request invalid whatever is solved here
    end = tl.where(asked, tl.maximum(V, V_draft), 0)

    bad, q_s = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    all_q, all_p = q_s, q_s
    for start in range(0, end, BLOCK):
        q, p = _pair(q_row, p_row, n, start, V, V_draft, BLOCK)
        bad |= (is_bad(q) | is_bad(p)).to(tl.int32)
        if FORM == "kl":
            fixed_q = (q * ONE).to(tl.int64)
            all_q += fixed_q
            all_p += (p * ONE).to(tl.int64)
            q_s += tl.where(tl.div_rn(p, q) < 1.0, fixed_q, 0)
    is_bad_row = tl.max(bad, 0) > 0
    end = tl.where(is_bad_row, 0, end)
    strength = strength + tl.sum(bad, 0) * 0.0
    rows = (q_row, p_row, n, end, V, V_draft)
    if FORM == "kl":
        # As `clip._first`.
        q_s, all_q = tl.sum(q_s, 0), tl.sum(all_q, 0)
        q_t = (all_q - q_s).to(tl.float64)
        half = (strength.to(tl.float64) * q_s.to(tl.float64) * ONE / (q_t * all_q.to(tl.float64))).to(tl.float32)
        first = tl.where(q_t > 0.0, tl.minimum(1.0 + tl.sqrt_rn(2.0 * half) + half, LARGEST), LARGEST)
        b, c = _at_kl(rows, strength, first, all_q - tl.sum(all_p, 0), BLOCK)
    else:
        b, c = _b(rows, strength, strength * 0.0 + 1.0, FORM, BLOCK), strength
        if FORM == "price":
            c = b * strength
    b = tl.where(b > 0.0, b, 1.0)
    tl.store(out + index, tl.where(is_bad_row, float("nan"), b), mask=asked)
    tl.store(out + num_rows + index, tl.where(is_bad_row, float("nan"), c), mask=asked)


def compute(inputs, at=None):
    """fp32 [2, R]: b and c at the R rows of the target, 1 where not asked for. at: int32 [B], as in `clip_kernel`."""
    target = inputs.target.values
    out = torch.ones((2, math.prod(target.shape[:-1])), dtype=torch.float32, device=target.device)
    what, index = inputs.rule.solves
    strength = dense(inputs.rule.strengths[index])
    # Else the compiler settles for 80 registers and spills, where rows are read an entry at a time.
    limit = {"maxnreg": 96} if is_nvidia() and what != "kl" else {}
    if inputs.max_draft_tokens:
        with torch.cuda.device_of(target):
            clip_kernel[inputs.batch_size, inputs.max_draft_tokens](
                out, strength, at, dense(inputs.seed), dense(inputs.offset), target_rows(inputs), draft_rows(inputs),
                drafted_tokens(inputs), out.shape[1], inputs.draft_token_ids.numel(), inputs.max_draft_tokens, FORM=what,
                PER_REQUEST=isinstance(strength, torch.Tensor), BLOCK=4 * WARPS * lanes(), num_warps=WARPS,
                enable_fp_fusion=False, **limit,
            )  # fmt: skip
    return out
