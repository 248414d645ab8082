"""Drawing from rows of logits on the host, and their statistics: what `kernels.rows` does on a GPU."""

import numpy as np
import torch

from .. import philox
from ..definition import DRAFT_CHUNK, DRAFT_TOKEN
from ..sampling import NORM
from . import race
from .reduce import Settings, column, normalised, reduced, softmax
from .rows import LogitRows, Place, ProbRows


def row_stats(inputs, out, scratch=None):
    """Write the statistics of `inputs` (checked `contract.RowInputs`) to `out.stats`; draw from the rows if it has a seed."""
    B, vocab_size = inputs.logits.shape
    settings = Settings.of(inputs.sampling, B)
    if inputs.seed is None:
        every = np.arange(B)
        stats = reduced(_plain_rows(inputs.logits), every, 0 * every, settings, inputs.entropy)
        out.stats.packed.copy_(torch.from_numpy(stats))
        return
    noise = draft_noise(inputs.seed, inputs.offset, B, vocab_size, 1)[0]
    tokens, stats = draw(inputs.logits, settings, noise, inputs.entropy)
    every = np.arange(B)
    probs = LogitRows(inputs.logits[:, None], Place(), stats[:, None]).at(every, 0 * every, tokens)
    for to, values in zip((out.token_ids, out.probs, out.stats.packed), (tokens, probs, stats), strict=True):
        to.copy_(torch.from_numpy(values))


def draw(logits, settings, noise, entropy=False, weights_to=None):
    """A token from each row of logits [B, V], -1 for bad ones, and the row's statistics: int64 array [B], fp32 [B, 8].

    Args:
        settings: `Settings`. noise: one of what `draft_noise` gives. entropy: as in `reduced`.
        weights_to: fp32 [B, V] on the host, to which what `reduced` gives to visitors is written; None: nowhere.
    """
    every = np.arange(len(logits))
    tokens = np.empty(len(logits), dtype=np.int64)

    def visit(r, weights, sums):
        tokens[r] = race.race(sums, weights, [x[r] for x in noise])
        if weights_to is not None:
            weights_to[r] = weights

    stats = reduced(_plain_rows(logits), every, 0 * every, settings, entropy, visit)
    tokens[np.isnan(stats[:, NORM])] = -1
    return tokens, stats


def draw_from_probs(logits, settings, noise, probs):
    """A token from each row of logits [B, V], as `draw`, int64 array [B]; their probabilities are written to `probs`.

    probs: fp32 [B, V] on the host, of any stride between rows.
    """
    if settings.some_truncate:
        tokens, stats = draw(logits, settings, noise, weights_to=probs)
        probs.mul_(column(stats[:, NORM]))
        return tokens
    softmax(logits.float().cpu(), settings, out=probs)
    sums = race.float_chunk_sums(probs)
    tokens = race.race(sums, probs, noise)
    normalised(probs, sums.sum(1))
    tokens[np.isnan(probs.numpy()[:, 0]) | settings.is_bad] = -1
    return tokens


def _plain_rows(logits):
    """Logits [B, V] as rows of B requests."""
    return ProbRows(logits[:, None], Place())


def draft_noise(seed, offset, batch_size, vocab_size, count):
    """The exponentials of draws at offset, offset + 1, … of each request: a list of `count` that `host.race.noise` gives."""
    seed, offset = philox.streams(seed, offset, batch_size)
    position = (offset + np.arange(count)[:, None]).reshape(-1)
    words = philox.counter_row(position, 0)
    noise = race.noise(np.tile(seed, count), words, (DRAFT_CHUNK, DRAFT_TOKEN), vocab_size)
    return [tuple(x[i : i + batch_size] for x in noise) for i in range(0, count * batch_size, batch_size)]
