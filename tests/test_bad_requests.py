"""A request with something bad is invalid, harms no other, and reads nothing that is not there: on both backends."""

import pytest
import torch

from cactus_kernels import Cactus, RowStats, Sampling, row_stats, verify, verify_from_logits

pytest.importorskip("triton")
race_triton = pytest.importorskip("cactus_kernels.kernels.race")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not race_triton.INTERPRETED, reason="what is read is seen in the interpreter"),
]
NAN, INF = float("nan"), float("inf")
V = 5

# What may be bad of a request, by name: of a strength, a budget, the sampling's settings, the slot of its draft rows, its
# prefix sum, its tokens, its logits.
BAD = {
    "strength NaN": {"delta": NAN}, "strength inf": {"delta": INF}, "strength < 0": {"delta": -1.0},
    "budget NaN": {"budget": NAN}, "budget < 0": {"budget": -1.0},
    "temperature NaN": {"temperature": NAN}, "temperature < 0": {"temperature": -1.0}, "top-k < 0": {"top_k": -1},
    "top-p > 1": {"top_p": 2.0}, "min-p NaN": {"min_p": NAN},
    "slot < 0": {"slot": -1}, "slot beyond": {"slot": 1000},
    "prefix sum < 0": {"end": -1}, "prefix sum beyond": {"end": 1000}, "prefix sum too far": {"end": "far"},
    "token < -1": {"token": -2}, "token beyond": {"token": V}, "target NaN": {"target": NAN}, "draft NaN": {"draft": NAN},
}  # fmt: skip


def case_of(bads, lengths, *, flat, bonus, draft, mapped):
    """Arguments of `verify_from_logits` for requests of some lengths. bads: what is bad of each, {} for nothing."""
    generator = torch.Generator().manual_seed(len(lengths))
    B, N, m = len(lengths), sum(lengths), max(lengths)
    firsts = [sum(lengths[:b]) for b in range(B)]
    target = torch.randn(N + B * (bonus == "row"), V, generator=generator)
    rows = torch.randn(N, V, generator=generator)
    ids = torch.randint(0, V, (N,), generator=generator)
    for b, (first, bad) in enumerate(zip(firsts, bads, strict=True)):
        if lengths[b]:
            ids[first] = bad.get("token", ids[first])
            target[first + b * (bonus == "row"), 0] += bad.get("target", 0.0)
            rows[first, 0] += bad.get("draft", 0.0)

    def each(name, good, dtype=torch.float32):
        return torch.tensor([bad.get(name, good) for bad in bads], dtype=dtype)

    settings = [each("temperature", 0.8), each("top_k", 0, torch.int32), each("top_p", 1.0), each("min_p", 0.1)]
    case = {
        "target_logits": target if flat else target.view(B, -1, V), "rule": Cactus(each("delta", 0.5)),
        "draft_token_ids": ids if flat else ids.view(B, m), "seed": torch.arange(B), "offset": 3,
        "sampling": Sampling(*settings), "budget": each("budget", 0.3, torch.float64), "draft_logits": None,
    }  # fmt: skip
    if bonus == "given":
        case["bonus_token_ids"] = torch.arange(B) % V
    if flat:
        ends = [
            {"far": first + m + 1}.get(bad.get("end"), bad.get("end")) for first, bad in zip(firsts, bads, strict=True)
        ]
        ends = [first + n if end is None else end for first, n, end in zip(firsts, lengths, ends, strict=True)]
        case |= {"cu_draft_tokens": torch.tensor([0, *ends]), "max_draft_tokens": m}
    if draft == "one-hot":
        return case
    stats = row_stats(rows).packed if draft == "statistics" else None
    if mapped:
        held, held_stats = torch.full((B, m + 1, V), NAN), torch.full((B, m + 1, 8), NAN)
        for b, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
            held[B - 1 - b, :length] = rows[first : first + length]
            if stats is not None:
                held_stats[B - 1 - b, :length] = stats[first : first + length]
        rows, stats = held, None if stats is None else held_stats
        case["row_map"] = torch.tensor([bad.get("slot", B - 1 - b) for b, bad in enumerate(bads)])
    elif not flat:
        rows, stats = rows.view(B, m, V), None if stats is None else stats.view(B, m, 8)
    case["draft_logits"] = rows
    if stats is not None:
        case["draft_stats"] = RowStats(stats)
    return case


def alike(case):
    """The output of both backends, which say the same."""
    expected, got = (verify_from_logits(**case, backend=backend) for backend in ("torch", "triton"))
    for name in ("valid", "num_accepted", "token_ids"):
        a, b = getattr(expected, name), getattr(got, name)
        assert torch.equal(a, b), (name, a, b)
    torch.testing.assert_close(got.spent, expected.spent, rtol=0, atol=1e-5)  # exponentials differ in their last bits
    return got


@pytest.mark.parametrize(
    ("bonus", "flat"),
    [
        pytest.param("row", False, id="row-padded", marks=pytest.mark.slow),
        pytest.param("row", True, id="row-flat"),
        pytest.param("given", False, id="given-padded"),
        pytest.param("given", True, id="given-flat", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("draft", "mapped"),
    [
        pytest.param("one-hot", False, marks=pytest.mark.slow),
        ("logits", False),
        pytest.param("logits", True, marks=pytest.mark.slow),
        ("statistics", True),
    ],
)
class TestBadRequests:
    """Whatever the layout, and whatever the drafts are given by."""

    def test_everything_bad_that_a_request_may_have(self, bonus, flat, draft, mapped):
        """One of each kind, with drafts and (flat) without, beside requests that have nothing bad."""
        options = {"flat": flat, "bonus": bonus, "draft": draft, "mapped": mapped}
        bads, lengths = [], []
        for bad in BAD.values():
            bads += [bad, bad, {}] if flat else [bad, {}]
            lengths += [2, 0, 1] if flat else [2, 2]
        out = alike(case_of(bads, lengths, **options))
        for b, (bad, length) in enumerate(zip(bads, lengths, strict=True)):
            # What is bad of a request itself makes it invalid, and of a row only where that is looked at.
            if bad.keys() & {"delta", "budget"} or ("slot" in bad and mapped):
                assert not out.valid[b] and out.num_accepted[b] == 0 and (out.token_ids[b] == -1).all()
            if bad.keys() & {"temperature", "top_k", "top_p", "min_p", "token", "target"} and length:
                assert not out.valid[b] and out.num_accepted[b] == 0
            if not bad and "end" not in bads[b - 1]:
                assert out.valid[b]

    def test_where_no_row_is_left(self, bonus, flat, draft, mapped):
        """The last request has none of its own, or none has: what is read for it would lie beyond the end."""
        options = {"flat": flat, "bonus": bonus, "draft": draft, "mapped": mapped}
        for bad in (
            {"delta": NAN}, {"budget": NAN}, {"temperature": NAN}, {"top_k": -1}, {"slot": -1}, {"slot": 7}, {"end": -1},
            {"end": 7},
        ):  # fmt: skip
            for bads, lengths in (([bad], [0]), ([{}, bad], [1, 0])):
                if flat or not any(lengths):
                    out = alike(case_of(bads, lengths, **options))
                    if bad.keys() & {"delta", "budget"}:
                        assert out.valid.tolist() == [True] * (len(bads) - 1) + [False]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_bad_request_without_rows(backend):
    """The bonus token is given, and there is no row at all, or none for the second request."""
    ids, bonus = torch.zeros(1, 0, dtype=torch.int64), torch.tensor([1])
    common = {"seed": 0, "offset": 0, "backend": backend}
    for bad in (NAN, INF, -1.0):
        rule = Cactus(torch.tensor([bad]))
        out = verify_from_logits(torch.zeros(1, 0, V), None, ids, rule, bonus_token_ids=bonus, **common)
        assert (out.valid.tolist(), out.num_accepted.tolist(), out.token_ids.tolist()) == ([False], [0], [[-1]])
    good = verify_from_logits(torch.zeros(1, 0, V), None, ids, Cactus(1.0), bonus_token_ids=bonus, **common)
    assert good.valid.tolist() == [True] and good.token_ids.tolist() == [[1]]
    for token in (-1, V):
        bonus = torch.tensor([token])
        out = verify_from_logits(torch.zeros(1, 0, V), None, ids, Cactus(1.0), bonus_token_ids=bonus, **common)
        assert out.valid.tolist() == [False] and out.token_ids.tolist() == [[-1]]
    out = verify_from_logits(
        torch.zeros(1, V), None, torch.tensor([2]), Cactus(torch.tensor([0.0, NAN])), bonus_token_ids=torch.tensor([4, 4]),
        cu_draft_tokens=torch.tensor([0, 1, 1]), max_draft_tokens=1, **common,
    )  # fmt: skip
    assert out.valid.tolist() == [True, False] and out.token_ids[1].tolist() == [-1, -1]


@pytest.mark.parametrize("flat", [False, True], ids=["padded", "flat"])
def test_bad_requests_of_probabilities(flat):
    probs, ids = torch.full((2, 1, V), 1 / V), torch.zeros(2, 0, dtype=torch.int64)
    layout = {}
    if flat:
        probs, ids = probs[:, 0], ids[:, 0] if ids.numel() else torch.zeros(0, dtype=torch.int64)
        layout = {"cu_draft_tokens": torch.zeros(3, dtype=torch.int64), "max_draft_tokens": 0}
    for bad in ({"rule": Cactus(torch.tensor([1.0, NAN]))}, {"budget": torch.tensor([1.0, NAN], dtype=torch.float64)}):
        options = {"rule": Cactus(1.0), "seed": 1, "offset": 0, **layout, **bad}
        expected, got = (verify(probs, None, ids, backend=backend, **options) for backend in ("torch", "triton"))
        assert got.valid.tolist() == [True, False] and torch.equal(expected.token_ids, got.token_ids)
