"""Rows of probabilities or logits on the host, as rows of probabilities: verification asks for few of them."""

from dataclasses import dataclass

import numpy as np
import torch

from ..contract import Logits
from ..definition import MAX_PROB
from ..sampling import ARGMAX, COLUMNS, CUTOFF, INVERSE_TEMPERATURE, MAX, NORM
from .reduce import GROUP, Settings, column, divisor, exp_weights, keep, normalised, reduced, row_sums, softmax

MOST_MADE = 1 << 20  # row elements kept for a second use


@dataclass(frozen=True)
class Place:
    """Where the rows of requests lie: [B, m, V] by themselves.

    first: int64 array [B], the first row of each request where rows are flat, [N, V].
    has_bonus: flat rows are one further for each request before.
    slots: int64 array [B], where the rows of a request lie in [slots, K, V].
    """

    first: np.ndarray | None = None
    has_bonus: bool = False
    slots: np.ndarray | None = None

    def index(self, shape, request, position):
        """The leading indices of rows, of the shape given, inside it; request, position: int64 arrays that broadcast."""
        if self.first is not None:
            return ((self.first[request] + request * self.has_bonus + position).clip(max=shape[0] - 1),)
        return request if self.slots is None else self.slots[request], position.clip(max=shape[1] - 1)


class ProbRows:
    """Rows of probabilities, addressed by request and position."""

    bad_is_seen_at_entries = False  # of a bad row every entry is bad: rows are asked for where one was looked at

    def __init__(self, values, place):
        """values: [..., V], as `place` says."""
        self.values, self.place, self.vocab_size = values, place, values.shape[-1]

    def whole(self, request, position):
        """fp32 [R, V] on the host, not to be written to; request and position int64 [R]."""
        index = self.place.index(self.values.shape, request, position)
        if len(request) == 1:  # a view
            return self.values[tuple(int(i[0]) for i in index)][None].float().cpu()
        return self.values[self._tensors(index)].float().cpu()

    def at(self, request, position, token):
        """fp32 array, 0 where the token is not in this vocabulary; int64 arguments that broadcast."""
        values = self.values
        if 0 in values.shape:  # nothing to read, not even where it would be masked
            return np.zeros(np.broadcast_shapes(request.shape, position.shape, token.shape), dtype=np.float32)
        index = (*self.place.index(values.shape, request, position), np.clip(token, 0, self.vocab_size - 1))
        if values.device.type == "cpu" and values.dtype == torch.float32:
            found = values.numpy()[index]
        else:
            found = values[self._tensors(np.broadcast_arrays(*index))].float().cpu().numpy()
        return np.where((token >= 0) & (token < self.vocab_size), found, np.float32(0))

    def bad_whole(self, probs):
        """Which whole rows are bad: bool array [R]."""
        if self.bad_is_seen_at_entries:
            return np.zeros(len(probs), dtype=bool)
        return ~((probs.amin(1) >= 0) & (probs.amax(1) <= MAX_PROB)).numpy()

    def _tensors(self, index):
        return tuple(torch.from_numpy(np.ascontiguousarray(i)).to(self.values.device) for i in index)


def bad_prob(x):
    """True where a probability is NaN, infinite, negative or above 1.01."""
    return ~((x >= 0) & (x <= MAX_PROB))


class LogitRows(ProbRows):
    """Rows of logits with statistics, which makes them rows of probabilities; of a bad row all are NaN."""

    bad_is_seen_at_entries = True

    def __init__(self, values, place, stats=None, counts=None, settings=None):
        """stats: fp32 array [..., 8], as the rows lie; None: they are made when they are first asked for, by `Settings` [B], for
        the rows where `counts`, bool array [B, m + 1], is True.
        """
        super().__init__(values, place)
        self.stats, self.stats_place, self.missing, self.settings = stats, place, None, settings
        if stats is None:
            self.stats, self.stats_place = np.full((*counts.shape, COLUMNS), np.nan, dtype=np.float32), Place()
            self.missing = counts.copy()

    def stats_of(self, request, position):
        """The statistics of rows: fp32 array [..., 8]."""
        if self.missing is not None and (missing := self.missing[request, position]).any():
            request_, position_ = (x[missing] for x in np.broadcast_arrays(request, position))
            logits = ProbRows(self.values, self.place)
            self.stats[request_, position_] = reduced(logits, request_, position_, self.settings)
            self.missing[request_, position_] = False
        return self.stats[self.stats_place.index(self.stats.shape, request, position)]

    def whole(self, request, position):
        stats = self.stats_of(request, position)
        logits = super().whole(request, position)
        weights = exp_weights(logits, stats[:, MAX], stats[:, INVERSE_TEMPERATURE])
        keep(weights, logits, stats)
        return weights.mul_(column(stats[:, NORM]))

    def at(self, request, position, token):
        stats = self.stats_of(request, position)
        inside = (token >= 0) & (token < self.vocab_size)
        logits = np.where(inside, super().at(request, position, token), np.float32(-np.inf))
        with np.errstate(invalid="ignore", over="ignore"):
            weights = np.exp((logits - stats[..., MAX]) * stats[..., INVERSE_TEMPERATURE])
            weights = np.where(logits >= stats[..., CUTOFF], weights, np.float32(0))
        greedy = stats[..., INVERSE_TEMPERATURE] == 0
        weights = np.where(greedy, token == stats.view(np.int32)[..., ARGMAX], weights).astype(np.float32)
        return weights * stats[..., NORM]


class SoftmaxRows(ProbRows):
    """Rows of logits without truncation or greed, as the probabilities that torch's softmax makes of them when asked.

    An entry has the same bits whether it is asked for by itself or with its row, and whatever rows are asked for beside it:
    rules compare one with the other.
    """

    bad_is_seen_at_entries = True

    def __init__(self, values, place, counts, settings):
        """counts: bool array [B, m + 1], the rows there are; the others have NaN. settings: a `Settings` [B]."""
        super().__init__(values, place)
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


def rows_of(rows, place, counts):
    """`contract.Probs` or `contract.Logits` as rows of probabilities. counts: bool array [B, m + 1], the rows there are."""
    if not isinstance(rows, Logits):
        return ProbRows(rows.values, place)
    if rows.stats is not None:
        return LogitRows(rows.values, place, rows.stats.cpu().numpy())
    settings = Settings.of(rows.sampling, len(counts))
    if settings.some_truncate:
        return LogitRows(rows.values, place, counts=counts, settings=settings)
    return SoftmaxRows(rows.values, place, counts, settings)
