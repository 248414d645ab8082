"""Working memory of launches: the caller's, or one kept for each device and stream."""

from dataclasses import dataclass

import torch

from .. import definition, sampling

_scratch = {}  # the private one of each (device, stream)


@dataclass(frozen=True)
class Scratch:
    """Working memory of launches. One at a time may use it; after a launch that raised, make it anew.

    Attributes:
        zeros: int64, 0 between launches.
        words: fp32, what blocks tell each other.
        stats: fp32, statistics of rows on the way to verification.
    """

    zeros: torch.Tensor
    words: torch.Tensor
    stats: torch.Tensor


def new_scratch(batch_size, vocab_size, device, rows=1, entropy=False) -> Scratch:
    """Working memory for calls of up to `batch_size` requests, needed under a CUDA graph only; one call at a time may use it.

    Args:
        vocab_size: the larger of both vocabularies.
        rows: of logits for each request: 1 for `sample` and `row_stats`, 2 m + 1 for `verify_from_logits`; `verify` and `draw`
            read none.
        entropy: whether `sample` or `row_stats` is asked for it.
    """
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
            raise TypeError(f"scratch must be new_scratch(...), got {type(scratch).__name__}")
        if not _fits(scratch, needs):
            raise ValueError(f"scratch is too small: make it with new_scratch and at least {needs}")
        return run(scratch)
    owner = device, None
    if device.type != "cpu":
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("a CUDA graph needs scratch of its own: pass scratch=new_scratch(...)")
        owner = device, torch.cuda.current_stream(device).cuda_stream
    own = _scratch.pop(owner, None)
    if own is None or not _fits(own, needs):
        own = new_scratch(**needs, device=device)
    run(own)
    _scratch[owner] = own  # after a launch that raised its words may be left anyhow


def _fits(scratch, needs):
    count = needs["batch_size"] * needs["rows"]
    words = count * (3 if needs["entropy"] else 2) * definition.num_chunks(needs["vocab_size"])
    sizes = (2 * needs["batch_size"] + count, words, count * sampling.COLUMNS)
    tensors = (scratch.zeros, scratch.words, scratch.stats)
    return all(t.numel() >= n for t, n in zip(tensors, sizes, strict=True))
