"""Rows of probabilities that are exact by construction: the same bits on every machine.

They are made of Philox words by single additions, multiplications and divisions in fp32, each rounded as IEEE 754 says, and of
sums of integers, which have no order. `torch.rand`, `exp`, `pow` and floating-point sums are not of that kind.
"""

from functools import cache
from itertools import accumulate

import numpy as np

from cactus_kernels.philox import philox


def words(label: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Two words of Philox for each entry of a table: int64 [count, size] in [0, 2^32)."""
    return philox(np.int64(label), np.arange(size), np.arange(count)[:, None], 1, 2)


def normalised(weights: np.ndarray) -> np.ndarray:
    """fp32 [R, V] below 2^20, divided by their sum, which is one of integers: it has no order."""
    total = (weights * np.float32(2**30)).astype(np.int64).sum(1, keepdims=True).astype(np.float32) * np.float32(2**-30)
    return weights / total


def rows(label: int, count: int, V: int) -> np.ndarray:
    """Probabilities fp32 [count, V], a quarter of them 0; every second row has one token about as likely as all others."""
    first, second = words(label, count, V)
    u = (first >> 8).astype(np.float32) * np.float32(2**-24)
    square = u * u
    weights = square * square
    weights[second % 4 == 0] = 0
    peak = words(label + 1, count, 1)[0][:, 0] % V
    weights[np.arange(0, count, 2), peak[::2]] = max(1, V // 8)
    return normalised(weights)


def drawn(label: int, probs: np.ndarray) -> np.ndarray:
    """A token of each row: int64 [count]."""
    sums = (probs * np.float32(2**40)).astype(np.int64).cumsum(1)
    high, low = (word[:, 0] for word in words(label, len(probs), 1))
    at = ((high << 20) + low) % sums[:, -1]
    return (sums <= at[:, None]).sum(1)


def widened(probs: np.ndarray, V: int) -> np.ndarray:
    """The first V columns, or zeros behind them."""
    return np.pad(probs, ((0, 0), (0, max(0, V - probs.shape[1]))))[:, :V]


def beside(lengths: tuple[int, ...]) -> list[int]:
    """The row of the target beside each row of the draft: every request has one more of the target."""
    return [row for row in range(sum(lengths) + len(lengths)) if row + 1 not in accumulate(n + 1 for n in lengths)]


@cache
def tables(lengths: tuple[int, ...], V: int, V_draft: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Target [N + B, V] and draft [N, V_draft], fp32, and drafted tokens [N]. Not to be written to."""
    label = 1000 * V + 10 * V_draft
    target = rows(label, sum(lengths) + len(lengths), V)
    alike, other = widened(target[beside(lengths)], V_draft), rows(label + 3, sum(lengths), V_draft)
    share = np.float32(0.75) * (np.arange(len(alike)) % 3 != 2).astype(np.float32)[:, None]
    draft = alike * share + other * (np.float32(1) - share)
    return target, draft, drawn(label + 5, draft)
