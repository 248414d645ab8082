"""Statistics of the target row that some rules read, for every drafted position: the torch reference.

    "entropy"            H = -sum q ln q, nats, within 2e-6 relative and V 2^-40
    "relative entropy"   H / ln V, 0 where V = 1
    "largest"            the largest probability, at most 1
    ("k-th largest", k)  the k-th largest probability, ties counted, at most 1; 0 where k > V

Each is an fp32 number, the same bits on every backend: the terms of H are fp32 by `elementary.log` and are summed as int64 in
units of 2^-40. A row with a bad entry has NaN, which makes its position bad.
"""

import math

import numpy as np
import torch

from . import numpy_language
from .rows_torch import GROUP
from .rules import bind, elementary

ONE = 2.0**40  # of a term of H: at most 1/e, so that any sum of 2^23 stays below 2^63
BLOCK = 1 << 14  # entries handled at once: few enough for the cache
_log = bind(elementary.log_of_normal, numpy_language)


def compute(names, target, request, position):
    """The statistics that a rule names: fp32 array [K, R], NaN where a row is bad.

    target: a `rows_torch.ProbRows`. request, position: int64 arrays [R], which rows.
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
        return entropy(q) * scale(q.shape[1])
    if statistic == "largest":
        return q.amax(1).clamp(max=1)
    name, k = statistic
    if name != "k-th largest":
        raise ValueError(f"unknown statistic {statistic!r}")
    return q.topk(k)[0][:, -1].clamp(0, 1) if k <= q.shape[1] else q.new_zeros(len(q))


def entropy(q):
    """fp32 [R], nats."""
    q = q.numpy()
    if q.shape[1] <= BLOCK:
        sums = _terms(q).sum(1)
    else:
        # Few are left of a row that was truncated.
        rows = (row[row > 0] if 2 * np.count_nonzero(row > 0) < len(row) else row for row in q)
        blocks = ((row[i : i + BLOCK] for i in range(0, len(row), BLOCK)) for row in rows)
        sums = np.array([sum(_terms(x).sum() for x in row) for row in blocks], dtype=np.int64)
    return torch.from_numpy(sums.astype(np.float32) * np.float32(1 / ONE))


def _terms(q):
    """Of a block of q: int64, 0 where q is 0 or denormal."""
    with np.errstate(invalid="ignore", over="ignore"):  # bad values
        return -(q * _log(q) * np.float32(ONE)).astype(np.int64)


def scale(vocab_size):
    """What makes an entropy relative."""
    return 1 / math.log(vocab_size) if vocab_size > 1 else 0.0
