"""Philox4x32-10, the counter-based generator of every random word here, for torch (Salmon et al., SC 2011).

The kernels use `triton.language.philox`, which gives the same words. A word is addressed, never consumed: the key is the
request's 64-bit seed, the counter is (index, purpose, low and high word of offset + row). So no block size, batch row
or split can change a sample.
"""

import functools

import numpy as np
import torch

from .definition import BELOW_SQRT_HALF, LN2, LOG, SEED, SQRT_HALF_BITS

MASK = 0xFFFFFFFF
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
# What is added to the high and the low word of the key in each of the 10 rounds: [10, 2].
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None] * np.array([0xBB67AE85, 0x9E3779B9], dtype=np.uint64)
_MASK, _32 = np.uint64(MASK), np.uint64(32)
_LARGEST = np.float32(1 - 2**-24)


def philox(seed, c0, c1, c2, c3):
    """The first two of the four 32-bit words of Philox4x32-10 at a counter.

    Args:
        seed: int64 tensor or array, the 64-bit key.
        c0, c1, c2, c3: int64 tensors, arrays or ints in [0, 2^32), broadcast against `seed`.

    Returns:
        (r0, r1): int64 in [0, 2^32), of the broadcast shape; arrays for an array, else tensors on the seed's device.
    """
    # numpy, since it does a small operation in a third of torch's time and its uint64 has the whole product.
    key = _numpy(seed).view(np.uint64)
    c0, c1, c2, c3 = (_numpy(c) for c in (c0, c1, c2, c3))
    shape = np.broadcast(key, c0, c1, c2, c3).shape
    # Both halves of a round in one array: x holds the two words that get multiplied, y the other two, crosswise.
    x, y = np.empty((2, *shape), dtype=np.uint64), np.empty((2, *shape), dtype=np.uint64)
    x[0], x[1], y[0], y[1] = c0, c2, c3, c1
    multipliers = _MULTIPLIERS.reshape((2,) + (1,) * len(shape))
    key = key.reshape((1,) * (len(shape) - key.ndim) + key.shape)
    keys = np.stack([key >> _32, key]) + _KEY_STEPS.reshape((10, 2) + (1,) * len(shape))
    keys &= _MASK
    for round_key in keys:
        product = x * multipliers
        x = product >> _32
        x ^= y
        x ^= round_key
        product &= _MASK
        # The two products change places: word 0 comes from the multiplied word 2.
        x, y = x[::-1], product
    return _tensor(x[0].view(np.int64), seed), _tensor(y[1].view(np.int64), seed)


def counter_row(offset, row):
    """Counter words 2 and 3: the low and high word of the 64-bit sum offset + row (int64 tensors or ints)."""
    position = offset + row
    return position & MASK, (position >> 32) & MASK


def request_seeds(seed, batch_size, device):
    """Seeds of a batch that was given one int: request r gets a Philox word pair of (seed, r). int64 [batch_size]."""
    r = torch.arange(batch_size, dtype=torch.int64, device=device)
    r0, r1 = philox(torch.full((1,), seed, dtype=torch.int64, device=device), r, SEED, 0, 0)
    return r0 | (r1 << 32)


@functools.lru_cache(maxsize=64)
def _seeds_of_int(seed, batch_size):
    return request_seeds(seed, batch_size, "cpu")


def streams(seed, offset, batch_size):
    """Seed and offset of every request as int64 arrays [B], not to be written to, from ints or tensors [B]."""
    seed = _seeds_of_int(seed, batch_size) if isinstance(seed, int) else seed
    offset = np.full(batch_size, offset, dtype=np.int64) if isinstance(offset, int) else _numpy(offset)
    return _numpy(seed), offset


def uniform(r0, r1):
    """fp32 uniform in [0, 1), fine near zero: steps of 2^-47, largest value 1 - 2^-24. Words as `philox` returns them."""
    high, low = _numpy(r0) >> 8, _numpy(r1) >> 9
    v = high.astype(np.float32) * np.float32(2**-24) + low.astype(np.float32) * np.float32(2**-47)
    return _tensor(np.minimum(v, _LARGEST), r0)


def exponential(r0, r1):
    """fp32 standard exponential, -log(1 - v) for v in [2^-48, 1 - 2^-24]: never 0, so no race is won by rounding.

    Only additions and multiplications in a fixed order, so that every backend gives the same bits.
    """
    high, low = _numpy(r0) >> 8, 2 * (_numpy(r1) >> 9) + 1
    v = high.astype(np.float32) * np.float32(2**-24) + low.astype(np.float32) * np.float32(2**-48)
    v = np.minimum(v, _LARGEST)
    bits = (np.float32(1) - v).view(np.int32) - np.int32(SQRT_HALF_BITS)
    small = v < np.float32(BELOW_SQRT_HALF)
    e = np.where(small, np.int32(0), bits >> 23).astype(np.float32)
    mantissa = ((bits & np.int32(0x7FFFFF)) + np.int32(SQRT_HALF_BITS)).view(np.float32)
    f = np.where(small, -v, mantissa - np.float32(1))
    poly = f * np.float32(LOG[-1])
    for coefficient in LOG[-2::-1]:
        poly += np.float32(coefficient)
        poly *= f
    poly *= f
    poly += f
    e *= np.float32(LN2)
    poly += e
    return _tensor(np.negative(poly), r0)


def _numpy(x):
    if not isinstance(x, torch.Tensor):
        return np.asarray(x, dtype=np.int64)
    return (x if x.device.type == "cpu" else x.cpu()).numpy()


def _tensor(array, like):
    if not isinstance(like, torch.Tensor):
        return array
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
