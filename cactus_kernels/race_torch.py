"""Drawing a token from unnormalised weights by a two-level exponential race: the torch reference.

    chunk c = tokens 1024 c .. 1024 c + 1023,   S_c = the sum of the chunk's weights, int64 in units of 2^-52
    winning chunk = argmax_c S_c / E(c),        winning token = argmax_i w_i / E'(i) over that chunk alone

E and E' are fresh standard exponentials; ties go to the lowest id; a weight of 0 never wins. Integer sums have no order,
so every backend, block size and split gets the same winner, bit for bit.
"""

import numpy as np
import torch

from . import philox

CHUNK = 1024  # part of the definition of a draw, not tunable
ONE = 2.0**52  # a weight of 1 in fixed point: 1024 weights of at most 1.01 stay below 2^63


def num_chunks(vocab_size: int) -> int:
    return (vocab_size + CHUNK - 1) // CHUNK


def chunk_sums(weights):
    """S: fp32 weights [R, V] >= 0 -> int64 [R, ceil(V / 1024)]."""
    rows, vocab_size = weights.shape
    chunks = num_chunks(vocab_size)
    fixed = torch.empty((rows, chunks * CHUNK), dtype=torch.int64, device=weights.device)
    fixed[:, vocab_size:] = 0
    fixed[:, :vocab_size].copy_(weights * ONE)
    return fixed.view(rows, chunks, CHUNK).sum(-1)


def noise(seed, row, purposes, vocab_size):
    """The exponentials of both races of a row: fp32 [R, C] for the chunks and [R, min(1024, V)] for a chunk's tokens.

    Args:
        seed: int64 [R]. row: counter words 2 and 3, each int64 [R].
        purposes: counter word 1 of the chunks' and of the tokens' race; index i has counter (i, purpose, *row).
    """
    sizes = (num_chunks(vocab_size), min(CHUNK, vocab_size))
    index = np.concatenate([np.arange(size) for size in sizes])
    words = philox.philox(seed[:, None], index, np.repeat(purposes, sizes), row[0][:, None], row[1][:, None])
    return philox.exponential(*words).split(sizes, dim=1)


def race(sums, token_weights, exponentials):
    """A token for each row by both races, int64 [R]; where all sums are 0 nothing wins, and an arbitrary id comes back.

    Args:
        sums: int64 [R, C], the chunk sums.
        token_weights: function of token ids, int64 [R, K], that gives their weights, fp32, 0 for ids beyond V.
        exponentials: what `noise` gave.
    """
    chunk_noise, token_noise = exponentials
    first = (sums.float() / chunk_noise).argmax(1, keepdim=True) * CHUNK
    tokens = first + torch.arange(token_noise.shape[1], device=sums.device)
    return (first + (token_weights(tokens) / token_noise).argmax(1, keepdim=True)).squeeze(1)
