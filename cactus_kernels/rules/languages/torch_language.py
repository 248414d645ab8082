"""The names of `triton.language` that rules may use, for torch tensors: correctly rounded where the kernels' are.

Float64 tensors stay float64, so that `law` can evaluate the same rules at full precision.
"""

import torch
from torch import exp, float32, float64, int32, int64, log

static_range = range

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
    if isinstance(a, float) and isinstance(b, float):
        # Two numbers make numbers of fp32 here, as in the other languages, and not of torch's default dtype.
        a = condition.new_full((), a, dtype=float32)
    return torch.where(condition, a, b)


def minimum(a, b):
    if not isinstance(a, torch.Tensor):
        a, b = b, a
    return torch.clamp(a, max=b) if isinstance(a, torch.Tensor) else min(a, b)


def maximum(a, b):
    if not isinstance(a, torch.Tensor):
        a, b = b, a
    return torch.clamp(a, min=b) if isinstance(a, torch.Tensor) else max(a, b)


def sqrt_rn(x):
    # torch.sqrt is off in the last bit for some fp32 inputs on CPUs; by way of float64 the result is correctly rounded.
    return x.double().sqrt().to(x.dtype)


def div_rn(a, b):
    return a / b


def cast(x, dtype, bitcast=False):
    return x.view(dtype) if bitcast else x.to(dtype)
