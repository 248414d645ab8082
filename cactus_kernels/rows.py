"""Rows outside verification: drawing a token from each, and the statistics that make rows of logits distributions."""

from dataclasses import dataclass

import torch

from . import philox, rows_torch
from .inputs import (
    ROW_DTYPES,
    Inputs,
    check_device,
    check_rows,
    check_sampling,
    check_stream,
    check_tensor,
    choose_backend,
)
from .rules import SpS
from .sampling import COLUMNS, RowStats, Sampling
from .verify import VerifyOutput, run


@dataclass(frozen=True)
class SampleOutput:
    """One token from each row of logits.

    Attributes:
        token_ids: int64 [B], -1 where a row is bad.
        probs: fp32 [B], what the token's probability was: the bits that verification uses. NaN where a row is bad.
        stats: `RowStats` [B], for `verify_from_logits`.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor
    stats: RowStats

    @property
    def valid(self) -> torch.Tensor:
        """bool [B], False where a row is bad."""
        return self.token_ids >= 0

    def raise_if_invalid(self) -> None:
        """Raise ValueError naming the bad rows. Waits for the device."""
        if not self.valid.all():
            rows = (~self.valid).nonzero().squeeze(1).tolist()
            raise ValueError(
                f"bad values in rows {rows}: logits must not hold NaN or +inf nor be -inf throughout, sampling settings "
                "must be in their ranges"
            )


@dataclass(frozen=True)
class RowInputs:
    """Checked rows of logits [B, V]; without a seed no token is drawn."""

    logits: torch.Tensor
    sampling: Sampling
    entropy: bool = False
    seed: int | torch.Tensor | None = None
    offset: int | torch.Tensor | None = None


@torch.no_grad()
def draw(probs, *, seed, offset, out=None, scratch=None, backend=None) -> VerifyOutput:
    """Draw one token from each row of probabilities, by the race that verification uses, with random words of its own.

    Args:
        probs: [B, V] fp32, bf16 or fp16, unnormalised probabilities at most 1; contiguous in the vocabulary.
        seed, offset, out, scratch, backend: as in `verify`; the word of a draft's row j is addressed by offset + j.

    Returns:
        `VerifyOutput` with token_ids int64 [B, 1] (-1 where a row is bad), num_accepted 0, valid.
    """
    check_tensor("probs", probs, 2, ROW_DTYPES)
    return run(_inputs(probs, seed, offset), out, scratch, backend)


@torch.no_grad()
def sample(logits, *, seed, offset, sampling=None, entropy=False, out=None, scratch=None, backend=None) -> SampleOutput:
    """Draw one token from each row of logits, and keep what makes the row a distribution: no softmax is written.

    Args:
        logits: [B, V] fp32, bf16 or fp16; contiguous in the vocabulary.
        seed, offset: as in `verify`; the word of a draft's row j is addressed by offset + j.
        sampling: a `Sampling`; None: temperature 1, nothing dropped.
        entropy: whether the statistics hold it.
        out: a `SampleOutput` to write to; rows of `out.stats.packed` may have any stride, such as those of draft j in
            [B, m, 8].
        scratch: `rows_triton.new_scratch(B, V, device, entropy=entropy)`, needed under a CUDA graph; None: kept by the launcher.
        backend: as in `verify`.

    Raises:
        TypeError, ValueError: wrong types, shapes, dtypes or devices, before any work. Bad logits (NaN, +inf, nothing but
            -inf) are not looked at here: they give a token of -1, and `raise_if_invalid()` raises.
        RuntimeError: the backend asked for is not to be had.
    """
    check_rows("logits", logits, 2)
    check_stream("seed", seed, len(logits))
    check_stream("offset", offset, len(logits))
    return _run(
        RowInputs(logits, Sampling() if sampling is None else sampling, entropy, seed, offset), out, scratch, backend
    )


@torch.no_grad()
def row_stats(logits, *, sampling=None, entropy=False, out=None, scratch=None, backend=None) -> RowStats:
    """The statistics of rows of logits, as `sample` gives them, without a draw. out: a `RowStats`; the rest as there."""
    if out is not None and not isinstance(out, RowStats):
        raise TypeError(f"out must be a RowStats, got {type(out).__name__}")
    check_rows("logits", logits, 2)
    out = SampleOutput(None, None, out) if out is not None else None
    return _run(RowInputs(logits, Sampling() if sampling is None else sampling, entropy), out, scratch, backend).stats


def _run(inputs, out, scratch, backend) -> SampleOutput:
    logits, draws = inputs.logits, inputs.seed is not None
    B, device = len(logits), logits.device
    check_sampling("sampling", inputs.sampling, B)
    if torch.compiler.is_compiling() and draws:
        if out is not None or scratch is not None:
            raise ValueError("out and scratch are not taken while torch.compile traces: it plans memory itself")
        from .ops import call_sample

        ids, probs, packed = call_sample(inputs, backend)
        return SampleOutput(ids, probs, RowStats(packed))
    if out is None:
        ids, probs = (torch.empty(B, dtype=d, device=device) if draws else None for d in (torch.int64, torch.float32))
        out = SampleOutput(ids, probs, RowStats.empty(B, device=device))
    else:
        if not isinstance(out, SampleOutput):
            raise TypeError(f"out must be a SampleOutput, got {type(out).__name__}")
        if draws:
            check_tensor("out.token_ids", out.token_ids, 1, (torch.int64,), (B,))
            check_tensor("out.probs", out.probs, 1, (torch.float32,), (B,))
        check_tensor("out.stats.packed", out.stats.packed, 2, (torch.float32,), (B, COLUMNS))
    check_device(device, inputs.seed, inputs.offset, *inputs.sampling.settings(), out.token_ids, out.probs, scratch)
    check_device(device, out.stats.packed)
    if choose_backend(backend, device) == "torch":
        implementation = rows_torch.row_stats
    else:
        from .rows_triton import row_stats as implementation
    if B:
        implementation(inputs, out, scratch)
    return out


def _inputs(probs, seed, offset):
    return Inputs(
        target=probs[:, None],
        draft=None,
        draft_token_ids=torch.empty((len(probs), 0), dtype=torch.int64, device=probs.device),
        rule=SpS(),
        seed=seed,
        offset=offset,
        cu_draft_tokens=None,
        max_draft_tokens=0,
        batch_size=len(probs),
        purposes=(philox.DRAFT_CHUNK, philox.DRAFT_TOKEN),
    )
