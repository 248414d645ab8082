"""Fuzzed cases for `verify`, and backends compared on them bit for bit. For the tests and `cactus-kernels check`."""

import inspect
import random
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType

import torch

from . import row_statistics
from .rules import AdaptiveCactus, Cactus, Capped, Coupled, Interpolation, Mentored, Optimal, Rule, SpS, TopK, Typical
from .verify import VerifyOutput, verify

# Around the chunk of 1024 tokens, and one size of many chunks, which costs most: rarely.
VOCAB_SIZES = {1: 2, 2: 2, 7: 3, 1023: 3, 1024: 3, 1025: 4, 2049: 3, 32000: 0.4}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DELTAS = (0.0, 1e-30, 1e-3, 0.05, 0.5, 1.0, 30.0, 3e38)
STRENGTHS = (
    (Cactus, DELTAS),
    (Cactus, DELTAS),
    (partial(Cactus, divergence="kl"), DELTAS),
    (AdaptiveCactus, DELTAS),
    (partial(AdaptiveCactus, spend="uncertain"), DELTAS),
    (Capped, (1.0, 1.0000001, 1.5, 4.0, 3e38)),
    (Interpolation, (0.0, 1e-30, 0.3, 0.9, 1.0)),
    (Typical, (0.0, 1e-6, 0.09, 0.5, 1.0)),
    (lambda alpha: Typical(0.9, alpha), (0.0, 0.3, 0.99, 1.0)),
)
SOLVED = (  # slow in the interpreter: rarely
    (lambda cap: Optimal(cap=cap), (1.0, 1.0000001, 1.5, 4.0, 3e38)),
    (lambda price: Optimal(price=price), (1.0, 1.0000001, 1.5, 4.0, 1e30)),
    (Mentored, (0.0, 1e-6, 0.05, 1.0, 30.0)),
)
BAD_STRENGTHS = (float("nan"), float("inf"), -float("inf"), -1.0, -1e-30)
BAD_PROBS = (float("nan"), float("inf"), -float("inf"), -0.25, 1.02, 300.0)
ODD_PROBS = (-0.0, 1.0, 1.0078125, 1e-7, 6e-8)  # legal, and easily mistaken
STREAMS = (0, 1, 2**31 + 5, 2**32 - 1, 2**62 + 12345, -1, -(2**63), 2**63 - 1)
OFFSETS = (0, 1, 1000, 2**32 - 3, 2**40 - 2, 2**63 - 4, -2, -(2**63))
POISON = -77  # in outputs before a run: what is not written shows


def fuzz_case(seed):
    """Arguments of `verify` for one random batch, on the CPU: many shapes, layouts and dtypes, and often bad values."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    V = rng.choices(list(VOCAB_SIZES), VOCAB_SIZES.values())[0]
    B, m, flat = rng.choice((1, 1, 2, 2, 3, 5)), rng.choice((0, 1, 1, 2, 3, 4, 5, 8)), rng.random() < 0.6
    if V > 10_000:
        B = min(B, 2)
    lengths = [rng.randint(0, m) if flat else m for _ in range(B)]
    N = sum(lengths)
    V_draft = V if rng.random() < 0.7 else max(1, V + rng.choice((-1, 1, -5, 7, -V // 2, 1030)))

    # The rows of each request: target [N + B, V], draft [N, V_draft], drafted tokens [N].
    target = _rows(N + B, V, rng, generator)
    draft = _rows(N, V_draft, rng, generator)
    of_target = [sum(lengths[:b]) + b + j for b in range(B) for j in range(lengths[b])]
    width = min(V, V_draft)
    for i, k in enumerate(of_target):
        like = rng.random()
        if like < 0.15:  # no residual
            draft[i, :width] = target[k, :width]
        elif like < 0.25:  # p >= q everywhere
            draft[i, :width] = (target[k, :width] * 1.5 + 1e-3).clamp(max=1)
        elif like < 0.6:  # much alike, so that whole drafts are accepted
            draft[i, :width] = target[k, :width] * 0.8 + draft[i, :width] * 0.2
    one_hot = rng.random() < 0.2
    drawn_from = target[of_target] if one_hot else draft
    ids = torch.multinomial(drawn_from + 1e-12, 1, generator=generator).squeeze(1) if N else torch.zeros(0).long()
    if N and rng.random() < 0.3:
        ids[rng.randrange(N)] = rng.choice((-1, -1, -2, V - 1, V, V_draft, max(V, V_draft), 2**31 - 1, -(2**31)))
    drafted = dict(zip(of_target, ids.tolist(), strict=True))
    for rows, tokens, odds in ((target, drafted, 0.35), (draft, dict(enumerate(ids.tolist())), 0.15)):
        if len(rows) and rng.random() < odds:
            for _ in range(rng.randint(1, 3)):
                _spoil(rows, tokens, rng)

    ids = ids.to(rng.choice((torch.int32, torch.int64)))
    target, draft = target.to(rng.choice(DTYPES)), draft.to(rng.choice(DTYPES))
    if one_hot:
        draft = None
    case = {
        "rule": _rule(B, rng),
        "seed": rng.choice(STREAMS) if rng.random() < 0.5 else torch.tensor(rng.choices(STREAMS, k=B)),
        "offset": rng.choice(OFFSETS) if rng.random() < 0.5 else torch.tensor(rng.choices(OFFSETS, k=B)),
    }
    if flat:
        cu = [sum(lengths[:b]) for b in range(B + 1)]
        if rng.random() < 0.1:
            cu[rng.randrange(B + 1)] = rng.choice((-1, 0, N, N + 1, 2**31 - 1))
        case["cu_draft_tokens"] = torch.tensor(cu, dtype=rng.choice((torch.int32, torch.int64)))
        case["max_draft_tokens"] = max(lengths) + rng.choice((0, 0, 1))
    else:
        ids, target = ids.view(B, m), target.view(B, m + 1, V)
        draft = None if draft is None else draft.view(B, m, V_draft)
    if case["rule"].keeps_proportions and rng.random() < 0.3:
        budgets = torch.tensor(rng.choices((0.0, 1e-9, 1e-3, 0.1, 0.5, 2.0, 100.0), k=B), dtype=torch.float64)
        if rng.random() < 0.1:
            budgets[rng.randrange(B)] = rng.choice((-1.0, float("nan")))
        case["budget"] = budgets
    case["target_probs"] = _strided(target, rng)
    case["draft_probs"] = None if draft is None else _strided(draft, rng)
    case["draft_token_ids"] = ids if rng.random() < 0.7 else torch.stack([ids, ids], -1)[..., 0]
    return case


def parity(case, first=("torch", "cpu"), second=("triton", "cpu"), **options):
    """What differs between two (backend, device) on one case, in words, or None. `options` are for the second run."""
    expected = run_case(case, *first)
    got = run_case(case, *second, **options)
    for name in ("num_accepted", "valid", "token_ids", "spent"):
        a, b = getattr(expected, name), getattr(got, name)
        if a is None:
            continue
        a, b = a.cpu(), b.cpu()
        if not torch.equal(a, b):
            r = (a != b).reshape(len(a), -1).any(1).nonzero()[0].item()
            return (
                f"{name} of request {r}: {a[r].tolist()} by {' on '.join(first)}, {b[r].tolist()} by {' on '.join(second)}"
                f" ({describe(case)})"
            )
    return None


def check_rule(rule, *, distribution=True, cases=20, second=None) -> bool:
    """Check a rule of one's own: its body makes sense, and both backends give the same tokens, bit for bit.

    What a GPU refuses, such as a method of arrays, and what it computes otherwise, such as a plain division, shows on a GPU or
    in the interpreter alone.

    Args:
        rule: a `Rule` whose strengths are numbers.
        distribution: whether h_n and r(x) of the other tokens must sum to 1, as for SpS and Cactus. False for a rule that
            recovers from weights which are not its h off n, such as Capped.
        cases: fuzzed batches to compare on.
        second: (backend, device) to compare with torch on the CPU, such as ("triton", "cuda"); None: triton on a GPU where
            there is one, else in the interpreter where TRITON_INTERPRET=1 was set, else nothing is compared.

    Returns:
        Whether the backends were compared.

    Raises:
        TypeError: not a `Rule`, one without a name, strengths that are tensors, or a body that is no module-level function of
            (q, q_n, p_n, is_drafted, stat, *strengths).
        ValueError: what is wrong, with the values that show it.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be a Rule, got {type(rule).__name__}")
    if any(not isinstance(s, float) for s in rule.strengths):
        raise TypeError(f"check_rule takes a rule whose strengths are floats, got {rule.strengths}")
    if not isinstance(getattr(rule, "name", None), str):
        raise TypeError(f"{type(rule).__name__} must have a name, a str")
    _check_signature(rule)
    if rule.solved is None:
        _check_body(rule, distribution)
    if second is None:
        second = ("triton", "cuda") if torch.cuda.is_available() else ("triton", "cpu")
        if second[1] == "cpu" and not _interpreted():
            return False
    for seed in range(cases):
        case = {name: value for name, value in fuzz_case(seed).items() if name != "budget"} | {"rule": rule}
        difference = parity(case, second=second)
        if difference is not None:
            raise ValueError(f"the backends differ on fuzz_case({seed}): {difference}")
    return True


def _check_signature(rule):
    h, count = getattr(rule, "h", None), 5 + len(rule.strengths)
    if not isinstance(h, FunctionType) or h.__name__ == "<lambda>":
        raise TypeError(f"{rule.name}.h must be staticmethod(a function defined by def), got {h!r}")
    if h.__code__.co_argcount != count:
        raise TypeError(
            f"{rule.name}.h must take (q, q_n, p_n, is_drafted, stat, *strengths), {count} arguments with its "
            f"{len(rule.strengths)} strengths, got {inspect.signature(h)}"
        )


def _check_body(rule, distribution):
    generator = torch.Generator().manual_seed(0)
    for V in (1, 2, 5, 50):
        p, q = (3 * torch.randn(2, 30, V, generator=generator)).softmax(-1)
        q[:5] *= torch.rand(5, V, generator=generator) < 0.5
        stat = tuple(row_statistics.of_rows(name, q)[:, None] for name in rule.statistics) or None
        for n in range(V):
            q_n, p_n = q[:, n, None], p[:, n, None]
            h_n = rule.h(q_n, q_n, p_n, True, stat, *rule.strengths)
            r = rule.h(q, q_n, p_n, False, stat, *rule.strengths)
            rest = r.sum(1, keepdim=True) - r[:, n, None]
            wrong = {
                "h_n must be in [0, 1]": ~((h_n >= 0) & (h_n <= 1)),
                "r must be finite and >= 0": ~((r >= 0) & (r < float("inf"))).all(1, keepdim=True),
            }
            if distribution:
                # Where q holds nothing but n, or sums to less than 1, there is no h to give.
                whole = ((q.sum(1, keepdim=True) - 1).abs() < 1e-5) & (q_n < 1 - 1e-5)
                wrong["h_n and r of the other tokens must sum to 1"] = whole & ((h_n + rest - 1).abs() > 1e-4)
            for what, where in wrong.items():
                if where.any():
                    i = int(where.flatten().nonzero()[0])
                    raise ValueError(
                        f"{rule.name}: {what}, got h_n {h_n[i].item():g}, a sum of {rest[i].item():g} elsewhere, at "
                        f"q_n {q_n[i].item():g}, p_n {p_n[i].item():g}"
                    )


def _interpreted():
    try:
        from .race_triton import INTERPRETED
    except ImportError:
        return False
    return INTERPRETED


def run_case(case, backend, device="cpu", **options):
    """The `VerifyOutput` of one case on a device, written over poison."""
    case = {name: to_device(value, device) for name, value in case.items()}
    ids, cu = case["draft_token_ids"], case.get("cu_draft_tokens")
    B, width = (len(ids), ids.shape[1]) if cu is None else (len(cu) - 1, case["max_draft_tokens"])
    out = VerifyOutput(
        torch.full((B, width + 1), POISON, dtype=ids.dtype, device=device),
        torch.full((B,), POISON, dtype=torch.int32, device=device),
        torch.ones(B, dtype=torch.bool, device=device),
        torch.full((B,), POISON, dtype=torch.float64, device=device) if "budget" in case else None,
    )
    return verify(**case, out=out, backend=backend, **options)


def to_device(value, device):
    """A tensor on a device with the strides and the alignment it had, or a rule with its strength there."""
    if isinstance(value, Rule) and is_dataclass(value):
        return type(value)(*(to_device(getattr(value, field.name), device) for field in fields(value)))
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value.to(device) if isinstance(value, torch.Tensor) else value
    end = value.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((end,), (1,), 0).to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def describe(case):
    """One line on what a case is made of."""
    tensors = {k: case[k] for k in ("target_probs", "draft_probs", "draft_token_ids") if case[k] is not None}
    shapes = [f"{k} {str(v.dtype).removeprefix('torch.')} {list(v.shape)} {v.stride()}" for k, v in tensors.items()]
    return ", ".join([*shapes, f"rule {case['rule']}", f"seed {case['seed']}", f"offset {case['offset']}"])


def _rows(count, V, rng, generator):
    """Probability rows of different kinds, fp32 [count, V]."""
    rows = torch.empty(count, V)
    for row in rows:
        kind = rng.choice(("flat", "peaked", "sparse", "uniform", "few", "few", "certain"))
        row.copy_(torch.rand(V, generator=generator))
        if kind == "peaked":
            row.pow_(12)
        elif kind == "sparse":
            row.mul_(torch.rand(V, generator=generator) < 0.05)
        elif kind == "uniform":
            row.fill_(1)
        elif kind in ("few", "certain"):
            row.fill_(0)
        for _ in range(3 if kind == "few" else 1 if row.sum() == 0 else 0):
            row[rng.randrange(V)] = 0.1 + rng.random()
        row /= row.sum()
    return rows


def _spoil(rows, drafted, rng):
    """Overwrite an entry, or all of a row, with something bad or odd. drafted: {row: token}."""
    r, V = rng.randrange(len(rows)), rows.shape[1]
    n = min(max(drafted.get(r, 0), 0), V - 1)
    if rng.random() < 0.2:
        rows[r] = rng.choice((0.0, 0.0, float("nan")))
    else:
        rows[r, rng.choice((0, V - 1, rng.randrange(V), n, n))] = rng.choice(rng.choice((BAD_PROBS, ODD_PROBS)))


def _rule(B, rng):
    if rng.random() < 0.2:
        return SpS()
    if rng.random() < 0.05:
        return Coupled()
    if rng.random() < 0.1:
        return TopK(rng.choice((1, 2, 3, 10, 1000, 5000)))
    make, values = rng.choice(SOLVED if rng.random() < 0.05 else STRENGTHS)
    if rng.random() < 0.5:
        return make(rng.choice(values))
    values = rng.choices(values, k=B)
    if rng.random() < 0.3:
        values[rng.randrange(B)] = rng.choice(BAD_STRENGTHS)
    return make(torch.tensor(values))


def _strided(rows, rng):
    """The same rows, most of them with a stride of its own: padded, misaligned; or one row standing for all."""
    how = rng.choice(("as is", "as is", "padded to 16", "padded by 3", "misaligned", "expanded"))
    *lead, V = rows.shape
    if how == "as is" or rows.numel() == 0:
        return rows
    if how == "expanded":
        return rows.reshape(-1, V)[rng.randrange(rows.numel() // V)].expand(rows.shape)
    ahead = 1 if how == "misaligned" else 0
    width = -(-V // 16) * 16 if how == "padded to 16" else V + 3
    held = torch.full((*lead, ahead + width), float("nan"), dtype=rows.dtype)
    held[..., ahead : ahead + V] = rows
    return held[..., ahead : ahead + V]
