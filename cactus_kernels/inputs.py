"""What every entry point checks before any work, and which backend runs."""

from dataclasses import dataclass

import torch

from . import philox
from .rules import Rule
from .sampling import RowStats, Sampling

MAX_DRAFT_TOKENS = 64
ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Inputs:
    """One checked batch, padded ([B, ...] tensors, `cu_draft_tokens` None) or flat. Shapes are those of `verify`."""

    target: torch.Tensor
    draft: torch.Tensor | None
    draft_token_ids: torch.Tensor
    rule: Rule
    seed: int | torch.Tensor
    offset: int | torch.Tensor
    cu_draft_tokens: torch.Tensor | None
    max_draft_tokens: int
    batch_size: int
    purposes: tuple = (philox.PICK_CHUNK, philox.PICK_TOKEN)
    # From logits: how the target's become probabilities; the same for the draft's, or their statistics, else the draft's
    # rows are probabilities.
    sampling: Sampling | None = None
    draft_sampling: Sampling | None = None
    draft_stats: RowStats | None = None
    bonus_token_ids: torch.Tensor | None = None  # [B]: then the target has no bonus rows
    budget: torch.Tensor | None = None  # float64 [B]: nats that are left of a sequence's budget
    row_map: torch.Tensor | None = None  # [B]: then draft rows are [slots, K, V], those of request b in slot row_map[b]

    @property
    def tensors(self):
        """Everything that has to be on the target's device, other things among it."""
        stats = self.draft_stats and self.draft_stats.packed
        samplings = [s for x in (self.sampling, self.draft_sampling) if x is not None for s in x.settings()]
        rows = (self.draft, self.draft_token_ids, self.cu_draft_tokens, self.bonus_token_ids, self.row_map, stats)
        return (*rows, self.budget, self.seed, self.offset, *self.rule.strengths, *samplings)

    @property
    def vocab_size(self):
        return self.target.shape[-1]

    @property
    def draft_vocab_size(self):
        return self.vocab_size if self.draft is None else self.draft.shape[-1]


def check_budget(rule):
    """Raise ValueError where a rule cannot keep a sequence's budget."""
    if not rule.keeps_proportions:
        raise ValueError(f"a budget needs a rule that keeps the target's proportions, got {rule.name}: use Cactus")
    if len(rule.strengths) > 1:
        raise ValueError(f"a budget is offered for rules of at most one strength, not for {rule.name}")


def check_tensor(name, tensor, dim, dtypes, shape=None):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}: cast it first")
    if tensor.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {tuple(tensor.shape)}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_rows(name, rows, dim):
    """Rows of probabilities or logits, [..., V]."""
    check_tensor(name, rows, dim, ROW_DTYPES)
    if rows.shape[-1] == 0:
        raise ValueError(f"{name} has an empty vocabulary: shape {tuple(rows.shape)}")
    if rows.numel() and rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {rows.stride()}")


def check_stream(name, value, batch_size):
    """A seed or an offset: an int of 64 bits, or int64 [B]."""
    if isinstance(value, torch.Tensor):
        check_tensor(name, value, 1, (torch.int64,), (batch_size,))
    elif isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or an int64 tensor [B], got {type(value).__name__}")
    elif not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit in 64 bits, got {value}")


def check_sampling(name, sampling, batch_size):
    if not isinstance(sampling, Sampling):
        raise TypeError(f"{name} must be a Sampling, got {type(sampling).__name__}")
    for value in sampling.settings():
        if isinstance(value, torch.Tensor) and len(value) != batch_size:
            raise ValueError(
                f"{name} has settings for {len(value)} requests in a batch of {batch_size}: give one for each"
            )


def check_device(device, *values):
    """Every tensor among the values is on the device that the rows are on."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.device != device:
            raise ValueError(f"all tensors must be on the target's device {device}, got one on {value.device}")


def choose_backend(backend, device) -> str:
    """Which backend, "torch" or "triton", runs on a device. Raises RuntimeError where the one asked for cannot be had."""
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend must be 'triton', 'torch' or None, got {backend!r}")
    if backend == "torch" or (backend is None and device.type != "cuda"):
        return "torch"
    try:
        from . import race_triton
    except ImportError as error:
        raise RuntimeError("triton is not installed: install it, or pass backend='torch'") from error
    if device.type == "cpu" and not race_triton.INTERPRETED:
        raise RuntimeError(
            "backend='triton' runs on CPU tensors only in the interpreter: set TRITON_INTERPRET=1 before importing "
            "triton, or pass backend='torch'"
        )
    return "triton"
