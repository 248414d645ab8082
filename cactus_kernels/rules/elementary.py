"""Logarithm and exponential for the bodies of rules: fp32, the same bits on every backend.

`triton.language` has both, but as approximations that differ between devices. Only additions, multiplications, correctly
rounded divisions and moves of bits here. Of float64, as in `law`, they are the language's own.
"""

from .languages import torch_language as m


def log(x):
    """ln x for x in [0, inf), within 3e-7 relative; at most -103 at 0, not -inf."""
    if x.dtype == m.float64:
        return m.log(x)
    small = x < 1.1754943508222875e-38  # denormals are scaled
    return log_of_normal(m.where(small, x * 16777216.0, x)) - m.where(small, 16.635532379150390625, 0.0)


def log_of_normal(x):
    """The same of a normal fp32 x, or about -88."""
    # ln(1 + f) = 2 atanh(f / (2 + f)).
    e, mantissa = parts(x)
    f = mantissa - 1.0
    return m.cast(e, m.float32) * 0.693147182464599609375 + atanh2(m.div_rn(f, 2.0 + f))


def log_of_number(x):
    """ln x of a normal fp32 number, as float64, within 1e-13: for a few numbers, of which float64 is made."""
    e, mantissa = parts(x)
    f = m.cast(mantissa, m.float64) - 1.0
    s = f / (f + 2.0)
    s2 = s * s
    t = 0.0 * s2
    for k in m.static_range(9):
        t = t * s2 + 2.0 / (19 - 2 * k)
    return m.cast(e, m.float64) * 0.6931471805599453 + s * (t * s2 + 2.0)


def without_log(x):
    """x - 1 - ln x >= 0 for a normal fp32 x, within 1e-6 relative, also near 1 where its parts cancel."""
    # As in `log`, with f - ln(1 + f) = f - 2 atanh(s) = s (f - s^2 g(s^2)), g being `beyond_first`.
    e, mantissa = parts(x)
    f = mantissa - 1.0
    s = m.div_rn(f, f + 2.0)
    s2 = s * s
    return (x - mantissa) - m.cast(e, m.float32) * 0.693147182464599609375 + s * (f - s2 * beyond_first(s2))


def parts(x):
    """e int32 and the mantissa fp32 of a normal fp32 x = 2^e mantissa, sqrt(1/2) <= mantissa < sqrt(2)."""
    bits = m.cast(x, m.int32, bitcast=True) - 0x3F3504F3
    return bits >> 23, m.cast((bits & 0x7FFFFF) + 0x3F3504F3, m.float32, bitcast=True)


def exp(x):
    """e^x for x in [-87, 88], within 3e-7 relative; x is clamped to that."""
    if x.dtype == m.float64:
        return m.exp(x)
    x = m.minimum(m.maximum(x, -87.0), 88.0)
    n = m.cast(x * 1.44269502162933349609375 + 126.5, m.int32) - 126  # rounded: a conversion cuts towards 0
    k = m.cast(n, m.float32)
    # ln 2 in two parts: the product with the first, of 9 bits, is exact.
    r = (x - k * 0.693359375) + k * 2.12194440400041639804840087890625e-4
    # Taylor: |r| <= 0.35, so that the first term left out is below 6e-9.
    s = 0.00019841270113829523 * r + 0.0013888889225199819
    s = ((s * r + 0.008333333767950535) * r + 0.0416666679084301) * r + 0.1666666716337204
    s = ((s * r + 0.5) * r + 1.0) * r + 1.0
    return s * m.cast((n + 127) << 23, m.float32, bitcast=True)


def log_ratio(a, b, difference):
    """ln(a / b) for a, b > 0 and their difference a - b, which may be known more exactly than they are."""
    if a.dtype == m.float64:
        return m.log(a) - m.log(b)
    s = m.div_rn(difference, a + b)
    near = (s < 0.17) & (s > -0.17)
    return m.where(near, atanh2(m.where(near, s, 0.0)), log(a) - log(b))


def atanh2(s):
    """2 atanh(s) for |s| <= 0.172, within 1e-8 before rounding."""
    s2 = s * s
    return s * (s2 * beyond_first(s2) + 2.0)


def beyond_first(s2):
    """(2 atanh(s) - 2 s) / s^3 for s2 = s^2 <= 0.0295, within 2e-7: the minimax polynomial of degree 2."""
    return (s2 * 0.2958204746246338 + 0.39988717436790466) * s2 + 0.6666668653488159
