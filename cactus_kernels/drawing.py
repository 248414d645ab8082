"""Rows outside verification: drawing a token from each, and the statistics that make rows of logits distributions."""

from typing import Any

import torch

from . import backends, ops
from .contract import (
    ROW_DTYPES,
    RowInputs,
    SampleOutput,
    VerifyOutput,
    check_call,
    check_device,
    check_output,
    check_rows,
    check_sampling,
    check_stream,
    check_tensor,
    inputs_of_rows,
    new_output,
    new_row_output,
)
from .sampling import COLUMNS, RowStats, Sampling


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
    inputs = inputs_of_rows(probs, seed, offset)
    check_call(inputs, ("probs", "probs"))
    if torch.compiler.is_compiling():
        raise ValueError("draw is not taken while torch.compile traces: call sample on logits, or draw outside of it")
    if out is None:
        out = new_output(inputs)
    else:
        check_output(out, inputs)
    check_device(probs.device, *inputs.tensors, out.token_ids, out.num_accepted, out.valid, scratch)
    return backends.run(inputs, out, scratch, backend)


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
        scratch: `new_scratch(B, V, device, entropy=entropy)`, needed under a CUDA graph; None: kept here.
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
    drawn: Any = None
    room = None if out is None else SampleOutput(drawn, drawn, out)
    return _run(RowInputs(logits, Sampling() if sampling is None else sampling, entropy), room, scratch, backend).stats


def _run(inputs, out, scratch, backend) -> SampleOutput:
    logits, draws = inputs.logits, inputs.seed is not None
    B = len(logits)
    check_sampling("sampling", inputs.sampling, B)
    if torch.compiler.is_compiling() and draws:
        if out is not None or scratch is not None:
            raise ValueError("out and scratch are not taken while torch.compile traces: it plans memory itself")
        ids, probs, packed = ops.call_sample(inputs, backend)
        return SampleOutput(ids, probs, RowStats(packed))
    if out is None:
        out = new_row_output(inputs)
    else:
        if not isinstance(out, SampleOutput):
            raise TypeError(f"out must be a SampleOutput, got {type(out).__name__}")
        if draws:
            check_tensor("out.token_ids", out.token_ids, 1, (torch.int64,), (B,))
            check_tensor("out.probs", out.probs, 1, (torch.float32,), (B,))
        check_tensor("out.stats.packed", out.stats.packed, 2, (torch.float32,), (B, COLUMNS))
    given = inputs.seed, inputs.offset, *inputs.sampling.settings()
    check_device(logits.device, *given, out.token_ids, out.probs, out.stats.packed, scratch)
    return backends.run_rows(inputs, out, scratch, backend)
