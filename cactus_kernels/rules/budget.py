"""A budget for a whole sequence: what accepted tokens spend of it, and h within what is left (docs/rules.md).

Spending and what is left are int64 in units of 2^-32 nats, so that prefix sums have no order. Rounding is always to the safe
side: a token spends a little more than ln(min(p_n, h_n) / q_n), and the cap is a little below e^(what is left).
"""

from functools import cache
from types import FunctionType

from .elementary import exp, log
from .languages import torch_language as m

UNIT = 2.0**32  # a nat
MOST = 2.0**20  # nats: a larger budget is one of that size


def spend(h_n, q_n, p_n):
    """What accepting n spends: int64 >= 0."""
    ratio = m.div_rn(m.minimum(p_n, h_n), m.where(q_n > 0.0, q_n, 1.0))
    nats = log(m.maximum(ratio, 1.0))
    nats = m.where(ratio > 1.0, nats * 1.000001 + 1e-7, 0.0)
    return m.cast(nats * 4294967296.0, m.int64)


def cap(left):
    """What h_n may be at most, as a multiple of q_n: fp32 >= 1, for int64 left."""
    nats = m.cast(left, m.float32) * 2.3283064365386963e-10
    return m.maximum(exp(nats * 0.9999998) * 0.999999, 1.0)


def kept_within(q, q_n, is_drafted, h_n, r, most):
    # Off n, h gets back the mass that h_n lost.
    h_n = m.minimum(h_n, q_n * most)
    scale = m.div_rn(1.0 - h_n, m.where(q_n < 1.0, 1.0 - q_n, 1.0))
    return m.where(is_drafted, h_n, m.maximum(r, q * scale))


def within_h(q, q_n, p_n, is_drafted, stat, strength):
    h_n, r = inner(q_n, q_n, p_n, True, stat, strength), inner(q, q_n, p_n, False, stat, strength)
    return kept_within(q, q_n, is_drafted, h_n, r, stat[-1])


def within_fixed_h(q, q_n, p_n, is_drafted, stat):
    h_n, r = inner(q_n, q_n, p_n, True, stat), inner(q, q_n, p_n, False, stat)
    return kept_within(q, q_n, is_drafted, h_n, r, stat[-1])


def inner(q, q_n, p_n, is_drafted, stat, *strengths):
    raise NotImplementedError("`within` puts the body of a rule here")


@cache
def within(body):
    """The body of a rule with no strength or one, and with h_n at most the last statistic times q_n; the same object each
    time."""
    outer = within_fixed_h if body.__code__.co_argcount == within_fixed_h.__code__.co_argcount else within_h
    return FunctionType(outer.__code__, {**outer.__globals__, "inner": body}, outer.__name__)
