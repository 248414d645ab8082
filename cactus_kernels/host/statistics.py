"""Statistics of the target row that some rules read, for every drafted position, on the host.

    "entropy"            H = -sum q ln q, nats, within 2e-6 relative and V 2^-40
    "relative entropy"   H / ln V, 0 where V = 1
    "certainty"          1 - H / ln V, as the sum of (t ln t - t + 1) / (V ln V) over t = q V, which loses nothing near a uniform
                         row: within 1e-6 relative and 2^-52 / ln V a token; 0 where V = 1
    "largest"            the largest probability, at most 1
    ("k-th largest", k)  the k-th largest probability, ties counted, at most 1; 0 where k > V

Each is an fp32 number, the same bits on every backend: terms are fp32 by the functions of `elementary` and are summed as int64,
those of H in units of 2^-40, those of the certainty in units of 2^-52. A row with a bad entry has NaN, which makes its position
bad.
"""

import numpy as np
import torch

from ..definition import CERTAINTY_UNIT, ENTROPY_UNIT, NEGLIGIBLE, entropy_scale
from ..rules import bind, elementary
from ..rules.languages import numpy_language
from .rows import GROUP

BLOCK = 1 << 14  # entries handled at once: few enough for the cache
_log, _without_log = (bind(f, numpy_language) for f in (elementary.log_of_normal, elementary.without_log))


def compute(names, target, request, position):
    """The statistics that a rule names: fp32 array [K, R], NaN where a row is bad.

    target: a `host.rows.ProbRows`. request, position: int64 arrays [R], which rows.
    """
    out = np.empty((len(names), len(request)), dtype=np.float32)
    size = max(1, GROUP // target.vocab_size)
    for start in range(0, len(request), size):
        r = slice(start, start + size)
        q = target.whole(request[r], position[r])
        bad = target.bad_whole(q)
        for values, name in zip(out, names, strict=True):
            values[r] = np.where(bad, np.float32(np.nan), of_rows(name, q).numpy())
    return out


def of_rows(statistic, q):
    """One statistic of rows q, fp32 [R, V]: fp32 [R]."""
    if statistic == "entropy":
        return entropy(q)
    if statistic == "relative entropy":
        return entropy(q) * entropy_scale(q.shape[1])
    if statistic == "certainty":
        return certainty(q)
    if statistic == "largest":
        return q.amax(1).clamp(max=1)
    name, k = statistic
    if name != "k-th largest":
        raise ValueError(f"unknown statistic {statistic!r}")
    return q.topk(k)[0][:, -1].clamp(0, 1) if k <= q.shape[1] else q.new_zeros(len(q))


def entropy(q):
    """fp32 [R], nats."""
    sums = _sums(q.numpy(), _terms, 0)
    return torch.from_numpy(sums.astype(np.float32) * np.float32(1 / ENTROPY_UNIT))


def certainty(q):
    """fp32 [R], in [0, 1] up to rounding."""
    V = np.float32(q.shape[1])
    one_token = np.float32(1) / V

    def terms(x):
        with np.errstate(all="ignore"):  # bad values
            t = x * V
            term = np.where(t > np.float32(NEGLIGIBLE), x * _without_log(np.float32(1) / t), one_token)
            return (term * np.float32(CERTAINTY_UNIT)).astype(np.int64)

    sums = _sums(q.numpy(), terms, int(one_token * np.float32(CERTAINTY_UNIT)))
    return torch.from_numpy(
        sums.astype(np.float32) * np.float32(1 / CERTAINTY_UNIT) * np.float32(entropy_scale(q.shape[1]))
    )


def _sums(q, terms, of_zero):
    """The sums over rows q, fp32 [R, V], of int64 terms; of_zero: what a probability of 0 adds. int64 [R]."""
    if q.shape[1] <= BLOCK:
        return terms(q).sum(1)
    sums = np.empty(len(q), dtype=np.int64)
    for r, row in enumerate(q):
        some, zeros = row > 0, 0
        if 2 * int(np.count_nonzero(some)) < len(row):  # few are left of a row that was truncated
            row, zeros = row[some], len(row) - int(np.count_nonzero(some))
        sums[r] = sum(terms(row[i : i + BLOCK]).sum() for i in range(0, len(row), BLOCK)) + zeros * of_zero
    return sums


def _terms(q):
    """Of the entropy of a block of q: int64, 0 where q is 0 or denormal."""
    with np.errstate(invalid="ignore", over="ignore"):  # bad values
        return -(q * _log(q) * np.float32(ENTROPY_UNIT)).astype(np.int64)
