"""What a call holds and what comes back, and the checks of shapes, dtypes and devices before any work."""

from dataclasses import dataclass
from typing import Any

import torch

from .definition import DRAFT_CHUNK, DRAFT_TOKEN, PICK_CHUNK, PICK_TOKEN
from .rules import Rule, SpS
from .sampling import RowStats, Sampling

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Probs:
    """Rows of probabilities [..., V], fp32, bf16 or fp16."""

    values: torch.Tensor


@dataclass(frozen=True)
class Logits:
    """Rows of logits [..., V], and what makes them distributions.

    by: a `Sampling` of all requests; or the `RowStats` [...] that were made of these rows before.
    """

    values: torch.Tensor
    by: Sampling | RowStats

    @property
    def sampling(self) -> Sampling | None:
        return self.by if isinstance(self.by, Sampling) else None

    @property
    def stats(self) -> torch.Tensor | None:
        """fp32 [..., 8]."""
        return self.by.packed if isinstance(self.by, RowStats) else None


Rows = Probs | Logits


@dataclass(frozen=True)
class Inputs:
    """One checked batch, padded ([B, ...] tensors, `cu_draft_tokens` None) or flat. Shapes are those of `verify`.

    target: `Probs`, or `Logits` by a `Sampling`. draft: None where drafts are one-hot.
    """

    target: Rows
    draft: Rows | None
    draft_token_ids: torch.Tensor
    rule: Rule
    seed: int | torch.Tensor
    offset: int | torch.Tensor
    cu_draft_tokens: torch.Tensor | None
    max_draft_tokens: int
    batch_size: int
    purposes: tuple = (PICK_CHUNK, PICK_TOKEN)
    bonus_token_ids: torch.Tensor | None = None  # [B]: then the target has no bonus rows
    budget: torch.Tensor | None = None  # float64 [B]: nats that are left of a sequence's budget
    row_map: torch.Tensor | None = None  # [B]: then draft rows are [slots, K, V], those of request b in slot row_map[b]

    @property
    def tensors(self):
        """Everything that has to be on the target's device, other things among it."""
        rows: list[Any] = []
        for x in (self.target, self.draft):
            if x is not None:
                rows.append(x.values)
            if isinstance(x, Logits):
                rows += [x.by.packed] if isinstance(x.by, RowStats) else x.by.settings()
        others = (self.draft_token_ids, self.cu_draft_tokens, self.bonus_token_ids, self.row_map, self.budget)
        return (*rows, *others, self.seed, self.offset, *self.rule.strengths)

    @property
    def device(self):
        return self.target.values.device

    @property
    def vocab_size(self):
        return self.target.values.shape[-1]

    @property
    def draft_vocab_size(self):
        return self.vocab_size if self.draft is None else self.draft.values.shape[-1]


@dataclass(frozen=True)
class VerifyOutput:
    """What verification decided.

    Attributes:
        token_ids: [B, max_draft_tokens + 1], dtype of the draft ids: the accepted tokens, one recovered or bonus token,
            then -1. The tokens emitted are those >= 0.
        num_accepted: int32 [B], drafted tokens accepted.
        valid: bool [B], False where a value that counts was bad; such a request emits only what it accepted before.
        spent: float64 [B], nats that the accepted tokens spent of a budget; None without one.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    valid: torch.Tensor
    spent: torch.Tensor | None = None

    def raise_if_invalid(self) -> None:
        """Raise ValueError naming the invalid requests. Waits for the device."""
        if not self.valid.all():
            requests = (~self.valid).nonzero().squeeze(1).tolist()
            at = self.num_accepted[requests].tolist()
            raise ValueError(
                f"bad values in requests {requests} at drafted positions {at}: probabilities must be finite, in [0, 1] "
                "and not all 0, ids inside the vocabulary, strengths finite and >= 0, prefix sums in order"
            )


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


def check_call(inputs, names) -> None:
    """Check all but devices of `Inputs`. Raises TypeError, ValueError.

    names: what the caller calls the target's and the draft's rows.
    """
    _check_shapes(inputs, names)
    B = inputs.batch_size
    for name, value in (("seed", inputs.seed), ("offset", inputs.offset)):
        check_stream(name, value, B)
    for name, rows in (("sampling", inputs.target), ("draft_sampling", inputs.draft)):
        if isinstance(rows, Logits) and not isinstance(rows.by, RowStats):
            check_sampling(name, rows.by, B)
    if inputs.budget is not None:
        check_tensor("budget", inputs.budget, 1, (torch.float64,), (B,))
        check_budget(inputs.rule)
    for strength in inputs.rule.strengths:
        if isinstance(strength, torch.Tensor):
            check_tensor(f"the strength of {inputs.rule.name}", strength, 1, (torch.float32,), (B,))


def new_output(inputs) -> VerifyOutput:
    """Room for what `Inputs` come to."""
    device, B, m = inputs.device, inputs.batch_size, inputs.max_draft_tokens
    return VerifyOutput(
        torch.empty((B, m + 1), dtype=inputs.draft_token_ids.dtype, device=device),
        torch.empty(B, dtype=torch.int32, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        None if inputs.budget is None else torch.empty(B, dtype=torch.float64, device=device),
    )


def new_row_output(inputs) -> SampleOutput:
    """Room for what `RowInputs` come to: without a seed for statistics alone, token_ids and probs None."""
    B, device = len(inputs.logits), inputs.logits.device
    ids: Any = None
    probs: Any = None
    if inputs.seed is not None:
        ids = torch.empty(B, dtype=torch.int64, device=device)
        probs = torch.empty(B, dtype=torch.float32, device=device)
    return SampleOutput(ids, probs, RowStats.empty(B, device=device))


def check_output(out, inputs) -> None:
    """The room that a caller gives. Raises TypeError, ValueError."""
    B, m = inputs.batch_size, inputs.max_draft_tokens
    if not isinstance(out, VerifyOutput):
        raise TypeError(f"out must be a VerifyOutput, got {type(out).__name__}")
    check_tensor("out.token_ids", out.token_ids, 2, (inputs.draft_token_ids.dtype,), (B, m + 1))
    check_tensor("out.num_accepted", out.num_accepted, 1, (torch.int32,), (B,))
    check_tensor("out.valid", out.valid, 1, (torch.bool,), (B,))
    if inputs.budget is not None:
        check_tensor("out.spent", out.spent, 1, (torch.float64,), (B,))


def _check_shapes(inputs, names):
    """The rows, and what belongs to them, against the drafted tokens."""
    flat, B, m = inputs.cu_draft_tokens is not None, inputs.batch_size, inputs.max_draft_tokens
    tokens = inputs.draft_token_ids
    has_bonus = inputs.bonus_token_ids is None
    if not has_bonus:
        check_tensor("bonus_token_ids", inputs.bonus_token_ids, 1, INDEX_DTYPES, (B,))
    shapes: list[tuple | None] = (
        [(len(tokens) + B * has_bonus,), (len(tokens),)] if flat else [(B, m + has_bonus), (B, m)]
    )
    if inputs.row_map is not None:
        check_tensor("row_map", inputs.row_map, 1, INDEX_DTYPES, (B,))
        shapes[1] = None
    for name, given, expected in zip(names, (inputs.target, inputs.draft), shapes, strict=True):
        if given is None:
            continue
        rows = given.values
        check_rows(name, rows, 2 if flat and expected else 3)
        shape = tuple(rows.shape[:-1])
        if expected is None and (shape[1] < m or not shape[0]):
            raise ValueError(f"{name} must have shape [slots, at least {m}, V] beside row_map, got {tuple(rows.shape)}")
        if expected is not None and shape != expected:
            wanted = ", ".join(map(str, expected))
            raise ValueError(
                f"{name} must have shape [{wanted}, V] beside draft_token_ids of shape {tuple(tokens.shape)}, "
                f"got {tuple(rows.shape)}"
            )
    if isinstance(inputs.draft, Logits) and isinstance(inputs.draft.by, RowStats):
        stats, rows = inputs.draft.by.packed, inputs.draft.values
        if stats.shape[:-1] != rows.shape[:-1]:
            raise ValueError(f"draft_stats must be those of {names[1]} {tuple(rows.shape)}, got {tuple(stats.shape)}")


def inputs_of_rows(probs, seed, offset) -> Inputs:
    """A draw from each row of probabilities [B, V], as a verification without drafts and with random words of its own."""
    return Inputs(
        target=Probs(probs[:, None]),
        draft=None,
        draft_token_ids=torch.empty((len(probs), 0), dtype=torch.int64, device=probs.device),
        rule=SpS(),
        seed=seed,
        offset=offset,
        cu_draft_tokens=None,
        max_draft_tokens=0,
        batch_size=len(probs),
        purposes=(DRAFT_CHUNK, DRAFT_TOKEN),
    )
