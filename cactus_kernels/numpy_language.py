"""The names of `triton.language` that rules may use, for numpy arrays. All are correctly rounded, as in the kernels."""

import numpy as np


def where(condition, a, b):
    if isinstance(condition, bool):
        return a if condition else b
    return np.where(condition, a, b)


minimum, maximum, sqrt_rn, div_rn = np.minimum, np.maximum, np.sqrt, np.divide
