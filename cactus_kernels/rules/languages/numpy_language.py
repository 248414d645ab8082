"""The names of `triton.language` that rules may use, for numpy arrays. All are correctly rounded, as in the kernels."""

import numpy as np
from numpy import exp, float32, float64, int32, int64, log

sqrt_rn, div_rn, static_range = np.sqrt, np.divide, range

__all__ = [
    "cast",
    "div_rn",
    "exp",
    "float32",
    "float64",
    "int32",
    "int64",
    "log",
    "maximum",
    "minimum",
    "sqrt_rn",
    "static_range",
    "where",
]


def where(condition, a, b):
    if isinstance(condition, bool):
        return a if condition else b
    chosen = np.where(condition, a, b)
    # Two numbers make numbers of fp32 here, as in the other languages.
    return chosen.astype(np.float32) if isinstance(a, float) and isinstance(b, float) else chosen


# Of two numbers numpy makes a float64, which would draw the arrays along.


def minimum(a, b):
    return min(a, b) if isinstance(a, float) and isinstance(b, float) else np.minimum(a, b)


def maximum(a, b):
    return max(a, b) if isinstance(a, float) and isinstance(b, float) else np.maximum(a, b)


def cast(x, dtype, bitcast=False):
    return x.view(dtype) if bitcast else x.astype(dtype)
