"""The multipliers b <= 1 <= c of the law `clip(p, b q, c q)` for one row pair, on the host.

With S the tokens whose ratio p/q (rounded to fp32) is below b, and T those whose ratio is above c, the law sums to what p sums
to where what recovery adds is what was rejected: b sum_S q - sum_S p = sum_T p - c sum_T q.

    c given        b is the largest fp32 number up to 1 at which no more is added than was rejected
    c = price b    the same b
    kl given       KL(q || law) = kl for c, Newton's steps within a bracket, with the b of each c

Sums are int64, so they have no order, and every backend gets the same bits. The unit is 2^-52; that of q over T is 2^-52
divided by the power of two below c, since it counts c times: tokens of T have q < p / c, so that scaled they are at most 1, and
c q is as exact as p, down to q = 2^-126. Each is rounded up: what is lost in rounding is rejected, never accepted. Below 2^-126
the bodies of these rules reject.

With c given, the side with b rises with it, by more than the float64 arithmetic of a comparison loses: so it does not matter in
which order numbers are tried for b. With the price given both backends try the same numbers in the same order, since the unit of
q over T changes with b.
"""

import numpy as np

from ..definition import CLOSE, LARGEST_MULTIPLE, NAT, ONE, ONE_BITS, STEPS, TINY
from ..rules import bind, elementary
from ..rules.languages import numpy_language

LARGEST = np.float32(LARGEST_MULTIPLE)

# Bins of the ratio, by the upper half of its bits: 2^-7 wide between 2^-16 and 2^16, the first and the last hold the rest.
SHIFT, FIRST, BINS = 16, 0x377F, 0x1002
EDGES = (np.arange(FIRST, FIRST + BINS, dtype=np.int32) << SHIFT).view(np.float32)
EDGES[0] = 0
BLOCK = 1 << 15  # entries handled at once: few enough for the cache
EXACT = 2.0**53  # float64 sums of integers are exact below

_log, _without_log = (bind(f, numpy_language) for f in (elementary.log_of_number, elementary.without_log))


def compute(form, target, draft, request, position, drafted, strength):
    """b and c of row pairs: fp32 array [2, R], NaN where a row or its strength is bad.

    Args:
        form: "cap", "price" or "kl", what the strength is. strength: a number, or an fp32 array [R, 1].
        target, draft: `host.rows.ProbRows`; draft None: one-hot.
        request, position: int64 arrays [R], which rows. drafted: int64 array [R], their drafted tokens.
    """
    out = np.full((2, len(request)), np.nan, dtype=np.float32)
    strength = np.broadcast_to(np.float32(strength), (len(request), 1))[:, 0]
    for i, (s, n) in enumerate(zip(strength, drafted, strict=True)):
        at = request[i : i + 1], position[i : i + 1]
        q = target.whole(*at)
        bad = target.bad_whole(q)[0]
        q = q[0].numpy()
        if draft is None:
            p = np.zeros(len(q), dtype=np.float32)
            p[n] = 1
        else:
            p = draft.whole(*at)
            bad |= draft.bad_whole(p)[0]
            p = p[0].numpy()
        if not bad and 0 <= s < np.inf:
            V = max(len(p), len(q))
            p, q = (x if len(x) == V else np.pad(x, (0, V - len(x))) for x in (p, q))
            out[:, i] = solve(p, q, s, form)
    return out


def solve(p, q, strength, form):
    """b and c of one row pair, fp32 arrays [V] of probabilities. strength: fp32, the cap, the price or the KL divergence."""
    with np.errstate(all="ignore"):
        pair = Pair(p, q, form == "kl")
        if form == "kl":
            b, c = at_kl(pair, strength)
        elif form == "cap":
            c = max(strength, np.float32(1))
            b = at_cap(pair, c)
        else:
            b = at_price(pair, max(strength, np.float32(1)))
            c = b * max(strength, np.float32(1))
        return b if b > 0 else np.float32(1), c  # with any b, where there is nothing to recover


class Pair:
    """A row pair with its tokens in bins of their ratio p/q: sums over the tokens on one side of any number."""

    def __init__(self, p, q, informative):
        """p, q: fp32 [V]. informative: whether sums of q (p/q - 1 - ln(p/q)) are asked for."""
        self.ratio, self.of_q = p / q, q
        bins = _bins(self.ratio)
        self.bins = bins.astype(np.intp)
        self.weights = [_fixed(p), _fixed(q)]
        if informative:
            self.weights.append(_information(self.ratio, q))
        self.heads = np.zeros((len(self.weights), BINS + 1), dtype=np.int64)
        for head, w in zip(self.heads, self.weights, strict=True):
            _bin_sums(self.bins, w).cumsum(out=head[1:])
        self.p, self.q = self.heads[:2, -1].tolist()
        # What recovery adds where b is at an edge.
        self.added = EDGES * self.heads[1, :-1].astype(np.float64) - self.heads[0, :-1]
        self.looked_into, self.tails = {}, {}

    def below(self, x, side="left"):
        """The sums of the weights of tokens whose ratio is below x; with side "right", up to x: ints."""
        k = int(_bins(x))
        if x == EDGES[k] and side == "left":
            return self.heads[:, k].tolist()
        _, ratio, sums = self._look_into(k)
        return sums[:, ratio.searchsorted(x, side)].tolist()

    def above(self, c):
        """The sums of p, in units of 2^-52, and of q, of 2^-52 / `power_below(c)`, over tokens whose ratio is above c: ints."""
        k, power = int(_bins(c)), power_below(c)
        if power not in self.tails:
            tokens = np.flatnonzero(self.bins > int(_bins(power))) if power > 1 else slice(None)
            sums = _bin_sums(self.bins[tokens], _fixed_up(self.of_q[tokens], power))
            self.tails[power] = np.append(sums[::-1].cumsum()[::-1], 0)
        tokens, ratio, sums = self._look_into(k)
        place = ratio.searchsorted(c, "right")
        q = self.tails[power][k + 1] + _fixed_up(self.of_q[tokens[place:]], power).astype(np.int64).sum()
        return self.p - int(sums[0, place]), int(q)

    def _look_into(self, k):
        """The tokens of a bin by their ratio, their ratios, and the sums of the weights up to each, [W, tokens + 1]."""
        if k not in self.looked_into:
            tokens = np.flatnonzero(self.bins == k)
            tokens = tokens[self.ratio[tokens].argsort()]
            sums = np.empty((len(self.weights), len(tokens) + 1), dtype=np.int64)
            sums[:, 0] = self.heads[:, k]
            for of, w in zip(sums, self.weights, strict=True):
                of[1:] = w[tokens]
            self.looked_into[k] = tokens, self.ratio[tokens], sums.cumsum(1)
        return self.looked_into[k]


def _bins(ratio):
    bits = ratio.view(np.int32) >> SHIFT
    bits &= 0x7FFF  # 0/0 has a sign
    return np.clip(bits, FIRST, FIRST + BINS - 1).astype(np.int16) - FIRST


def power_below(c):
    """The largest power of two up to c, but at least 1: fp32."""
    return (np.maximum(c, np.float32(1)).view(np.int32) & 0x7F800000).view(np.float32)


def _fixed(x):
    """In units of 2^-52: integers, as float64."""
    x = x * np.float32(ONE)
    return np.trunc(x, out=x).astype(np.float64)


def _fixed_up(x, power):
    """In units of 2^-52 / power, and 1 more where that is not 0: integers, as float64."""
    return _fixed(x * power) + (x > 0)


def _information(ratio, q):
    """q (ratio - 1 - ln ratio) in units of 2^-44, rounded: integers, as float64."""
    out = np.empty(len(q))
    for i in range(0, len(q), BLOCK):
        x = _without_log(ratio[i : i + BLOCK])
        x *= q[i : i + BLOCK]
        x *= np.float32(NAT)
        x += np.float32(0.5)
        out[i : i + BLOCK] = np.trunc(x, out=x)
    return out


def _bin_sums(bins, weights):
    """The sum of each bin, int64. weights: integers, as float64."""
    if weights.sum() < EXACT:
        return np.bincount(bins, weights, BINS).astype(np.int64)
    high = np.floor(weights * 2.0**-26)
    low = weights - high * 2.0**26
    high, low = (np.bincount(bins, x, BINS).astype(np.int64) for x in (high, low))
    return (high << 26) + low


def at_cap(pair, cap):
    """b, 0 where nothing is rejected."""
    p_t, q_t = pair.above(cap)
    rejected = float(p_t) - float(cap) * (float(q_t) / float(power_below(cap)))
    if rejected <= 0:
        return np.float32(0)

    def sides(b):
        p_s, q_s, *_ = pair.below(b)
        return float(p_s) + rejected, float(q_s)

    return _largest(sides, pair.added.searchsorted(rejected))


def at_price(pair, price):
    def sides(b):
        c = b * price
        p_s, q_s = pair.below(b)
        p_t, q_t = pair.above(c)
        return float(p_s + p_t), float(q_s) + float(price) * (float(q_t) / float(power_below(c)))

    return _largest(sides)


def _largest(sides, k=BINS):
    """The largest fp32 number b up to 1 with b y <= x, where x, y = sides(b), by Newton's steps from edge k or from 1."""
    low, high, b = 0, ONE_BITS + 1, EDGES[k] if k < BINS and EDGES[k] < 1 else np.float32(1)
    for _ in range(STEPS):
        x, y = sides(b)
        bits, before = int(b.view(np.int32)), low
        if float(b) * y <= x:
            low = bits
        else:
            high = bits
        if high - low <= 1:
            break
        step = (low + high) // 2
        if x > 0 or y > 0:
            newton = int(np.float32(min(x / y, 1.0) if y > 0 else 1.0).view(np.int32))
            if newton == bits:
                newton += 1 if bits == low else -1
            if low < newton < high:
                step = newton
        elif bits > before + 1:  # below every ratio, but probably just below
            step = bits + 1
        b = np.int32(step).view(np.float32)
    return np.int32(low).view(np.float32)


def at_kl(pair, kl):
    def solve(c):
        """b; how far KL(q || law) is above the budget; its slope in c; the sum of q over T, 0 if all are 0."""
        b = at_cap(pair, c)
        p_s, q_s, below = pair.below(b)
        _, _, up_to = pair.below(c, "right")
        p_t, units = pair.above(c)
        b_, c_, over_b = float(b), float(c), 1 / max(float(b), TINY)
        q_t = float(units) / float(power_below(c))
        between = float(up_to - below) * (1 / NAT) + (float(pair.q - pair.p - q_s + p_s + p_t) - q_t) * (1 / ONE)
        outside = float(q_s) * float(_log(b)) + q_t * float(_log(c))
        # b is rounded: what it leaves of the difference between the two sums is taken account of.
        left = (b_ * float(q_s) + c_ * q_t - float(p_s + p_t)) * over_b if b < 1 else 0.0
        excess = between + (left - outside) * (1 / ONE) - float(kl)
        return b, excess, q_t * (1 / ONE) * (over_b - 1 / c_), units

    low, high, c = np.float32(1), LARGEST, _first(pair, kl)
    for _ in range(STEPS):
        b, excess, slope, q_t = solve(c)
        if excess <= 0 and not q_t:  # every draft that the target allows can be accepted
            return b, LARGEST
        if abs(excess) <= CLOSE * float(kl):
            break
        if excess > 0:
            high = c
        else:
            low = c
        newton = np.float32(float(c) - excess / slope) if slope else LARGEST
        step = newton if low < newton < high else np.sqrt(low) * np.sqrt(high)
        if (newton == c and b > 0) or not low < step < high:
            break
        c = step
    return b, c


def _first(pair, kl):
    """c to begin with, near where KL(q || law) = kl if that is small: 1 + x + x^2 / 2, x^2 q(T) (q(S) + q(T)) = 2 kl q(S)."""
    _, q_s, _ = pair.below(np.float32(1))
    q_t = pair.q - q_s
    if not q_t:
        return LARGEST
    half = np.float32(float(kl) * float(q_s) * ONE / (float(q_t) * float(pair.q)))
    return np.minimum(np.float32(1) + np.sqrt(2 * half) + half, LARGEST)
