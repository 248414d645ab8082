"""The two-level race in Triton, for every kernel that draws: random words, keys, winners. The bits of `host.race`."""

import triton
import triton.language as tl

from .. import definition

CHUNK = tl.constexpr(definition.CHUNK)
ONE = tl.constexpr(definition.ONE)
SEED = tl.constexpr(definition.SEED)
LOG_0, LOG_1, LOG_2, LOG_3, LOG_4, LOG_5, LOG_6, LOG_7 = (tl.constexpr(c) for c in definition.LOG)
LN2, BELOW_SQRT_HALF = tl.constexpr(definition.LN2), tl.constexpr(definition.BELOW_SQRT_HALF)
SQRT_HALF_BITS = tl.constexpr(definition.SQRT_HALF_BITS)
BELOW_ONE = tl.constexpr(1 - 2**-24)
# Race words are int64: the bits of a key > 0 (fp32, so their order is that of the keys), then LOWEST ^ index, so that
# ties go to the lowest index. 0: nothing to win. BAD beats every key: a value that counts is bad.
LOWEST = tl.constexpr(2**31 - 1)  # in the interpreter a constexpr must not stand on the left of an operator
BAD = tl.constexpr(2**63 - 1)


@triton.jit
def uniform(r0, r1):
    """fp32 in [0, 1), as `philox.uniform`."""
    v = (r0 >> 8).to(tl.float32) * (2**-24) + (r1 >> 9).to(tl.float32) * (2**-47)
    return tl.minimum(v, BELOW_ONE)


@triton.jit
def exponential(r0, r1):
    """fp32 > 0, as `philox.exponential`, operation by operation."""
    v = (r0 >> 8).to(tl.float32) * (2**-24) + (2 * (r1 >> 9) + 1).to(tl.float32) * (2**-48)
    v = tl.minimum(v, BELOW_ONE)
    bits = (1.0 - v).to(tl.int32, bitcast=True) - SQRT_HALF_BITS
    small = v < BELOW_SQRT_HALF
    e = tl.where(small, 0, bits >> 23).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) + SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    f = tl.where(small, -v, mantissa - 1.0)
    poly = ((f * LOG_7 + LOG_6) * f + LOG_5) * f
    poly = ((poly + LOG_4) * f + LOG_3) * f
    poly = (((poly + LOG_2) * f + LOG_1) * f + LOG_0) * f
    log1p = f + f * poly
    return -(log1p + e * LN2)


@triton.jit
def race(weights, index, stream, purpose, zero):
    """The word of the winner. weights fp32 or int64 [K] >= 0; index int32 [K]; stream (seed, low, high word of the row)."""
    seed, low, high = stream
    # `zero` is an int64 >= 0 that was just computed. What is added is 0, but the compiler cannot know: else it shares the
    # 20 round keys of the seed between the races and keeps them in registers through the loop.
    r0, r1, _, _ = tl.philox(seed + (zero >> 63), index.to(tl.uint32), purpose, low, high)
    key = tl.div_rn(weights.to(tl.float32), exponential(r0, r1))
    word = (key.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (index ^ LOWEST).to(tl.int64)
    return tl.max(tl.where(weights > 0, word, 0))


@triton.jit
def stream_of(seed, offset, request):
    """The request's key and position, int64. seed, offset: int64 [B] or one number."""
    if seed.dtype.is_ptr():
        key = tl.load(seed + request)
    else:
        r0, r1, _, _ = tl.philox(seed.to(tl.int64), request.to(tl.uint32), SEED, 0, 0)
        key = r0.to(tl.int64) | (r1.to(tl.int64) << 32)
    if offset.dtype.is_ptr():
        position = tl.load(offset + request)
    else:
        # A sum, since the interpreter holds an int from 2^31 to 2^32 in 32 bits, whatever type it says.
        position = offset + tl.zeros((), tl.int64)
    return key, position


@triton.jit
def row_at(rows, offset, ALIGNED: tl.constexpr):
    """Pointer to a row, known to be a multiple of 16 bytes where the launcher says so: then 128-bit loads."""
    if ALIGNED:
        UNIT: tl.constexpr = 128 // rows.dtype.element_ty.primitive_bitwidth
        offset = offset // UNIT * UNIT  # the product is what the compiler sees; `tl.multiple_of` gets lost on the way
    return rows + offset


INTERPRETED = not isinstance(row_at, triton.runtime.jit.JITFunction)
