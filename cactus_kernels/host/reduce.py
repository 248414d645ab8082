"""Rows of logits on the host, reduced to what makes them probabilities: weights, sums, truncation.

A few rows at a time come to the host, as fp32 tensors; torch and numpy share their memory, and each does what it does faster.
"""

import functools

import numpy as np
import torch

from ..definition import CHUNK, LARGEST
from ..sampling import ARGMAX, COLUMNS, CUTOFF, ENTROPY, INVERSE_TEMPERATURE, KEPT, MAX, NORM, SETTINGS
from . import race

GROUP = 1 << 17  # row elements handled at once: enough to amortise an operation, few enough for the cache
ROUNDING = 1e-6  # of a sum of probabilities


def exp_weights(logits, largest, inverse_temperature):
    """exp((logits - largest) / T), a new fp32 tensor [R, V]; largest and inverse_temperature fp32 arrays [R]."""
    weights = logits - column(largest)
    if (inverse_temperature != 1).any():
        weights *= column(inverse_temperature)
    np.exp(weights.numpy(), out=weights.numpy())  # twice as fast as torch's
    return weights


def softmax(logits, settings, request=slice(None), out=None):
    """The softmax of (logits - the largest) / T, fp32 [R, V]: torch's own, which is faster than its steps.

    On a CPU it adds up a row in few places, where small terms are lost beside a large one: what comes out may sum to 1 within
    3e-4 alone. Then `normalised`, or division by a sum, which loses none.

    settings: `Settings`. request: int64 array [R], whose rows they are. out: where to write, of any stride; None: a new tensor.
    """
    if settings.some_scale:
        logits = (logits - logits.amax(1, keepdim=True)).mul_(column(settings.inverse[request]))
    return torch.softmax(logits, -1, out=out)


def row_sums(probs):
    """The sums of rows fp32 [R, V]: fp32 array [R]. numpy's, since torch's depend on what other rows there are."""
    return probs.numpy().sum(1)


def divisor(total):
    """What rows of such sums are divided by: the sums where they are not 1 within rounding, else 1. Arrays [R]."""
    return np.where(np.abs(total - 1) > ROUNDING, total, 1).astype(np.float32)


def normalised(probs, total):
    """Rows divided by the `divisor` of their sums, in place. probs: fp32 [R, V]. total: array [R]."""
    by = divisor(total)
    if (by != 1).any():
        np.divide(probs.numpy(), by[:, None], out=probs.numpy())
    return probs


def keep(weights, logits, stats):
    """Set to 0, in place, the weights of what truncation drops; all but the arg max of greedy rows."""
    if (stats[:, CUTOFF] > -np.inf).any():
        kept = logits.numpy() >= stats[:, CUTOFF, None]
        np.multiply(weights.numpy(), kept, out=weights.numpy())  # a quarter of torch's time
    for r in np.flatnonzero(stats[:, INVERSE_TEMPERATURE] == 0):
        weights[r] = 0
        weights[r, int(stats.view(np.int32)[r, ARGMAX])] = 1


class Settings:
    """A `Sampling` on the host, for every request: arrays [B], and what follows from them."""

    @classmethod
    def of(cls, sampling, batch_size):
        """The same each time for a sampling of numbers: they are not to be written to."""
        if sampling.varies:
            return cls(sampling, batch_size)
        return _settings_of_numbers(sampling, batch_size)

    def __init__(self, sampling, batch_size):
        values = []
        for name, value in zip(SETTINGS, sampling.settings(), strict=True):
            dtype = np.int64 if name == "top_k" else np.float32
            is_tensor = isinstance(value, torch.Tensor)
            values.append(value.cpu().numpy().astype(dtype) if is_tensor else np.full(batch_size, value, dtype=dtype))
        self.temperature, self.top_k, self.top_p, self.min_p = values
        self.is_bad = ~((self.temperature >= 0) & (self.temperature < np.inf) & (self.top_k >= 0))
        for share in (self.top_p, self.min_p):
            self.is_bad |= ~((share >= 0) & (share <= 1))
        self.inverse = inverse_temperature(np.where(self.is_bad, np.float32(1), self.temperature))
        self.truncates = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0) | (self.inverse == 0)
        self.some_truncate, self.some_scale = bool(self.truncates.any()), bool((self.inverse != 1).any())
        with np.errstate(divide="ignore", invalid="ignore"):
            self.log_min_p = np.log(self.min_p)


@functools.lru_cache(maxsize=64)
def _settings_of_numbers(sampling, batch_size):
    return Settings(sampling, batch_size)


def reduced(rows, request, position, settings, entropy=False, visit=None):
    """The statistics of rows of logits: fp32 array [R, 8].

    Args:
        rows: a `host.rows.ProbRows` over logits. request, position: int64 arrays [R], which rows.
        settings: `Settings`. entropy: whether the column ENTROPY is asked for; else it is NaN.
        visit: called for a few rows at a time, with their slice, what their probabilities are in proportion to, fp32 [R', V],
            and the chunk sums of it, fp32 array [R', C].
    """
    stats = np.zeros((len(request), COLUMNS), dtype=np.float32)
    stats[:, CUTOFF], stats[:, KEPT], stats[:, ENTROPY] = -np.inf, 1, np.nan
    argmax = stats.view(np.int32)[:, ARGMAX]
    inverse = stats[:, INVERSE_TEMPERATURE] = settings.inverse[request]
    kept, mean_log = np.empty(len(request)), np.empty(len(request) * entropy)
    truncates = settings.truncates[request] if settings.some_truncate else ()
    plain = not (settings.some_truncate or entropy)
    size = max(1, GROUP // rows.vocab_size)
    for start in range(0, len(request), size):
        r = slice(start, start + size)
        x = rows.whole(request[r], position[r])
        largest, argmax[r] = _first_largest(x)
        stats[r, MAX] = largest
        if plain:
            weights = softmax(x, settings, request[r])
            sums = race.float_chunk_sums(weights) if visit else weights.sum(1, keepdim=True).numpy()
            kept[r] = sums.sum(1) / weights.numpy()[np.arange(len(x)), argmax[r]]
            if visit:
                visit(r, weights, sums)
            continue
        weights = exp_weights(x, largest, inverse[r])
        sums = race.float_chunk_sums(weights)
        kept[r] = sums.sum(1)
        if any(truncates[r]):
            total = kept[r].copy()
            for i in np.flatnonzero(truncates[r]):
                stats[start + i, CUTOFF] = _cutoff(x[i], weights[i], total[i], settings, request[start + i])
            keep(weights, x, stats[r])
            sums = race.float_chunk_sums(weights)
            kept[r] = sums.sum(1)
            with np.errstate(divide="ignore", invalid="ignore"):  # bad rows
                stats[r, KEPT] = np.where(inverse[r] == 0, 1, kept[r] / total)
        if entropy:
            mean_log[r] = torch.special.xlogy(weights, weights).sum(1, dtype=torch.float64).numpy()
        if visit:
            visit(r, weights, sums)
    bad = settings.is_bad[request] | ~(np.abs(stats[:, MAX]) < np.inf)  # NaN comes through the maximum
    if bad.any():
        kept[bad] = np.nan
    stats[:, NORM] = 1 / kept
    if entropy:
        stats[:, ENTROPY] = np.log(kept) - mean_log / kept
    return stats


def inverse_temperature(temperature):
    """1 / T in fp32, at most the largest number; 0 for a temperature of 0, which is greedy. fp32 array -> fp32 array."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(temperature == 0, np.float32(0), np.minimum(np.float32(1) / temperature, np.float32(LARGEST)))


def _cutoff(x, weights, total, settings, request):
    """The lowest logit that a request keeps of a row. x, weights: fp32 [V]; total: the sum of the weights."""
    x, weights = x.numpy(), weights.numpy()
    largest = x.max()
    if settings.inverse[request] == 0 or settings.is_bad[request] or not abs(largest) < np.inf:
        return largest
    top_k, top_p = int(settings.top_k[request]), settings.top_p[request]
    lowest = largest + settings.temperature[request] * settings.log_min_p[request]
    values = x
    if 0 < top_k < len(x):
        maxima = x[: len(x) // CHUNK * CHUNK].reshape(-1, CHUNK).max(1)
        if len(maxima) >= top_k:  # the k-th largest of the chunks' maxima is at most the k-th largest of all
            values = x[x >= np.partition(maxima, -top_k)[-top_k]]
        kth = np.partition(values, -top_k)[-top_k]
        lowest = max(lowest, kth)
        if top_p < 1:
            some = x >= kth
            values, weights = x[some], weights[some]
            total = weights.sum(dtype=np.float64)
    if top_p == 1:
        return lowest
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
    return max(lowest, values[order[last]])


def _first_largest(x):
    """The largest of each row, NaN where a row holds one, and its lowest id: fp32 and int arrays [R]."""
    x = x.numpy()
    ids = x.argmax(1)
    return x[np.arange(len(x)), ids], ids


def column(values):
    """A number a row as a tensor [R, 1] beside rows; a plain number where there is one row, which costs less."""
    return float(values[0]) if len(values) == 1 else torch.from_numpy(np.ascontiguousarray(values))[:, None]
