"""Which side runs: the one place that knows both."""

from dataclasses import replace
from functools import partial

from . import coupled
from .contract import (
    Inputs,
    RowInputs,
    SampleOutput,
    VerifyOutput,
    inputs_of_rows,
    new_output,
    new_row_output,
)
from .host import block as host_block
from .host import draw as host_draw
from .host import verify as host_verify


def choose_backend(backend, device) -> str:
    """Which backend, "torch" or "triton", runs on a device. Raises RuntimeError where the one asked for cannot be had."""
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend must be 'triton', 'torch' or None, got {backend!r}")
    if backend == "torch" or (backend is None and device.type != "cuda"):
        return "torch"
    try:
        from .kernels import race  # noqa: PLC0415 (triton is optional)
    except ImportError as error:
        raise RuntimeError("triton is not installed: install it, or pass backend='torch'") from error
    if device.type == "cpu" and not race.INTERPRETED:
        raise RuntimeError(
            "backend='triton' runs on CPU tensors only in the interpreter: set TRITON_INTERPRET=1 before importing "
            "triton, or pass backend='torch'"
        )
    return "triton"


def run(inputs: Inputs, out: VerifyOutput, scratch, backend) -> VerifyOutput:
    """Verify checked `Inputs`, to `out`. Raises RuntimeError where the backend asked for cannot be had."""
    chosen = choose_backend(backend, inputs.device)
    if not inputs.batch_size:
        return out
    if out.spent is not None and inputs.budget is not None and inputs.rule.lossless:
        out.spent.zero_()
        inputs = replace(inputs, budget=None)
    if inputs.rule.whole_draft is not None:
        WHOLE_DRAFT[inputs.rule.whole_draft](inputs, out, scratch, chosen)
    elif chosen == "torch":
        host_verify.verify(inputs, out, scratch)
    else:
        from .kernels import verify  # noqa: PLC0415 (triton is optional)

        verify.verify(inputs, out, scratch)
    return out


def run_rows(inputs: RowInputs, out: SampleOutput, scratch, backend) -> SampleOutput:
    """The statistics of checked `RowInputs`, to `out`, and a draw if they have a seed. Raises RuntimeError as `run`."""
    chosen = choose_backend(backend, inputs.logits.device)
    if not len(inputs.logits):
        return out
    if chosen == "torch":
        host_draw.row_stats(inputs, out, scratch)
    else:
        from .kernels import rows  # noqa: PLC0415 (triton is optional)

        rows.row_stats(inputs, out, scratch)
    return out


def _draw(rows, seed, offset, sampling, scratch, backend):
    """A token of each row of probabilities, or of logits with their `Sampling`: int64 [R], -1 where a row is bad."""
    if sampling is None:
        inputs = inputs_of_rows(rows, seed, offset)
        return run(inputs, new_output(inputs), scratch, backend).token_ids[:, 0]
    row_inputs = RowInputs(rows, sampling, False, seed, offset)
    return run_rows(row_inputs, new_row_output(row_inputs), scratch, backend).token_ids


def _coupled(inputs, out, scratch, backend):
    coupled.verify(inputs, out, partial(_draw, scratch=scratch, backend=backend))


def _block(inputs, out, scratch, backend):
    if backend == "torch":
        host_block.verify(inputs, out)
    else:
        from .kernels import block  # noqa: PLC0415 (triton is optional)

        block.verify(inputs, out, scratch)


# How drafts are verified that a rule judges as a whole, by `Rule.whole_draft`.
WHOLE_DRAFT = {"block": _block, "coupled": _coupled}
