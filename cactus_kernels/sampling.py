"""How logits become a distribution: `Sampling` says it, `RowStats` is what it comes to for each row."""

import functools
from dataclasses import dataclass

import torch

SETTINGS = ("temperature", "top_k", "top_p", "min_p")
# Columns of a row's statistics, fp32 [8]: 32 bytes are what memory is read by. ARGMAX holds the bits of an int32.
# INVERSE_TEMPERATURE is 0 for greedy rows, NORM is NaN for bad ones, UNUSED is 0.
MAX, NORM, CUTOFF, INVERSE_TEMPERATURE, ARGMAX, KEPT, ENTROPY, UNUSED = range(8)
COLUMNS = 8


@dataclass(frozen=True, eq=False)
class Sampling:
    """The distribution that logits stand for, in the order and with the meaning of Hugging Face's warpers.

    Logits are divided by the temperature; then top-k keeps the k largest, top-p the most likely tokens that hold a mass of
    top_p together, min-p those at least min_p times as likely as the likeliest; what is kept is normalised. The likeliest
    token is always kept. Tokens equal to the last one that is kept are kept too (`transformers` leaves to its sort which
    of equal logits top-p drops).

    Args:
        temperature: >= 0; 0 is greedy: the arg max has probability 1, the lowest id on ties.
        top_k: an int >= 0; 0 keeps all tokens.
        top_p: in [0, 1]; 1 keeps all tokens, 0 the likeliest.
        min_p: in [0, 1]; 0 keeps all tokens, 1 the likeliest.

    Each is a number, or a tensor [B] with one for each request (float; top_k int32 or int64). A bad value in a tensor makes its
    request invalid, since looking at it here would wait for the device.

    Raises:
        ValueError: a number out of its range; a tensor that is not one-dimensional.
        TypeError: neither a number nor a tensor of the right kind.
    """

    temperature: float | torch.Tensor = 1.0
    top_k: int | torch.Tensor = 0
    top_p: float | torch.Tensor = 1.0
    min_p: float | torch.Tensor = 0.0

    def __post_init__(self):
        for name in SETTINGS:
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                self._check_tensor(name, value)
            elif isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
                kind = "an int" if name == "top_k" else "a number"
                raise TypeError(f"{name} must be {kind} or a tensor [B], got {value!r}")
            elif name == "temperature" and not 0 <= value < 2.0**128:
                raise ValueError(f"temperature must be finite in fp32 and at least 0 (0 is greedy), got {value}")
            elif name == "top_k" and not 0 <= value < 2**31:
                raise ValueError(f"top_k must be at least 0 (0 keeps all tokens) and fit in 32 bits, got {value}")
            elif name in ("top_p", "min_p") and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")

    @functools.cached_property
    def varies(self) -> bool:
        """Whether one of them is a tensor."""
        return any(isinstance(getattr(self, name), torch.Tensor) for name in SETTINGS)

    @property
    def truncates(self) -> bool:
        """Whether a request may have top-k or top-p: True for tensors, whose values are not looked at."""
        return (
            isinstance(self.top_k, torch.Tensor)
            or isinstance(self.top_p, torch.Tensor)
            or (self.top_k > 0 or self.top_p < 1)
        )

    def settings(self) -> tuple:
        """temperature, top_k, top_p, min_p: numbers, or tensors [B] in fp32 (top_k int32)."""
        return tuple(
            value
            if not isinstance(value, torch.Tensor)
            else value.to(torch.int32 if name == "top_k" else torch.float32)
            for name, value in ((name, getattr(self, name)) for name in SETTINGS)
        )

    def to(self, device) -> "Sampling":
        """The same with its tensors on a device."""
        values = (getattr(self, name) for name in SETTINGS)
        return Sampling(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in values))

    def _check_tensor(self, name, value):
        wanted = value.dtype in (torch.int32, torch.int64) if name == "top_k" else value.is_floating_point()
        if not wanted:
            kind = "an int32 or int64" if name == "top_k" else "a float"
            raise TypeError(f"{name} must be a number or {kind} tensor [B], got dtype {value.dtype}")
        if value.dim() != 1:
            raise ValueError(f"{name} must have shape [B], one for each request, got {tuple(value.shape)}")


@dataclass(frozen=True, eq=False)
class RowStats:
    """What makes rows of logits l distributions without a softmax in memory:

        prob(x) = exp((l_x - max) / T) * norm   where l_x >= cutoff, else 0

    and 1 at the arg max of a greedy row (T = 0). Drawing and verification compute it by the same operations. The largest logit
    is taken off first since `exp(l / T - log_sum_exp)` loses the digits of l: at a logit of 10,000, three of seven.

    Attributes:
        packed: fp32 [..., 8], one row of numbers for each row of logits; the rest are views or made from it, fp32 [...].
        max, argmax: the largest logit, and its lowest id (int32).
        cutoff: the lowest logit that is kept; -inf without truncation.
        norm: 1 / sum of exp((l - max) / T) over what is kept; NaN where a row holds NaN or +inf, or nothing but -inf.
        kept: the share of the mass that truncation keeps.
        entropy: nats, of the distribution that is kept; NaN unless it was asked for.
    """

    packed: torch.Tensor

    def __post_init__(self):
        if not isinstance(self.packed, torch.Tensor):
            raise TypeError(f"packed must be a tensor, got {type(self.packed).__name__}")
        if self.packed.dtype != torch.float32 or self.packed.shape[-1:] != (COLUMNS,) or self.packed.stride(-1) != 1:
            raise ValueError(
                f"packed must be float32 [..., {COLUMNS}] with its last dimension contiguous, got {self.packed.dtype} "
                f"{tuple(self.packed.shape)}"
            )

    @staticmethod
    def empty(*shape, device) -> "RowStats":
        """Room for the statistics of rows of a shape, to be written to."""
        return RowStats(torch.empty((*shape, COLUMNS), dtype=torch.float32, device=device))

    @staticmethod
    def stack(stats, dim=1) -> "RowStats":
        """Statistics of several draws as those of a draft: a list of m `RowStats` [B] gives [B, m]."""
        return RowStats(torch.stack([s.packed for s in stats], dim=dim))

    @property
    def max(self):
        return self.packed[..., MAX]

    @property
    def argmax(self):
        return self.packed.view(torch.int32)[..., ARGMAX]

    @property
    def cutoff(self):
        return self.packed[..., CUTOFF]

    @property
    def norm(self):
        return self.packed[..., NORM]

    @property
    def log_sum_exp(self):
        """ln of the sum of exp(l / T) over what is kept; for greedy rows, of exp(0) over the arg max."""
        return self.max * self.packed[..., INVERSE_TEMPERATURE] - self.norm.log()

    @property
    def kept(self):
        return self.packed[..., KEPT]

    @property
    def entropy(self):
        return self.packed[..., ENTROPY]

    @property
    def valid(self):
        """bool [...], False for bad rows."""
        return ~self.norm.isnan()
