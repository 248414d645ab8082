"""Rows of probabilities or logits in torch: statistics, truncation, drawing. The reference for `rows_triton`, fast on a CPU.

What has V entries is torch on the rows' device, a few rows at a time; what has one entry a row is numpy on the host.
"""

import numpy as np
import torch

from . import philox, race_torch
from .sampling import ARGMAX, COLUMNS, CUTOFF, ENTROPY, INVERSE_TEMPERATURE, KEPT, MAX, NORM, SETTINGS

MAX_PROB = 1.01  # probabilities above this are bad input; between 1 and this they are rounding
GROUP = 1 << 17  # row elements handled at once: enough to amortise an operation, few enough for the cache

LARGEST = float(np.finfo(np.float32).max)


class ProbRows:
    """Rows of probabilities [..., V], addressed by leading indices: tuples of int64 arrays [R], or broadcast ones."""

    def __init__(self, rows, index):
        """rows: [B, m, V] or flat [N, V]. index: function of (request, position) that gives the leading indices."""
        self.rows, self.index, self.vocab_size = rows, index, rows.shape[-1]

    def whole(self, request, position):
        """fp32 [R, V], not to be written to; request and position int64 [R]."""
        index = self.index(request, position)
        if len(request) == 1:  # a view
            return self.rows[tuple(int(i[0]) for i in index)][None].float()
        return self.rows[self._tensors(index)].float()

    def at(self, request, position, token):
        """fp32 array, 0 where the token is not in this vocabulary; int64 arguments that broadcast."""
        index = np.broadcast_arrays(*self.index(request, position), token.clip(0, self.vocab_size - 1))
        values = self.rows[self._tensors(index)].float().cpu().numpy()
        return np.where((token >= 0) & (token < self.vocab_size), values, np.float32(0))

    def bad_at(self, request, position, probs):
        """Where gathered entries are bad: bool, of the shape of `probs`."""
        return bad_prob(probs)

    def bad_whole(self, probs):
        """Which whole rows are bad: bool array [R]."""
        return ~((probs.amin(1) >= 0) & (probs.amax(1) <= MAX_PROB)).cpu().numpy()

    def _tensors(self, index):
        return tuple(torch.from_numpy(np.ascontiguousarray(i)).to(self.rows.device) for i in index)


class LogitRows(ProbRows):
    """Rows of logits with statistics, which makes them rows of probabilities."""

    def __init__(self, rows, index, stats, stats_index):
        """stats: fp32 array [..., 8]. stats_index: as `index`, for them."""
        super().__init__(rows, index)
        self.stats, self.stats_index = stats, stats_index

    def whole(self, request, position):
        stats = self.stats[self.stats_index(request, position)]
        logits = super().whole(request, position)
        weights = exp_weights(logits, stats[:, MAX], stats[:, INVERSE_TEMPERATURE])
        keep(weights, logits, stats)
        return weights.mul_(_column(stats[:, NORM], weights))

    def at(self, request, position, token):
        stats = self.stats[self.stats_index(request, position)]
        inside = (token >= 0) & (token < self.vocab_size)
        logits = np.where(inside, super().at(request, position, token), np.float32(-np.inf))
        with np.errstate(invalid="ignore", over="ignore"):
            weights = np.exp((logits - stats[..., MAX]) * stats[..., INVERSE_TEMPERATURE])
            weights = np.where(logits >= stats[..., CUTOFF], weights, np.float32(0))
        greedy = stats[..., INVERSE_TEMPERATURE] == 0
        weights = np.where(greedy, token == stats.view(np.int32)[..., ARGMAX], weights).astype(np.float32)
        return weights * stats[..., NORM]

    def bad_at(self, request, position, probs):
        return np.broadcast_to(np.isnan(self.stats[self.stats_index(request, position)][..., NORM]), probs.shape)

    def bad_whole(self, probs):
        return np.zeros(len(probs), dtype=bool)  # seen at the gathered entries, which are those of the same row


def bad_prob(x):
    """True where a probability is NaN, infinite, negative or above 1.01."""
    return ~((x >= 0) & (x <= MAX_PROB))


def exp_weights(logits, largest, inverse_temperature):
    """exp((logits - largest) / T), a new fp32 tensor [R, V]; largest and inverse_temperature fp32 arrays [R]."""
    weights = logits - _column(largest, logits)
    if (inverse_temperature != 1).any():
        weights *= _column(inverse_temperature, logits)
    if weights.device.type == "cpu":  # twice as fast as torch's
        np.exp(weights.numpy(), out=weights.numpy())
        return weights
    return weights.exp_()


def keep(weights, logits, stats):
    """Set to 0, in place, the weights of what truncation drops; all but the arg max of greedy rows."""
    if (stats[:, CUTOFF] > -np.inf).any():
        kept = logits >= _column(stats[:, CUTOFF], logits)
        if weights.device.type == "cpu":  # a quarter of torch's time
            np.multiply(weights.numpy(), kept.numpy(), out=weights.numpy())
        else:
            weights *= kept
    for r in np.flatnonzero(stats[:, INVERSE_TEMPERATURE] == 0):
        weights[r] = 0
        weights[r, int(stats.view(np.int32)[r, ARGMAX])] = 1


def reduced(rows, request, position, settings, entropy=False):
    """The statistics of rows of logits, a few rows at a time: yields (slice of them, stats, weights, chunk sums).

    Args:
        rows: a `ProbRows` over logits. request, position: int64 arrays [R], which rows.
        settings: temperature, top_k, top_p, min_p of every request: fp32 (top_k int64) arrays [B].
        entropy: whether the column ENTROPY is asked for; else it is NaN.

    Yields:
        stats fp32 array [R', 8]; weights fp32 tensor [R', V], prob / NORM; chunk sums fp32 array [R', C].
    """
    size = max(1, GROUP // rows.vocab_size)
    for start in range(0, len(request), size):
        r = slice(start, start + size)
        x = rows.whole(request[r], position[r])
        temperature, top_k, top_p, min_p = (s[request[r]] for s in settings)
        stats = np.full((len(x), COLUMNS), np.nan, dtype=np.float32)
        bad = ~((temperature >= 0) & (temperature < np.inf) & (top_k >= 0))
        bad |= ~((top_p >= 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1))
        largest = x.amax(1).cpu().numpy()
        bad |= ~(np.abs(largest) < np.inf)  # NaN comes through the maximum
        stats[:, MAX] = np.where(bad, np.float32(0), largest)
        inverse = inverse_temperature(np.where(bad, np.float32(1), temperature))
        stats[:, INVERSE_TEMPERATURE] = inverse
        stats.view(np.int32)[:, ARGMAX] = _first_largest(x)
        stats[:, CUTOFF] = -np.inf

        weights = exp_weights(x, stats[:, MAX], inverse)
        sums = race_torch.float_chunk_sums(weights)
        total = sums.sum(1, dtype=np.float64)
        truncated = (top_k > 0) | (top_p < 1) | (min_p > 0) | (inverse == 0)
        if truncated.any():
            with np.errstate(divide="ignore"):
                lowest = stats[:, MAX] + temperature * np.log(min_p)
            for i in np.flatnonzero(truncated & ~bad):
                cutoff = lowest[i]
                if inverse[i] == 0:
                    cutoff = stats[i, MAX]
                elif top_k[i] > 0 or top_p[i] < 1:
                    cutoff = max(cutoff, _cutoff(x[i], weights[i], total[i], int(top_k[i]), top_p[i]))
                stats[i, CUTOFF] = cutoff
            keep(weights, x, stats)
            sums = race_torch.float_chunk_sums(weights)
        kept = sums.sum(1, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            stats[:, NORM] = np.where(bad, np.float32(np.nan), np.float32(1) / kept.astype(np.float32))
            stats[:, KEPT] = np.where(inverse == 0, np.float32(1), (kept / total).astype(np.float32))
            if entropy:
                mean = torch.special.xlogy(weights, weights).sum(1, dtype=torch.float64).cpu().numpy() / kept
                stats[:, ENTROPY] = np.log(kept) - mean
        yield r, stats, weights, sums


def settings_of(sampling, batch_size):
    """temperature, top_k, top_p, min_p of every request: fp32 (top_k int64) arrays [B]."""
    found = []
    for name, value in zip(SETTINGS, sampling.settings(), strict=True):
        dtype = np.int64 if name == "top_k" else np.float32
        is_tensor = isinstance(value, torch.Tensor)
        found.append(value.cpu().numpy().astype(dtype) if is_tensor else np.full(batch_size, value, dtype=dtype))
    return found


def inverse_temperature(temperature):
    """1 / T in fp32, at most the largest number; 0 for a temperature of 0, which is greedy. fp32 array -> fp32 array."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(temperature == 0, np.float32(0), np.minimum(np.float32(1) / temperature, np.float32(LARGEST)))


def _cutoff(x, weights, total, top_k, top_p):
    """The lowest logit that top-k, then top-p keep. x, weights: fp32 [V]; total: the sum of the weights."""
    x, weights = x.cpu().numpy(), weights.cpu().numpy()
    values = x
    lowest = -np.inf
    if 0 < top_k < len(x):
        maxima = x[: len(x) // race_torch.CHUNK * race_torch.CHUNK].reshape(-1, race_torch.CHUNK).max(1)
        if len(maxima) >= top_k:  # the k-th largest of the chunks' maxima is at most the k-th largest of all
            values = x[x >= np.partition(maxima, -top_k)[-top_k]]
        lowest = np.partition(values, -top_k)[-top_k]
        if top_p == 1:
            return lowest
        kept = x >= lowest
        values, weights = x[kept], weights[kept]
        total = weights.sum(dtype=np.float64)
    mass = float(top_p) * total
    # Few tokens hold most of the mass: only they get sorted.
    for bound in (2**-6, 2**-12, 2**-20):
        some = weights >= bound
        if weights[some].sum(dtype=np.float64) >= mass:
            values, weights = values[some], weights[some]
            break
    order = np.argsort(values)[::-1]
    above = weights[order].cumsum(dtype=np.float64) - weights[order]
    last = max(int(np.searchsorted(above, mass)) - 1, 0)
    return values[order[last]]


def _first_largest(x):
    """The lowest id of the largest of each row: int array [R]."""
    return (
        x.numpy().argmax(1) if x.device.type == "cpu" else (x == x.amax(1, keepdim=True)).int().argmax(1).cpu().numpy()
    )


def _column(values, like):
    """A number a row as a tensor [R, 1] beside rows; a plain number where there is one row, which costs less."""
    if len(values) == 1:
        return float(values[0])
    return torch.from_numpy(np.ascontiguousarray(values))[:, None].to(like.device)


def row_stats(inputs, out, scratch=None):
    """Write the statistics of `inputs` (a checked `rows.RowInputs`) to `out.stats`; draw from the rows if it has a seed."""
    B, vocab_size = inputs.logits.shape
    rows, every = ProbRows(inputs.logits, lambda request, position: (request,)), np.arange(B)
    noise = inputs.noise
    if noise is None and inputs.seed is not None:
        noise = draft_noise(inputs.seed, inputs.offset, B, vocab_size, 1)[0]
    for r, stats, weights, sums in reduced(rows, every, every, settings_of(inputs.sampling, B), inputs.entropy):
        out.stats.packed[r] = torch.from_numpy(stats)
        if noise is None:
            continue
        token = race_torch.race(sums, weights, [x[r] for x in noise])
        probs = weights[np.arange(len(token)), token].cpu().numpy() * stats[:, NORM]
        out.token_ids[r] = torch.from_numpy(np.where(np.isnan(probs), -1, token))
        out.probs[r] = torch.from_numpy(probs)


def draft_noise(seed, offset, batch_size, vocab_size, count):
    """The exponentials of draws at offset, offset + 1, … of each request: a list of `count` that `race_torch.noise` gives."""
    seed, offset = philox.streams(seed, offset, batch_size)
    position = (offset + np.arange(count)[:, None]).reshape(-1)
    words = philox.counter_row(position, 0)
    noise = race_torch.noise(np.tile(seed, count), words, (philox.DRAFT_CHUNK, philox.DRAFT_TOKEN), vocab_size)
    return list(zip(*(np.split(x, count) for x in noise), strict=True))
