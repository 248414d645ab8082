"""The names of `triton.language` that rules may use, for numpy arrays. All are correctly rounded, as in the kernels."""

import numpy as np
from numpy import exp, float32, float64, int32, log

minimum, maximum, sqrt_rn, div_rn, static_range = np.minimum, np.maximum, np.sqrt, np.divide, range

__all__ = [
    "cast",
    "div_rn",
    "exp",
    "float32",
    "float64",
    "int32",
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


def cast(x, dtype, bitcast=False):
    return x.view(dtype) if bitcast else x.astype(dtype)
