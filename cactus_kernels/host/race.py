"""Drawing a token from unnormalised weights by a two-level exponential race, on the host.

    chunk c = tokens 1024 c .. 1024 c + 1023,   S_c = the sum of the chunk's weights
    winning chunk = argmax_c S_c / E(c),        winning token = argmax_i w_i / E'(i) over that chunk alone

E and E' are fresh standard exponentials; ties go to the lowest id; a weight of 0 never wins. Probabilities are summed in int64
in units of 2^-52: integer sums have no order, so every backend, block size and split gets the same winner, bit for bit.
"""

import functools

import numpy as np
import torch

from .. import philox
from ..definition import CHUNK, ONE, num_chunks


def chunk_sums(weights):
    """S in units of 2^-52: fp32 tensor [R, V] >= 0, on the host -> int64 array [R, ceil(V / 1024)]."""
    rows, vocab_size = weights.shape
    chunks = num_chunks(vocab_size)
    fixed = torch.empty((rows, chunks * CHUNK), dtype=torch.int64, device="cpu")
    fixed[:, vocab_size:] = 0
    fixed[:, :vocab_size].copy_(weights * ONE)
    return fixed.view(rows, chunks, CHUNK).sum(-1).numpy()


def float_chunk_sums(weights):
    """S: fp32 tensor [R, V] -> fp32 array [R, ceil(V / 1024)]."""
    rows, vocab_size = weights.shape
    whole = vocab_size // CHUNK
    sums = np.empty((rows, num_chunks(vocab_size)), dtype=np.float32)
    if whole:
        sums[:, :whole] = weights[:, : whole * CHUNK].view(rows, whole, CHUNK).sum(-1).numpy()
    if whole * CHUNK < vocab_size:
        sums[:, whole] = weights[:, whole * CHUNK :].sum(-1).numpy()
    return sums


def noise(seed, row, purposes, vocab_size):
    """The exponentials of both races of a row: fp32 arrays [R, C] for the chunks and [R, min(1024, V)] for a chunk's tokens.

    Args:
        seed: int64 array [R]. row: counter words 2 and 3, each int64 [R].
        purposes: counter word 1 of the chunks' and of the tokens' race; index i has counter (i, purpose, *row).
    """
    chunks = num_chunks(vocab_size)
    index, purpose = _counters(vocab_size, purposes)
    words = philox.philox(seed[:, None], index, purpose, row[0][:, None], row[1][:, None])
    exponentials = philox.exponential(*words)
    return exponentials[:, :chunks], exponentials[:, chunks:]


@functools.lru_cache(maxsize=16)
def _counters(vocab_size, purposes):
    """Counter words 0 and 1 of both races: int64 arrays, not to be written to."""
    sizes = (num_chunks(vocab_size), min(CHUNK, vocab_size))
    return np.concatenate([np.arange(size) for size in sizes]), np.repeat(purposes, sizes)


def race(sums, weights, exponentials):
    """A token for each row by both races, int64 array [R]; where all sums are 0 nothing wins, and some id comes back.

    Args:
        sums: array [R, C], the chunk sums. weights: fp32 tensor [R, V].
        exponentials: what `noise` gave.
    """
    chunk_noise, token_noise = exponentials
    chunks = (sums.astype(np.float32) / chunk_noise).argmax(1)
    tokens = np.empty(len(chunks), dtype=np.int64)
    for r, first in enumerate(chunks * CHUNK):
        chunk = weights[r, first : first + CHUNK].numpy()
        tokens[r] = first + (chunk / token_noise[r, : len(chunk)]).argmax()
    return tokens
