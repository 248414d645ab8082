"""Drawing a token from unnormalised weights by a two-level exponential race: the torch reference.

    chunk c = tokens 1024 c .. 1024 c + 1023,   S_c = the sum of the chunk's weights, int64 in units of 2^-52
    winning chunk = argmax_c S_c / E(c),        winning token = argmax_i w_i / E'(i) over that chunk alone

E and E' are fresh standard exponentials; ties go to the lowest id; a weight of 0 never wins. Integer sums have no order,
so every backend, block size and split gets the same winner, bit for bit.
"""

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


def noise(seed, row, purposes, sizes):
    """Exponentials of several races a row, fp32 [R, size] for each purpose: index i has counter (i, purpose, *row).

    seed: int64 [R]. row: counter words 2 and 3, each int64 [R]. purposes: counter words 1.
    """
    index = torch.cat([torch.arange(size) for size in sizes])
    purpose = torch.cat([torch.full((size,), p) for p, size in zip(purposes, sizes, strict=True)])
    words = philox.philox(seed[:, None], index, purpose, row[0][:, None], row[1][:, None])
    return philox.exponential(*words).split(sizes, dim=1)


def pick(weights, exponentials):
    """The winner of one race a row, int64 [R]: weights [R, K] >= 0, fp32 or int64 sums. All 0: index 0, and no winner."""
    return (weights.float() / exponentials).argmax(1)
