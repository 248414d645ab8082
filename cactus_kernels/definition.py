"""The numbers that the law of a draw is made of: part of the definition, the same for every backend, not tunable."""

import math

CHUNK = 1024  # tokens of a chunk in the race between chunks
ONE = 2.0**52  # a weight of 1 in fixed point: 1024 weights of at most 1.01 stay below 2^63
BLOCK_SHIFT = 10  # Z of a row: the sums of its chunks in units of 2^-52 2^10, so that 2^20 weights stay below 2^63
MAX_DRAFT_TOKENS = 64  # of a request
MAX_PROB = 1.01  # probabilities above this are bad input; between 1 and this they are rounding
LARGEST = float.fromhex("0x1.fffffep127")  # of fp32

# Counter word 1 of Philox. Draws for different purposes never share a word.
ACCEPT, PICK_CHUNK, PICK_TOKEN, DRAFT_CHUNK, DRAFT_TOKEN, SEED = range(6)

# What a token is drawn from: the target row; the residual (h - p)+; or h without the drafted token, where rounding or
# bad input left no residual.
TARGET, RESIDUAL, REST = range(3)

# log(1 + f) = f * (1 + LOG[0] f + LOG[1] f^2 + ...) within 2.5e-7 relative for sqrt(1/2) <= 1 + f <= sqrt(2), every
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

# Statistics of rows (host/statistics.py).
ENTROPY_UNIT = 2.0**40  # of a term of H: at most 1/e, so that any sum of 2^23 stays below 2^63
CERTAINTY_UNIT = 2.0**52  # of a term of the certainty, which is at most ln V
NEGLIGIBLE = 2.0**-60  # q V below has a term of 1 / V

# The solver of rules that clip (host/clip.py).
LARGEST_MULTIPLE = 3e38
NAT = 2.0**44  # of q (p/q - 1 - ln(p/q))
STEPS = 64  # at most; ten are much
CLOSE = 2.0**-21  # of kl: near enough
ONE_BITS = 0x3F800000  # of 1 in fp32
TINY = 2.0**-126


def num_chunks(vocab_size: int) -> int:
    return (vocab_size + CHUNK - 1) // CHUNK


def entropy_scale(vocab_size: int) -> float:
    """What makes an entropy relative."""
    return 1 / math.log(vocab_size) if vocab_size > 1 else 0.0
