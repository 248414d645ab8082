"""Cases of `verify` and `draw` from probabilities whose outputs are recorded: a change can show that it changes no token."""

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import torch

from cactus_kernels import (
    AdaptiveCactus,
    Block,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Mentored,
    Optimal,
    Rule,
    SpS,
    TopK,
    Typical,
    VerifyOutput,
    draw,
)
from cactus_kernels.testing import parity
from cactus_kernels.testing.fuzz import Case

from .exact_rows import beside, rows, tables

RECORDING = Path(__file__).parents[1] / "data" / "recorded_tokens.json"
SIZES = (7, 1030, 2051)  # of one chunk of the race, two, three
LENGTHS = {"padded": (3, 3, 3), "flat": (3, 0, 2)}  # drafted tokens of each request
B = 3
NAN, INF = float("nan"), float("inf")


def requests(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A setting of each request [B]."""
    return torch.tensor(values, dtype=dtype, device="cpu")


# Every rule, with its strength as a number and by request.
RULES: dict[str, Callable[[], Rule]] = {
    "SpS": SpS,
    "Cactus number": lambda: Cactus(0.5),
    "Cactus requests": lambda: Cactus(requests(0.0, 0.05, 1.0)),
    "Cactus kl number": lambda: Cactus(0.5, "kl"),
    "Cactus kl requests": lambda: Cactus(requests(0.0, 0.05, 1.0), "kl"),
    "AdaptiveCactus certain number": lambda: AdaptiveCactus(1.0),
    "AdaptiveCactus certain requests": lambda: AdaptiveCactus(requests(0.1, 1.0, 3e38)),
    "AdaptiveCactus uncertain number": lambda: AdaptiveCactus(1.0, "uncertain"),
    "AdaptiveCactus uncertain requests": lambda: AdaptiveCactus(requests(0.1, 1.0, 30.0), "uncertain"),
    "Capped number": lambda: Capped(1.5),
    "Capped requests": lambda: Capped(requests(0.5, 1.25, 4.0)),
    "Interpolation number": lambda: Interpolation(0.5),
    "Interpolation requests": lambda: Interpolation(requests(0.9, 0.3, 2.0)),
    "Optimal cap number": lambda: Optimal(cap=1.25),
    "Optimal cap requests": lambda: Optimal(cap=requests(1.0, 1.5, 4.0)),
    "Optimal price number": lambda: Optimal(price=1.25),
    "Optimal price requests": lambda: Optimal(price=requests(1.0, 1.5, 4.0)),
    "Mentored number": lambda: Mentored(0.05),
    "Mentored requests": lambda: Mentored(requests(0.0, 0.01, 0.2)),
    "Typical number": lambda: Typical(0.09),
    "Typical requests": lambda: Typical(requests(0.001, 0.09, 0.5)),
    "Typical two numbers": lambda: Typical(0.3, 0.6),
    "Typical two of requests": lambda: Typical(requests(0.1, 0.3, 0.9), requests(0.05, 0.6, 2.0)),
    "Typical number and requests": lambda: Typical(0.3, requests(0.05, 0.6, 2.0)),
    "TopK 1": lambda: TopK(1),
    "TopK 5": lambda: TopK(5),
    "TopK 1000": lambda: TopK(1000),
    "Coupled": Coupled,
    "TopK 5 upstream": lambda: TopK(5, "upstream"),
    "Block": Block,
}
STREAMS = {  # seed and offset
    "ints": (11, 0),
    "large ints": (2**62 + 12345, 2**32 - 2),
    "negative ints": (-(2**63), -2),
    "tensors": (requests(0, 7, -1, dtype=torch.int64), requests(5, 0, 2**31, dtype=torch.int64)),
    "large tensors": (
        requests(2**63 - 1, -(2**63), 2**32 - 1, dtype=torch.int64),
        requests(2**32 - 2, 2**63 - 9, -1, dtype=torch.int64),
    ),
    "int and tensor": (2**31 + 5, requests(2**40 - 1, 3, -(2**63), dtype=torch.int64)),
    "tensor and int": (requests(-5, 2**40 + 3, 1, dtype=torch.int64), 1000),
}


def batch(
    layout: str, V: int, V_draft: int | None = None, *, drafts: str = "drawn", lengths=None, dtypes=(torch.float32,) * 2,
) -> Case:  # fmt: skip
    """The rows and drafted tokens of a case: copies."""
    lengths = LENGTHS[layout] if lengths is None else lengths
    target, draft, ids = (torch.from_numpy(x.copy()) for x in tables(lengths, V, V if V_draft is None else V_draft))
    if drafts == "one-hot":  # two of three are the likely tokens: others are hardly ever accepted
        ids = torch.where(torch.arange(len(ids)) % 3 == 1, ids, target[beside(lengths)].argmax(-1))
    target, draft = target.to(dtypes[0]), draft.to(dtypes[1])
    if layout == "padded":
        target, draft, ids = (x.unflatten(0, (B, len(x) // B)) for x in (target, draft, ids))
    case = {"target_probs": target, "draft_probs": None if drafts == "one-hot" else draft, "draft_token_ids": ids}
    if layout == "flat":
        sums = requests(*accumulate(lengths, initial=0), dtype=torch.int32)
        case |= {"cu_draft_tokens": sums, "max_draft_tokens": max(lengths)}
    return case


# -- cases

Named = Iterator[tuple[str, Case]]


def stream(i: int) -> Case:
    """Seed and offset: every second one of `STREAMS`, in turn."""
    seed, offset = (11 + i, 3 * i) if i % 2 else list(STREAMS.values())[i // 2 % len(STREAMS)]
    return {"seed": seed, "offset": offset}


def plain() -> Named:
    """Every rule, at every size, in both layouts, with both kinds of drafts."""
    i = 0
    for name, make in RULES.items():
        for V in SIZES:
            for layout in LENGTHS:
                for drafts in ("drawn", "one-hot"):
                    yield (
                        f"{name}, {V}, {layout}, {drafts}",
                        batch(layout, V, drafts=drafts) | stream(i) | {"rule": make()},
                    )
                    i += 1


def vocabularies() -> Named:
    """Draft and target of different sizes."""
    for i, (name, make) in enumerate(RULES.items()):
        for layout, V, V_draft in (
            ("flat", 1030, 1024),
            ("padded", 1030, 2051),
            ("flat", 2051, 1030),
            ("padded", 7, 9),
        ):
            yield f"{name}, {V} and {V_draft}, {layout}", batch(layout, V, V_draft) | stream(i) | {"rule": make()}


def dtypes() -> Named:
    """Rows in half precision, of the draft alone too; ids in int32."""
    half = (torch.bfloat16, torch.float16)
    for i, (name, make) in enumerate(RULES.items()):
        for pair in ((half[0], half[0]), (half[1], half[1]), (torch.float32, half[i % 2])):
            case = batch("flat", 1030, dtypes=pair) | stream(i) | {"rule": make()}
            kinds = " and ".join(str(dtype).removeprefix("torch.") for dtype in pair)
            if i % 3 == 0:
                case["draft_token_ids"] = case["draft_token_ids"].int()
            yield f"{name}, {kinds}", case


def budgets() -> Named:
    """Rules that keep the target's proportions, within a budget."""
    budget = requests(0.0, 0.1, 2.0, dtype=torch.float64)
    for i, (name, make) in enumerate(RULES.items()):
        if not make().keeps_proportions:
            continue
        for layout in LENGTHS:
            for drafts in ("drawn", "one-hot"):
                for kept in (budget, budget.flip(0)):
                    case = batch(layout, 1030, drafts=drafts) | stream(i) | {"rule": make(), "budget": kept}
                    yield f"{name}, budget {kept.tolist()}, {layout}, {drafts}", case
    case = (
        batch("padded", 1030) | stream(0) | {"rule": Cactus(1.0), "budget": requests(-1, NAN, 1, dtype=torch.float64)}
    )
    yield "Cactus number, bad budgets", case


def streams() -> Named:
    """Every kind of seed and offset."""
    for name, (seed, offset) in STREAMS.items():
        for rule in (SpS(), Cactus(0.5), Coupled()):
            yield f"{rule.name}, {name}", batch("flat", 2051) | {"seed": seed, "offset": offset, "rule": rule}


def ends() -> Named:
    """Drafts of no tokens, of many, ended early; no residual, or a draft like the target; rows of one token; small sums."""
    for i, name in enumerate(
        ("SpS", "Cactus number", "Capped requests", "Optimal price number", "TopK 5", "Coupled", "Block")
    ):
        common = stream(i) | {"rule": RULES[name]()}
        for V in SIZES:
            yield f"{name}, bonus rows, {V}", batch("padded", V, lengths=(0,) * B) | common
            yield f"{name}, bonus rows, {V}, flat", batch("flat", V, lengths=(0,) * B) | common
        many = batch("padded", 7, lengths=(64,) * B) | common
        many["draft_probs"] = many["target_probs"][:, :-1].clone()
        yield f"{name}, 64 tokens", many
        early = batch("padded", 1030) | common
        early["draft_token_ids"][:2, 1] = -1
        yield f"{name}, ended early", early
        more = batch("padded", 1030) | common
        more["draft_probs"] = (more["target_probs"][:, :-1] * 1.5).clamp(max=1)
        yield f"{name}, no residual", more
        same = batch("padded", 1030) | common
        same["draft_probs"] = same["target_probs"][:, :-1].clone()
        yield f"{name}, draft equal to target", same
        certain = batch("padded", 1030) | common
        certain["target_probs"].zero_()[..., 1026] = 1
        certain["draft_token_ids"][:2, :2] = 1026
        yield f"{name}, certain", certain
        small = batch("padded", 2051) | common
        small["target_probs"], small["draft_probs"] = (small[x] * 2.0**-42 for x in ("target_probs", "draft_probs"))
        yield f"{name}, small", small
        longer = batch("flat", 1030) | common | {"max_draft_tokens": 5}
        yield f"{name}, longest draft not there", longer


def bads() -> Named:
    """Bad values in request 1, mostly."""
    for i, name in enumerate(RULES):
        case = batch("padded", 1030) | stream(i) | {"rule": RULES[name]()}
        case["target_probs"][1, :, 1029] = NAN
        yield f"{name}, NaN in target", case
        case = batch("padded", 1030) | stream(i) | {"rule": RULES[name]()}
        case["target_probs"][1, 1, case["draft_token_ids"][1, 1]] = 1.02
        yield f"{name}, 1.02 in target", case
    for i, name in enumerate(("SpS", "Cactus requests", "Optimal price number", "Typical number", "Coupled", "Block")):
        common = stream(i) | {"rule": RULES[name]()}
        for what, n in (("id -2", -2), ("id V - 1", 1029), ("id V", 1030), ("id 2^31 - 1", 2**31 - 1)):
            case = batch("flat", 1030) | common
            case["draft_token_ids"][3] = n
            yield f"{name}, {what}", case
        for what, value in (("NaN", NAN), ("-0.25", -0.25), ("inf", INF)):
            case = batch("padded", 1030) | common
            case["draft_probs"][1, 1] = value
            yield f"{name}, {what} in draft", case
        empty = batch("padded", 1030) | common
        empty["target_probs"][1] = 0
        yield f"{name}, no mass in target", empty
        for sums in ((0, 3, 2, 5), (0, 3, 3, 6), (0, -1, 3, 5), (0, 4, 4, 5), (0, 3, 3, 2**31 - 1)):
            case = batch("flat", 1030) | common | {"cu_draft_tokens": requests(*sums, dtype=torch.int32)}
            yield f"{name}, prefix sums {list(sums)}", case
    makers = {
        "Cactus": Cactus, "Cactus kl": lambda x: Cactus(x, "kl"), "AdaptiveCactus": AdaptiveCactus, "Capped": Capped,
        "Interpolation": Interpolation, "Optimal cap": lambda x: Optimal(cap=x), "Optimal price": lambda x: Optimal(price=x),
        "Mentored": Mentored, "Typical": Typical, "Typical alpha": lambda x: Typical(0.3, x),
    }  # fmt: skip
    for i, (name, make) in enumerate(makers.items()):
        for values in ((0.5, NAN, 1.5), (INF, 0.5, -1.0)):
            case = batch("padded", 1030) | stream(i) | {"rule": make(requests(*values))}
            yield f"{name}, strengths {list(values)}", case


def probs_of(V: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(rows(V, B, V)).to(dtype)


def draws() -> Named:
    """`draw`: every dtype, every kind of seed and offset, bad rows."""
    for i, V in enumerate((1, 1023, 1024, *SIZES)):
        for j, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            yield f"{V}, {str(dtype).removeprefix('torch.')}", {"probs": probs_of(V, dtype)} | stream(i + j)
    for i, name in enumerate(STREAMS):
        yield f"2051, {name}", {"probs": probs_of(2051)} | stream(i)
    for i, exponent in enumerate((-32, -40, -46)):  # few of the bits in which chunks are summed
        for V in SIZES:
            yield f"{V}, times 2^{exponent}", {"probs": probs_of(V) * 2.0**exponent} | stream(i)
    bad = probs_of(1030)
    bad[0], bad[1, 5] = 0, NAN
    yield "bad rows", {"probs": bad} | stream(0)


GROUPS: dict[str, Callable[[], Named]] = {
    "plain": plain, "vocabularies": vocabularies, "dtypes": dtypes, "budgets": budgets, "streams": streams, "ends": ends,
    "bads": bads, "draws": draws,
}  # fmt: skip


# -- outputs


def run(case: Case, backend: str, device: torch.device | str = "cpu") -> VerifyOutput:
    """The output of a case, over poison."""
    if "probs" not in case:
        return parity.run_case(case, backend, device)
    case = {name: parity.to_device(value, device) for name, value in case.items()}
    out = VerifyOutput(
        torch.full((B, 1), parity.POISON, dtype=torch.int64, device=device),
        torch.full((B,), parity.POISON, dtype=torch.int32, device=device),
        torch.ones(B, dtype=torch.bool, device=device),
    )
    return draw(**case, out=out, backend=backend)


def record(out: VerifyOutput) -> dict:
    """An output as it is recorded: lists; nats spent as hexadecimal floats, in which every bit is seen."""
    recorded = {"token_ids": out.token_ids.tolist(), "num_accepted": out.num_accepted.tolist()}
    recorded["valid"] = [int(valid) for valid in out.valid.tolist()]
    if out.spent is not None:
        recorded["spent"] = [spent.hex() for spent in out.spent.tolist()]
    return recorded


def digest(cases: dict[str, Case]) -> str:
    """Of all rows, drafted tokens and prefix sums: whether other outputs come from other inputs."""
    hashed = hashlib.sha256()
    for case in cases.values():
        for name in ("probs", "target_probs", "draft_probs", "draft_token_ids", "cu_draft_tokens"):
            if case.get(name) is not None and case[name].numel():
                hashed.update(case[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def write() -> None:
    """Write the recording by the torch backend."""
    groups = []
    for group, make in GROUPS.items():
        cases = dict(make())
        lines = [f'"inputs": "{digest(cases)}"']
        for name, case in cases.items():
            lines.append(f"{json.dumps(name)}: {json.dumps(record(run(case, 'torch')), separators=(',', ':'))}")
        groups.append(f'"{group}": {{\n' + ",\n".join(lines) + "\n}")
    RECORDING.parent.mkdir(exist_ok=True)
    RECORDING.write_text("{\n" + ",\n".join(groups) + "\n}\n")
