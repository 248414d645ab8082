"""Fuzzed cases for `verify`: random batches of many shapes, layouts and dtypes, often with bad values."""

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..rules import RULES, Rule

# Around the chunk of 1024 tokens, and one size of many chunks, which costs most: rarely.
VOCAB_SIZES = {1: 2, 2: 2, 7: 3, 1023: 3, 1024: 3, 1025: 4, 2049: 3, 32000: 0.4}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BAD_STRENGTHS = (float("nan"), float("inf"), -float("inf"), -1.0, -1e-30)
BAD_PROBS = (float("nan"), float("inf"), -float("inf"), -0.25, 1.02, 300.0)
ODD_PROBS = (-0.0, 1.0, 1.0078125, 1e-7, 6e-8)  # legal, and easily mistaken
STREAMS = (0, 1, 2**31 + 5, 2**32 - 1, 2**62 + 12345, -1, -(2**63), 2**63 - 1)
OFFSETS = (0, 1, 1000, 2**32 - 3, 2**40 - 2, 2**63 - 4, -2, -(2**63))
BUDGETS = (0.0, 1e-9, 1e-3, 0.1, 0.5, 2.0, 100.0)

Case = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Of a batch: drafted tokens of each request, at most m (all m unless flat), and the vocabularies."""

    lengths: list[int]
    m: int
    flat: bool
    V: int
    V_draft: int

    @property
    def B(self) -> int:
        return len(self.lengths)

    @property
    def N(self) -> int:
        return sum(self.lengths)

    @property
    def cu_draft_tokens(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    @property
    def rows_of_target(self) -> list[int]:
        """The row of the target [N + B, V] that stands beside each row of the draft [N, V_draft]."""
        starts = self.cu_draft_tokens
        return [starts[b] + b + j for b, length in enumerate(self.lengths) for j in range(length)]


def fuzz_case(seed: int) -> Case:
    """Arguments of `verify` for one random batch, on the CPU. The same for a seed, always: what fails is found again."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = _shape(rng)
    target = _rows(shape.N + shape.B, shape.V, rng, generator)
    draft = _rows(shape.N, shape.V_draft, rng, generator)
    _liken(target, draft, shape, rng)
    one_hot = rng.random() < 0.2
    ids = _drafted(target[shape.rows_of_target] if one_hot else draft, shape, rng, generator)
    tokens = ids.tolist()
    _spoil_some(target, dict(zip(shape.rows_of_target, tokens, strict=True)), 0.35, rng)
    _spoil_some(draft, dict(enumerate(tokens)), 0.15, rng)

    ids = ids.to(rng.choice((torch.int32, torch.int64)))
    target, draft = target.to(rng.choice(DTYPES)), draft.to(rng.choice(DTYPES))
    case: Case = {"rule": _rule(shape.B, rng), "seed": _stream(STREAMS, shape.B, rng)}
    case["offset"] = _stream(OFFSETS, shape.B, rng)
    if shape.flat:
        case |= _sums(shape, rng)
    else:
        ids, target = ids.view(shape.B, shape.m), target.view(shape.B, shape.m + 1, shape.V)
        draft = draft.view(shape.B, shape.m, shape.V_draft)
    if case["rule"].keeps_proportions and rng.random() < 0.3:
        case["budget"] = _budget(shape.B, rng)
    case["target_probs"] = _strided(target, rng)
    case["draft_probs"] = None if one_hot else _strided(draft, rng)
    case["draft_token_ids"] = ids if rng.random() < 0.7 else torch.stack([ids, ids], -1)[..., 0]
    return case


def describe(case: Case) -> str:
    """One line on what a case is made of."""
    tensors = {k: case[k] for k in ("target_probs", "draft_probs", "draft_token_ids") if case[k] is not None}
    shapes = [f"{k} {str(v.dtype).removeprefix('torch.')} {list(v.shape)} {v.stride()}" for k, v in tensors.items()]
    return ", ".join([*shapes, f"rule {case['rule']}", f"seed {case['seed']}", f"offset {case['offset']}"])


def _shape(rng: random.Random) -> Shape:
    V = rng.choices(list(VOCAB_SIZES), list(VOCAB_SIZES.values()))[0]
    B, m, flat = rng.choice((1, 1, 2, 2, 3, 5)), rng.choice((0, 1, 1, 2, 3, 4, 5, 8)), rng.random() < 0.6
    if V > 10_000:
        B = min(B, 2)
    lengths = [rng.randint(0, m) if flat else m for _ in range(B)]
    V_draft = V if rng.random() < 0.7 else max(1, V + rng.choice((-1, 1, -5, 7, -V // 2, 1030)))
    return Shape(lengths, m, flat, V, V_draft)


def _rows(count: int, V: int, rng: random.Random, generator: torch.Generator) -> torch.Tensor:
    """Probability rows of different kinds, fp32 [count, V]."""
    rows = torch.empty((count, V), dtype=torch.float32, device="cpu")
    for row in rows:
        kind = rng.choice(("flat", "peaked", "sparse", "uniform", "few", "few", "certain"))
        row.copy_(torch.rand(V, generator=generator, dtype=torch.float32, device="cpu"))
        if kind == "peaked":
            row.pow_(12)
        elif kind == "sparse":
            row.mul_(torch.rand(V, generator=generator, dtype=torch.float32, device="cpu") < 0.05)
        elif kind == "uniform":
            row.fill_(1)
        elif kind in ("few", "certain"):
            row.fill_(0)
        for _ in range(3 if kind == "few" else 1 if row.sum() == 0 else 0):
            row[rng.randrange(V)] = 0.1 + rng.random()
        row /= row.sum()
    return rows


def _liken(target: torch.Tensor, draft: torch.Tensor, shape: Shape, rng: random.Random) -> None:
    """Make some rows of the draft like those of the target beside them."""
    width = min(shape.V, shape.V_draft)
    for i, k in enumerate(shape.rows_of_target):
        like = rng.random()
        if like < 0.15:  # no residual
            draft[i, :width] = target[k, :width]
        elif like < 0.25:  # p >= q everywhere
            draft[i, :width] = (target[k, :width] * 1.5 + 1e-3).clamp(max=1)
        elif like < 0.6:  # much alike, so that whole drafts are accepted
            draft[i, :width] = target[k, :width] * 0.8 + draft[i, :width] * 0.2


def _drafted(drawn_from: torch.Tensor, shape: Shape, rng: random.Random, generator: torch.Generator) -> torch.Tensor:
    """Drafted tokens int64 [N], one of them at times outside the vocabulary."""
    if not shape.N:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    V, V_draft = shape.V, shape.V_draft
    ids = torch.multinomial(drawn_from + 1e-12, 1, generator=generator).squeeze(1)
    if rng.random() < 0.3:
        ids[rng.randrange(shape.N)] = rng.choice((-1, -1, -2, V - 1, V, V_draft, max(V, V_draft), 2**31 - 1, -(2**31)))
    return ids


def _spoil_some(rows: torch.Tensor, drafted: dict[int, int], odds: float, rng: random.Random) -> None:
    if len(rows) and rng.random() < odds:
        for _ in range(rng.randint(1, 3)):
            _spoil(rows, drafted, rng)


def _spoil(rows: torch.Tensor, drafted: dict[int, int], rng: random.Random) -> None:
    """Overwrite an entry, or all of a row, with something bad or odd. drafted: {row: token}."""
    r, V = rng.randrange(len(rows)), rows.shape[1]
    n = min(max(drafted.get(r, 0), 0), V - 1)
    if rng.random() < 0.2:
        rows[r] = rng.choice((0.0, 0.0, float("nan")))
    else:
        rows[r, rng.choice((0, V - 1, rng.randrange(V), n, n))] = rng.choice(rng.choice((BAD_PROBS, ODD_PROBS)))


def _stream(values: tuple[int, ...], B: int, rng: random.Random) -> int | torch.Tensor:
    return (
        rng.choice(values)
        if rng.random() < 0.5
        else torch.tensor(rng.choices(values, k=B), dtype=torch.int64, device="cpu")
    )


def _sums(shape: Shape, rng: random.Random) -> Case:
    """Prefix sums of the lengths, one of them wrong at times, and the most drafted tokens."""
    cu = shape.cu_draft_tokens
    if rng.random() < 0.1:
        cu[rng.randrange(shape.B + 1)] = rng.choice((-1, 0, shape.N, shape.N + 1, 2**31 - 1))
    sums = torch.tensor(cu, dtype=rng.choice((torch.int32, torch.int64)), device="cpu")
    return {"cu_draft_tokens": sums, "max_draft_tokens": max(shape.lengths) + rng.choice((0, 0, 1))}


def _budget(B: int, rng: random.Random) -> torch.Tensor:
    budgets = torch.tensor(rng.choices(BUDGETS, k=B), dtype=torch.float64, device="cpu")
    if rng.random() < 0.1:
        budgets[rng.randrange(B)] = rng.choice((-1.0, float("nan")))
    return budgets


def _rule(B: int, rng: random.Random) -> Rule:
    named = rng.choices(list(RULES.values()), [_odds(rule.default) for rule in RULES.values()])[0]
    strengths = {name: rng.choice(values) for name, values in named.fuzzed.items()}
    # Some rules count something: an int is never one for each request.
    per_request = [name for name, value in strengths.items() if isinstance(value, float)]
    if per_request and rng.random() < 0.5:
        name = rng.choice(per_request)
        of_requests = [x for x in rng.choices(named.fuzzed[name], k=2 * B) if x is not None] or [strengths[name]]
        of_requests = (of_requests * B)[:B]
        if rng.random() < 0.3:
            of_requests[rng.randrange(B)] = rng.choice(BAD_STRENGTHS)
        strengths[name] = torch.tensor(of_requests, dtype=torch.float32, device="cpu")
    return named.make(**strengths)


def _odds(rule: Rule) -> float:
    """How often a rule is fuzzed: what is solved is slow in the interpreter."""
    return 0.15 if rule.solves else 0.5 if rule.whole_draft else 1.0


def _strided(rows: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same rows, most of them with a stride of its own: padded, misaligned; or one row standing for all."""
    how = rng.choice(("as is", "as is", "padded to 16", "padded by 3", "misaligned", "expanded"))
    *lead, V = rows.shape
    if how == "as is" or rows.numel() == 0:
        return rows
    if how == "expanded":
        return rows.reshape(-1, V)[rng.randrange(rows.numel() // V)].expand(rows.shape)
    ahead = 1 if how == "misaligned" else 0
    width = -(-V // 16) * 16 if how == "padded to 16" else V + 3
    held = torch.full((*lead, ahead + width), float("nan"), dtype=rows.dtype, device=rows.device)
    held[..., ahead : ahead + V] = rows
    return held[..., ahead : ahead + V]
