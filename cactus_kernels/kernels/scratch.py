"""Working memory of launches: the caller's, or one kept for each device and stream."""

from dataclasses import dataclass

import torch

from .. import definition, sampling

_scratch = {}  # of launches over logits, by (device, stream)


@dataclass(frozen=True)
class Scratch:
    """Working memory of launches over logits. One at a time may use it; after a launch that raised, make it anew.

    Attributes:
        zeros: int64, 0 between launches.
        words: fp32, what blocks tell each other.
        stats: fp32, statistics of rows on the way to verification.
    """

    zeros: torch.Tensor
    words: torch.Tensor
    stats: torch.Tensor


def new_scratch(batch_size, vocab_size, device, rows=1, entropy=False) -> Scratch:
    """Scratch for `batch_size` requests of up to `rows` rows each: 1 for `sample`, 2 m + 1 for `verify_from_logits`."""
    count = batch_size * rows
    words = count * (3 if entropy else 2) * definition.num_chunks(vocab_size)
    return Scratch(
        torch.zeros(2 * batch_size + count, dtype=torch.int64, device=device),
        torch.empty(words, dtype=torch.float32, device=device),
        torch.empty(count * sampling.COLUMNS, dtype=torch.float32, device=device),
    )


def with_scratch(scratch, device, needs, run):
    """Call `run(scratch)` with the caller's scratch, or with one kept for the device and its stream.

    needs: arguments of `new_scratch` but for the device, which a scratch has to be large enough for.
    """
    if scratch is not None:
        if not isinstance(scratch, Scratch):
            raise TypeError(f"scratch must be kernels.scratch.new_scratch(...), got {type(scratch).__name__}")
        if not _fits(scratch, needs):
            raise ValueError(f"scratch is too small: make it with kernels.scratch.new_scratch and at least {needs}")
        return run(scratch)
    with_own(
        _scratch, device, lambda own: _fits(own, needs), lambda: new_scratch(**needs, device=device), run,
        "kernels.scratch.new_scratch(...)",
    )  # fmt: skip


def with_own(kept, device, fits, make, run, how):
    """Call `run(scratch)` with what is kept for a device and its stream, or with new scratch; not kept if it raises.

    kept: dict by device and stream. fits: whether what is there will do. how: what a caller makes it with.
    """
    owner = device, None
    if device.type != "cpu":
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"a CUDA graph needs scratch of its own: pass scratch={how}")
        owner = device, torch.cuda.current_stream(device).cuda_stream
    scratch = kept.pop(owner, None)
    if scratch is None or not fits(scratch):
        scratch = make()
    run(scratch)
    kept[owner] = scratch  # after a launch that raised its words may be left anyhow


def _fits(scratch, needs):
    count = needs["batch_size"] * needs["rows"]
    words = count * (3 if needs["entropy"] else 2) * definition.num_chunks(needs["vocab_size"])
    sizes = (2 * needs["batch_size"] + count, words, count * sampling.COLUMNS)
    tensors = (scratch.zeros, scratch.words, scratch.stats)
    return all(t.numel() >= n for t, n in zip(tensors, sizes, strict=True))
