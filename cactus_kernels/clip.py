"""The multipliers b <= 1 <= c of the law `clip(p, b q, c q)` for one row pair: the torch reference.

The law sums to what p sums to: sum (b q - p)+ = sum (p - c q)+, what recovery adds is what was rejected. With S the tokens of
the first sum and T those of the second, both sides are linear in b and c until S or T change, so Newton's steps solve it:

    c given        b = (sum over S of p + R) / sum over S of q, R = sum (p - c q)+; from b = 1, decreasing
    kl given       KL(q || law) = kl for c, Newton's steps within a bracket, with the b of each c
    c = price b    b = sum over S and T of p / (sum over S of q + price * sum over T of q), within a bracket

Products are fp32, sums int64 in units of 2^-52, the few numbers a row float64: the same bits on every backend.
"""

import numpy as np

from . import numpy_language
from .race_torch import ONE
from .rules import bind, elementary

BLOCK = 1 << 14  # entries handled at once: few enough for the cache
LARGEST = np.float32(3e38)
NAT = 2.0**40  # of q ln(q / p)
STEPS = 64  # at most; ten are much

_log = bind(elementary.log, numpy_language)


def compute(form, target, draft, request, position, drafted, strength):
    """b and c of row pairs: fp32 array [2, R], NaN where a row or its strength is bad.

    Args:
        form: "cap", "price" or "kl", what the strength is. strength: a number, or an fp32 array [R, 1].
        target, draft: `rows_torch.ProbRows`; draft None: one-hot.
        request, position: int64 arrays [R], which rows. drafted: int64 array [R], their drafted tokens.
    """
    out = np.full((2, len(request)), np.nan, dtype=np.float32)
    V = target.vocab_size
    strength = np.broadcast_to(np.float32(strength), (len(request), 1))[:, 0]
    for i, (s, n) in enumerate(zip(strength, drafted, strict=True)):
        at = request[i : i + 1], position[i : i + 1]
        q = target.whole(*at)
        bad = target.bad_whole(q)[0]
        q = q[0].numpy()
        p = np.zeros(max(V, V if draft is None else draft.vocab_size), dtype=np.float32)
        if draft is None:
            p[n : n + 1] = 1
        else:
            row = draft.whole(*at)
            bad |= draft.bad_whole(row)[0]
            p[: row.shape[1]] = row[0].numpy()
        if not bad and 0 <= s < np.inf:
            q = np.pad(q, (0, len(p) - V)) if len(p) > V else q
            out[:, i] = solve(p, q, s, form)
    return out


def solve(p, q, strength, form):
    """b and c of one row pair, fp32 arrays [V] of probabilities. strength: fp32, the cap, the price or the KL divergence."""
    with np.errstate(all="ignore"):
        if form == "kl":
            return at_kl(p, q, strength)
        strength = max(strength, np.float32(1))
        if form == "cap":
            return at_cap(p, q, strength), strength
        b = at_price(p, q, strength)
        return b, b * strength


def at_cap(p, q, cap):
    rejected = sum(fixed(np.maximum(x - cap * y, np.float32(0))).sum() for x, y in _blocks(p, q))
    b = np.float32(1)
    for _ in range(STEPS):
        (p_s, q_s), _ = _sums(p, q, b)
        lower = np.float32(np.float64(p_s + rejected) / np.float64(q_s))
        if not lower < b:
            break
        b = lower
    return b


def at_price(p, q, price):
    one = np.float32(1)
    low, high, b = one / price, one, one
    for _ in range(STEPS):
        (p_s, q_s), (p_t, q_t) = _sums(p, q, b, b * price)
        up = np.float64(p_s + p_t)
        down = np.float64(q_s) + np.float64(price) * np.float64(q_t)
        newton = np.float32(up / down)
        if not abs(newton - b) > 0:  # solved; or nothing to recover and nothing rejected, NaN
            break
        if np.float64(b) * down > up:
            high = b
        else:
            low = b
        b = newton if low < newton < high else np.float32(0.5) * (low + high)
        if not low < b < high:
            break
    return b


def at_kl(p, q, kl):
    # q ln(q / p); ln 0 is taken as -104, which is far enough from the budget.
    information = np.concatenate(
        [(y * (_log(y) - _log(x)) * np.float32(NAT)).astype(np.int64) for x, y in _blocks(p, q)]
    )

    def solve(c):
        """b, how far KL(q || law) is above the budget, and its slope in c."""
        b = at_cap(p, q, c)
        q_s, q_t, between = np.int64(0), np.int64(0), np.int64(0)
        for i, (x, y) in enumerate(_blocks(p, q)):
            s, t = b * y > x, x > c * y
            q_s, q_t = q_s + fixed(y * s).sum(), q_t + fixed(y * t).sum()
            between += (information[i * BLOCK : (i + 1) * BLOCK] * ~(s | t)).sum()
        outside = np.float64(q_s) * np.float64(_log(b)) + np.float64(q_t) * np.float64(_log(c))
        excess = np.float64(between) * (1 / NAT) - outside * (1 / ONE) - np.float64(kl)
        return b, excess, np.float64(q_t) * (1 / ONE) * (1 / np.float64(b) - 1 / np.float64(c))

    low, high, c = np.float32(1), LARGEST, LARGEST
    for _ in range(STEPS):
        b, excess, slope = solve(c)
        if excess > 0:
            high = c
        elif c == LARGEST:  # every draft can be accepted
            break
        else:
            low = c
        newton = np.float32(np.float64(c) - excess / slope)
        if c == LARGEST:
            newton = np.float32(2)
        step = newton if low < newton < high else np.sqrt(low) * np.sqrt(high)
        if not low < step < high:
            break
        c = step
    return b, c


def _sums(p, q, b, c=None):
    """The sums of p and q over S, where b q > p, and over T, where p > c q (0 without a c): int64."""
    over_s, over_t = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    for x, y in _blocks(p, q):
        s = b * y > x
        over_s += fixed(x * s).sum(), fixed(y * s).sum()
        if c is not None:
            t = x > c * y
            over_t += fixed(x * t).sum(), fixed(y * t).sum()
    return over_s, over_t


def _blocks(p, q):
    return ((p[i : i + BLOCK], q[i : i + BLOCK]) for i in range(0, len(p), BLOCK))


def fixed(x):
    return (x * np.float32(ONE)).astype(np.int64)
