"""Rows of logits on the host as rows of probabilities, made when they are asked for: verification may need few of them."""

import numpy as np

from ..sampling import COLUMNS
from .rows import GROUP, LogitRows, ProbRows, RowsOfLogits, divisor, normalised, reduced, row_sums, softmax

MOST_MADE = 1 << 20  # row elements kept for a second use


class ReducedRows(LogitRows):
    """Rows of logits with truncation or greed, whose statistics are made when they are first asked for."""

    def __init__(self, rows, index, counts, settings):
        """counts: bool array [B, m + 1], the rows there are; the others have NaN. settings: a `Settings` [B]."""
        stats = np.full((*counts.shape, COLUMNS), np.nan, dtype=np.float32)
        super().__init__(rows, index, stats, lambda request, position: (request, position))
        self.missing, self.settings = counts.copy(), settings

    def stats_of(self, request, position):
        missing = self.missing[request, position]
        if missing.any():
            request_, position_ = (x[missing] for x in np.broadcast_arrays(request, position))
            logits = ProbRows(self.rows, self.index)
            self.stats[request_, position_] = reduced(logits, request_, position_, self.settings)
            self.missing[request_, position_] = False
        return super().stats_of(request, position)


class SoftmaxRows(RowsOfLogits):
    """Rows of logits without truncation or greed, as the probabilities that torch's softmax makes of them when asked.

    An entry has the same bits whether it is asked for by itself or with its row, and whatever rows are asked for beside it:
    rules compare one with the other.
    """

    def __init__(self, rows, index, counts, settings):
        """counts: bool array [B, m + 1], the rows there are; the others have NaN. settings: a `Settings` [B]."""
        super().__init__(rows, index)
        self.counts, self.settings = counts, settings
        # Whole rows and their sums by request and position, of the last look at a request: one of them is drawn from.
        self.made = {}

    def whole(self, request, position):
        if len(request) == 1 and (request[0], position[0]) in self.made:
            return normalised(*self.made.pop((request[0], position[0])))
        probs = self._softmax(request, position)
        return normalised(probs, row_sums(probs))

    def _softmax(self, request, position):
        return softmax(super().whole(request, position), self.settings, request)

    def at(self, request, position, token):
        request, position, token = np.broadcast_arrays(request, position, token)
        values = np.full(token.shape, np.nan, dtype=np.float32)
        there = np.nonzero(self.counts[request, position])
        request, position, token = request[there], position[there], token[there]
        self.made = {at: row for at, row in self.made.items() if at[0] not in request}
        found = np.empty(len(token), dtype=np.float32)
        size = max(1, GROUP // self.vocab_size)
        for start in range(0, len(token), size):
            r = slice(start, start + size)
            probs = self._softmax(request[r], position[r])
            total = row_sums(probs)
            if len(probs) == 1 and (len(self.made) + 1) * self.vocab_size <= MOST_MADE:
                self.made[request[start], position[start]] = probs, total
            found[r] = probs.numpy()[np.arange(len(probs)), token[r].clip(0, self.vocab_size - 1)] / divisor(total)
        outside = (token < 0) | (token >= self.vocab_size)
        found[outside] *= 0  # NaN in bad rows
        found[self.settings.is_bad[request]] = np.nan
        values[there] = found
        return values


def rows_of_logits(rows, index, counts, settings):
    """Rows of logits as rows of probabilities; arguments as of `SoftmaxRows`."""
    return (ReducedRows if settings.some_truncate else SoftmaxRows)(rows, index, counts, settings)
