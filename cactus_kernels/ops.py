"""`verify`, `verify_from_logits` and `sample` as operators of torch, so that `torch.compile(fullgraph=True)` takes them.

They are custom operators, not Triton ones: the same call runs without Triton on a CPU, and the kernels take a rule's function
and tuples of tensors and numbers. The public functions call them by themselves while they are being compiled.
"""

import torch

from . import backends
from .contract import Inputs, Logits, Probs, RowInputs, new_output, new_row_output
from .rules import passed_on, rebuild
from .sampling import COLUMNS, SETTINGS, RowStats, Sampling


def _split(values):
    """Numbers and tensors apart, as the schema of an operator takes them."""
    tensors = [v if isinstance(v, torch.Tensor) else None for v in values]
    return tensors, [0.0 if isinstance(v, torch.Tensor) else float(v) for v in values]


def _joined(tensors, numbers):
    return [n if t is None else t for t, n in zip(tensors, numbers, strict=True)]


def _stream(value):
    return (value, 0) if isinstance(value, torch.Tensor) else (None, value)


def _sampling(tensors, numbers):
    if not numbers:
        return None
    values = dict(zip(SETTINGS, _joined(tensors, numbers), strict=True))
    if not isinstance(values["top_k"], torch.Tensor):
        values["top_k"] = int(values["top_k"])
    return Sampling(**values)


def _settings(sampling):
    return ([], []) if sampling is None else _split([getattr(sampling, name) for name in SETTINGS])


def _rows(values, sampling, stats=None):
    """Rows from what an operator takes of them."""
    if values is None:
        return None
    by = sampling if stats is None else RowStats(stats)
    return Probs(values) if by is None else Logits(values, by)


def _parts(rows):
    """The same the other way round: values, sampling, statistics."""
    if isinstance(rows, Logits):
        return rows.values, rows.sampling, rows.stats
    return None if rows is None else rows.values, None, None


@torch.library.custom_op("cactus_kernels::verify", mutates_args=())
def verify_op(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    rule: str,
    strengths: list[torch.Tensor | None],
    strength_numbers: list[float],
    seed: torch.Tensor | None,
    seed_number: int,
    offset: torch.Tensor | None,
    offset_number: int,
    cu_draft_tokens: torch.Tensor | None,
    max_draft_tokens: int,
    batch_size: int,
    sampling: list[torch.Tensor | None],
    sampling_numbers: list[float],
    draft_sampling: list[torch.Tensor | None],
    draft_sampling_numbers: list[float],
    draft_stats: torch.Tensor | None,
    bonus_token_ids: torch.Tensor | None,
    row_map: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_target, of_draft = _sampling(sampling, sampling_numbers), _sampling(draft_sampling, draft_sampling_numbers)
    inputs = Inputs(
        _rows(target, of_target), _rows(draft, of_draft, draft_stats), draft_token_ids,
        rebuild(rule, _joined(strengths, strength_numbers)),
        seed_number if seed is None else seed, offset_number if offset is None else offset, cu_draft_tokens,
        max_draft_tokens, batch_size, bonus_token_ids=bonus_token_ids, row_map=row_map,
    )  # fmt: skip
    out = backends.run(inputs, new_output(inputs), None, backend or None)
    return out.token_ids, out.num_accepted, out.valid


@verify_op.register_fake
def _(target, draft, draft_token_ids, *args):
    max_draft_tokens, batch_size = args[8], args[9]
    return (
        draft_token_ids.new_empty((batch_size, max_draft_tokens + 1)),
        draft_token_ids.new_empty(batch_size, dtype=torch.int32),
        draft_token_ids.new_empty(batch_size, dtype=torch.bool),
    )


def call_verify(inputs, backend):
    """The operator on checked `Inputs`: token_ids, num_accepted, valid."""
    target, sampling, _ = _parts(inputs.target)
    draft, draft_sampling, draft_stats = _parts(inputs.draft)
    return verify_op(
        target, draft, inputs.draft_token_ids, passed_on(inputs.rule), *_split(inputs.rule.strengths),
        *_stream(inputs.seed), *_stream(inputs.offset), inputs.cu_draft_tokens, inputs.max_draft_tokens,
        inputs.batch_size, *_settings(sampling), *_settings(draft_sampling), draft_stats,
        inputs.bonus_token_ids, inputs.row_map, backend or "",
    )  # fmt: skip


@torch.library.custom_op("cactus_kernels::sample", mutates_args=())
def sample_op(
    logits: torch.Tensor,
    seed: torch.Tensor | None,
    seed_number: int,
    offset: torch.Tensor | None,
    offset_number: int,
    sampling: list[torch.Tensor | None],
    sampling_numbers: list[float],
    entropy: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = RowInputs(
        logits, _sampling(sampling, sampling_numbers), entropy, seed_number if seed is None else seed,
        offset_number if offset is None else offset,
    )  # fmt: skip
    out = backends.run_rows(inputs, new_row_output(inputs), None, backend or None)
    return out.token_ids, out.probs, out.stats.packed


@sample_op.register_fake
def _(logits, *args):
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty((rows, COLUMNS), dtype=torch.float32),
    )


def call_sample(inputs, backend):
    """The operator on checked `RowInputs`: token_ids, probs, packed statistics."""
    return sample_op(
        inputs.logits, *_stream(inputs.seed), *_stream(inputs.offset), *_settings(inputs.sampling), inputs.entropy,
        backend or "",
    )  # fmt: skip
