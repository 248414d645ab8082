"""Philox4x32-10, the counter-based generator of every random word here, for torch (Salmon et al., SC 2011).

The kernels use `triton.language.philox`, which gives the same words. A word is addressed, never consumed: the key is the
request's 64-bit seed, the counter is (index, purpose, low and high word of offset + row). So no block size, batch row
or split can change a sample.
"""

import torch

# Counter word 1. Draws for different purposes never share a word.
ACCEPT, PICK_CHUNK, PICK_TOKEN, DRAFT_CHUNK, DRAFT_TOKEN, SEED = range(6)

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# log(1 + f) = f * (1 + LOG[0] f + LOG[1] f^2 + ...) within 2e-7 relative for sqrt(1/2) <= 1 + f <= sqrt(2), every
# operation rounded to fp32. A Chebyshev fit of degree 9 with the constant set to 1.
LOG = (
    -0.49999985098838806,
    0.3333420157432556,
    -0.250022292137146,
    0.19956403970718384,
    -0.1655847579240799,
    0.14952994883060455,
    -0.14395862817764282,
    0.08756256848573685,
)
LN2 = 0.6931471824645996  # ln 2 rounded to fp32
SQRT_HALF_BITS = 0x3F3504F3  # sqrt(1/2) in fp32, as an integer
BELOW_SQRT_HALF = 0.2928932309150696  # 1 - sqrt(1/2) in fp32: below it, 1 - v needs no exponent


def philox(seed, c0, c1, c2, c3):
    """The first two of the four 32-bit words of Philox4x32-10 at a counter.

    Args:
        seed: int64 tensor, the 64-bit key.
        c0, c1, c2, c3: int64 tensors or ints in [0, 2^32), broadcast against `seed`.

    Returns:
        (r0, r1): int64 tensors in [0, 2^32), of the broadcast shape.
    """
    device = seed.device
    c0, c1, c2, c3 = (torch.as_tensor(c, dtype=torch.int64, device=device) for c in (c0, c1, c2, c3))
    shape = torch.broadcast_shapes(seed.shape, c0.shape, c1.shape, c2.shape, c3.shape)
    # Both halves of a round in one tensor, since the cost on a CPU is the number of operations. `x` holds the two
    # words that get multiplied, `y` the other two, crosswise.
    x = torch.empty((2, *shape), dtype=torch.int64, device=device)
    y = torch.empty_like(x)
    x[0], x[1], y[0], y[1] = c0, c2, c3, c1
    lead = (2,) + (1,) * len(shape)
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device).view(lead)
    # The key that meets row 0 of a product is k1, the one that meets row 1 is k0.
    key = torch.stack([(seed >> 32) & MASK, seed & MASK])
    key = key.view((2,) + (1,) * (len(shape) - seed.dim()) + tuple(seed.shape))
    step = torch.tensor(_KEY_STEPS[::-1], dtype=torch.int64, device=device).view((2,) + (1,) * (key.dim() - 1))
    for _ in range(10):
        # int64 wraps, so bits 32..63 of the product are exact.
        product = x * multipliers
        x = ((product >> 32) & MASK).bitwise_xor_(y).bitwise_xor_(key)
        y = product.bitwise_and_(MASK)
        # After one round the pair stands in the other order: turn it, so that row 0 is word 0 again.
        x = x.flip(0)
        key = (key + step) & MASK
    return x[0], y[1]


def counter_row(offset, row):
    """Counter words 2 and 3: the low and high word of the 64-bit sum offset + row (int64 tensors or ints)."""
    position = offset + row
    return position & MASK, (position >> 32) & MASK


def request_seeds(seed, batch_size, device):
    """Seeds of a batch that was given one int: request r gets a Philox word pair of (seed, r). int64 [batch_size]."""
    r = torch.arange(batch_size, device=device)
    r0, r1 = philox(torch.full((1,), seed, dtype=torch.int64, device=device), r, SEED, 0, 0)
    return r0 | (r1 << 32)


def uniform(r0, r1):
    """fp32 uniform in [0, 1), fine near zero: steps of 2^-47, largest value 1 - 2^-24."""
    v = (r0 >> 8).float() * 2**-24 + (r1 >> 9).float() * 2**-47
    return v.clamp_(max=1 - 2**-24)


def exponential(r0, r1):
    """fp32 standard exponential, -log(1 - v) for v in [2^-48, 1 - 2^-24]: never 0, so no race is won by rounding.

    Only additions and multiplications in a fixed order, so that every backend gives the same bits.
    """
    v = (r0 >> 8).float() * 2**-24 + (2 * (r1 >> 9) + 1).float() * 2**-48
    v = v.clamp_(max=1 - 2**-24)
    bits = (1 - v).view(torch.int32) - SQRT_HALF_BITS
    small = v < BELOW_SQRT_HALF
    e = torch.where(small, 0, bits >> 23).float()
    mantissa = ((bits & 0x7FFFFF) + SQRT_HALF_BITS).view(torch.float32)
    f = torch.where(small, -v, mantissa - 1)
    poly = f * LOG[-1]
    for coefficient in LOG[-2::-1]:
        poly = (poly + coefficient) * f
    log1p = f + f * poly
    return -(log1p + e * LN2)
