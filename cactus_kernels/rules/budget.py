"""A budget for a whole sequence: what accepted tokens spend of it, and h within what is left (docs/rules.md).

Spending and what is left are int64 in units of 2^-32 nats, so that prefix sums have no order. Rounding is always to the safe
side: a token spends a little more than ln(min(p_n, h_n) / q_n), and the cap is a little below e^(what is left).
"""

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
