"""The kernel gives the bits of the torch reference: whole cases, its parts, the extremes of the random words."""

import functools

import numpy as np
import pytest
import torch

from cactus_kernels import Cactus, SpS, VerifyOutput, draw, philox, rules, verify
from cactus_kernels.rules import Rule
from cactus_kernels.testing import fuzz, oracle, parity

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
verify_triton = pytest.importorskip("cactus_kernels.kernels.verify")
jitted = pytest.importorskip("cactus_kernels.kernels.judge").jitted
race_triton = pytest.importorskip("cactus_kernels.kernels.race")

# numpy warns where the kernel computes with the bad values of a request that is invalid.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES, ALL_CASES, CASES_A_TEST = 126, 504, 21  # the rest of all cases is for the slow tier
INTERPRETED = pytest.mark.skipif(not race_triton.INTERPRETED, reason="replaces parts of the kernel: interpreter only")


def assert_same(expected, got, what=""):
    for name in ("num_accepted", "valid", "token_ids"):
        assert torch.equal(getattr(expected, name).cpu(), getattr(got, name).cpu()), (name, what)


@pytest.mark.parametrize(
    "start",
    [
        start if start < CASES else pytest.param(start, marks=pytest.mark.slow)
        for start in range(0, ALL_CASES, CASES_A_TEST)
    ],
)
def test_fuzzed_cases_are_the_same_in_every_bit(start, device):
    for seed in range(start, start + CASES_A_TEST):
        difference = parity.difference(fuzz.fuzz_case(seed), ("torch", "cpu"), ("triton", str(device)))
        assert difference is None, f"case {seed}: {difference}"


@pytest.mark.parametrize("start", [0, pytest.param(400, marks=pytest.mark.slow)])
def test_fuzzed_cases_are_verified_as_the_reference_does(start):
    """On a CPU against a request and a token at a time: every rule, layout, bad value and budget that is fuzzed."""
    for seed in range(start, start + (400 if start == 0 else 4000)):
        case = fuzz.fuzz_case(seed)
        expected, got = oracle.verified(case), parity.run_case(case, "torch")
        assert_same(expected, got, f"case {seed}: {fuzz.describe(case)}")
        assert expected.spent is None or torch.equal(expected.spent, got.spent), seed


def test_the_fuzzed_cases_reach_every_branch():
    """What the cases above are made of, by the reference: a generator that lost a kind of case would test nothing."""
    seen = dict.fromkeys(("bonus", "recovered", "invalid", "accepted some", "no residual", "one-hot", "ended early"), 0)
    kinds = set()
    for seed in range(ALL_CASES):
        case = fuzz.fuzz_case(seed)
        out = parity.run_case(case, "torch")
        ids, draft, cu = case["draft_token_ids"], case["draft_probs"], case.get("cu_draft_tokens")
        kinds.add((case["target_probs"].dtype, None if draft is None else draft.dtype))
        seen["one-hot"] += draft is None
        seen["invalid"] += (~out.valid).sum().item()
        seen["accepted some"] += (out.num_accepted > 0).sum().item()
        if cu is None and ids.numel() and out.valid.all():
            bonus = out.num_accepted == ids.shape[1]
            seen["bonus"] += bonus.sum().item()
            stopped = ids.gather(1, out.num_accepted.long().clamp(max=ids.shape[1] - 1)[:, None]).squeeze(1)
            seen["ended early"] += (~bonus & (stopped == -1)).sum().item()
            seen["recovered"] += (~bonus & (stopped >= 0)).sum().item()
            if draft is not None and draft.shape[-1] >= case["target_probs"].shape[-1]:
                r = (~bonus & (stopped >= 0)).nonzero().squeeze(1)
                at = out.num_accepted[r].long()
                q = case["target_probs"][r, at].float()
                seen["no residual"] += (q <= draft[r, at, : q.shape[1]].float()).all(1).sum().item()
    assert min(seen.values()) >= 3, seen
    assert len(kinds) == 12, kinds


@pytest.mark.parametrize("V", [1, 7, 1025, 3000])
@pytest.mark.parametrize("dtype", fuzz.DTYPES, ids=str)
def test_drawing_from_rows(V, dtype, device):
    generator = torch.Generator().manual_seed(V)
    probs = torch.rand(4, V, generator=generator) ** 8
    probs[2], probs[3, V // 2] = 0, float("nan")
    probs = probs.to(dtype)
    seed, offset = torch.arange(4) - 2, torch.tensor([2**32 - 1, -1, 5, 6])
    expected = draw(probs, seed=seed, offset=offset, backend="torch")
    got = draw(probs.to(device), seed=seed.to(device), offset=offset.to(device), backend="triton")
    assert expected.valid.tolist() == [True] * 2 + [False] * 2
    assert_same(expected, got)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)])
def test_an_int_seed_is_derived_in_the_kernel(seed, device):
    probs = torch.full((5, 5000), 1 / 5000)
    seeds = philox.request_seeds(seed, 5, "cpu")
    assert_same(
        draw(probs, seed=seeds, offset=3, backend="torch"),
        draw(probs.to(device), seed=seed, offset=3, backend="triton"),
    )


# -- parts of the kernel


@triton.jit
def words_kernel(out, seed, counters, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    c0, c1 = tl.load(counters + i * 4), tl.load(counters + i * 4 + 1)
    c2, c3 = tl.load(counters + i * 4 + 2), tl.load(counters + i * 4 + 3)
    words = tl.philox(
        tl.load(seed), c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    )  # fmt: skip
    tl.store(out + i * 2, words[0].to(tl.int64))
    tl.store(out + i * 2 + 1, words[1].to(tl.int64))


@triton.jit
def floats_kernel(exponentials, uniforms, words, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    r0, r1 = tl.load(words + i * 2).to(tl.uint32), tl.load(words + i * 2 + 1).to(tl.uint32)
    tl.store(exponentials + i, race_triton.exponential(r0, r1))
    tl.store(uniforms + i, race_triton.uniform(r0, r1))


@triton.jit
def roots_kernel(out, x, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + i, tl.sqrt_rn(tl.load(x + i)))


def kernel_words(seed, counters, device):
    counters = torch.tensor(counters, device=device)
    out = torch.empty((len(counters), 2), dtype=torch.int64, device=device)
    words_kernel[(1,)](out, torch.tensor([seed], device=device), counters, COUNT=len(counters))
    return out.cpu().tolist()


# Random123 1.14, tests/kat_vectors, philox4x32 10: counter, key, the first two words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, words, device):
    seed = int(np.array(key, dtype=np.uint32).view(np.int64)[0])
    assert kernel_words(seed, [counter, counter], device) == [list(words)] * 2
    assert [w.item() for w in philox.philox(torch.tensor([seed]), *counter)] == list(words)


def test_philox_is_that_of_the_kernel(device):
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (256, 4), generator=generator)
    for seed in (0, 1, -1, 2**40 + 3, -(2**63)):
        expected = torch.stack(philox.philox(torch.tensor(seed), *counters.T), 1)
        assert kernel_words(seed, counters.tolist(), device) == expected.tolist()


def test_exponentials_and_uniforms_are_the_same_in_every_bit(device):
    """2^20 words, and the ends of their ranges."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 2**32, (2**20, 2), generator=generator)
    ends = [0, 1, 255, 256, 511, 512, 2**31, 2**32 - 513, 2**32 - 512, 2**32 - 257, 2**32 - 256, 2**32 - 1]
    ends = torch.cartesian_prod(torch.tensor(ends), torch.tensor(ends))
    words[: len(ends)] = ends
    words[1000:200_000, 0] >>= torch.randint(0, 33, (199_000,), generator=generator)  # small ones
    got = torch.empty((2, len(words)), device=device)
    floats_kernel[(16,)](got[0], got[1], words.to(device), COUNT=2**16)
    expected = torch.stack([philox.exponential(*words.T), philox.uniform(*words.T)])
    assert torch.equal(got.cpu().view(torch.int32), expected.view(torch.int32))
    assert (expected[0] > 0).all() and (expected[1] >= 0).all() and (expected[1] < 1).all()


def test_square_roots_are_correctly_rounded(device):
    """`torch_language.sqrt_rn` and the kernel's: numpy's, over all exponents, with denormals."""
    bits = torch.randint(0, 0x7F800000, (2**20,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    bits[:5] = torch.tensor([0, 1, 0x7FFFFF, 0x800000, 0x3F800000])
    x = bits.view(torch.float32)
    expected = torch.from_numpy(np.sqrt(x.numpy())).view(torch.int32)
    got = torch.empty_like(x, device=device)
    roots_kernel[(16,)](got, x.to(device), COUNT=2**16)
    assert torch.equal(got.cpu().view(torch.int32), expected)
    assert torch.equal(rules.m.sqrt_rn(x).view(torch.int32), expected)


# -- rules of a user's own

m = rules.m


def floor_accept(q_n, p_n, stat, weight, floor):
    return m.minimum(m.maximum(q_n, weight * p_n), 1.0)


def floor_recover(q, q_n, h_n, stat, weight, floor):
    return m.minimum(q * (1.0 - weight) + floor, 1.0)


class Floor(Rule):
    """Not a sensible rule: it has two strengths, and gives mass to tokens without any, beyond the vocabulary too."""

    name = "floor"
    accept = staticmethod(floor_accept)
    recover = staticmethod(floor_recover)

    def __init__(self, *strengths):
        self.strengths = strengths


@pytest.mark.parametrize("per_request", ["neither", "first", "second", "both"])
@pytest.mark.parametrize("V", [5, 1030])
def test_a_rule_of_ones_own(per_request, V, device):
    generator = torch.Generator().manual_seed(1)
    B = 4
    target = torch.rand(B, 3, V, generator=generator) ** 6
    target /= target.sum(-1, keepdim=True)
    draft, ids = target[:, :2].flip(0), torch.randint(0, V, (B, 2), generator=generator)
    weight = torch.tensor([0.0, 0.3, 0.7, 0.9]) if per_request in ("first", "both") else 0.25
    floor = torch.tensor([0.0, 0.2, 1e-3, 1e-9]) if per_request in ("second", "both") else 0.125
    options = {"seed": 3, "offset": 9}
    expected = verify(target, draft, ids, Floor(weight, floor), backend="torch", **options)
    there = Floor(*(s.to(device) if isinstance(s, torch.Tensor) else s for s in (weight, floor)))
    got = verify(*(x.to(device) for x in (target, draft, ids)), there, backend="triton", **options)
    assert expected.valid.all() and (expected.token_ids < V).all()
    assert_same(expected, got)


def test_a_rule_is_compiled_once():
    assert jitted(SpS().accept) is jitted(SpS().accept)
    assert jitted(Cactus(1.0).recover) is jitted(Cactus(0.1).recover)
    assert jitted(Cactus().recover) is not jitted(SpS().recover)


# -- extremes of the random words

WORDS = {"zeros": (0, 0), "ones": (2**32 - 1, 2**32 - 1), "high": (2**32 - 1, 0), "low": (0, 2**32 - 1)}


@functools.cache
def few_tokens(V):
    """Rows in which half the tokens have no probability, in both; all requests' first drafted token is unlikely."""
    generator = torch.Generator().manual_seed(V)
    rows = torch.rand(2, 8, 3, V, generator=generator) * (torch.arange(V) % 2 == 0)
    rows /= rows.sum(-1, keepdim=True)
    return rows[0], rows[1, :, :2].clone(), torch.randint(0, (V + 1) // 2, (8, 2), generator=generator) * 2


@INTERPRETED
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("V", [2, 2049])
def test_extreme_words(words, V, monkeypatch):
    """The same in both backends, inside the vocabulary, and never a token without weight."""

    def in_torch(seed, *counter):
        shape = np.broadcast_shapes(*(np.shape(c) for c in (seed, *counter)))
        return tuple(np.full(shape, w) for w in words)

    def in_kernel(seed, c0, *counter):
        zero = c0.to(tl.uint32) * 0
        return zero + words[0], zero + words[1], zero, zero

    monkeypatch.setattr(philox, "philox", in_torch)
    monkeypatch.setattr(tl, "philox", in_kernel)
    target, draft, ids = few_tokens(V)
    for rule in ("sps", Cactus(0.2)):
        expected = verify(target, draft, ids, rule, seed=1, offset=0, backend="torch")
        got = verify(target, draft, ids, rule, seed=1, offset=0, backend="triton")
        assert_same(expected, got)
        emitted = got.token_ids[got.token_ids >= 0]
        assert got.valid.all() and (emitted < V).all() and (emitted % 2 == 0).all()
        # u just below 1 rejects what the draft says more often; u near 0 accepts all that h has.
        if words[0] == 0:
            assert (got.num_accepted == 2).all()
        elif rule == "sps" and V > 2:
            assert (got.num_accepted < 2).any()


@INTERPRETED
@pytest.mark.parametrize("V", [3000])
def test_ties_go_to_the_lowest_id(V, monkeypatch):
    """Equal words and weights make equal keys: chunk 1 of two equal ones, and its first token that weighs something."""

    def in_torch(seed, *counter):
        shape = np.broadcast_shapes(*(np.shape(c) for c in (seed, *counter)))
        return np.full(shape, 12345), np.full(shape, 67890)

    def in_kernel(seed, c0, *counter):
        zero = c0.to(tl.uint32) * 0
        return zero + 12345, zero + 67890, zero, zero

    monkeypatch.setattr(philox, "philox", in_torch)
    monkeypatch.setattr(tl, "philox", in_kernel)
    probs = torch.zeros(1, V)
    probs[0, [1500, 1600, 2100, 2200]] = 0.25
    for splits in (1, 3):
        out = run_draw(probs, splits=splits)
        assert out.token_ids.tolist() == [[1500]]
    assert draw(probs, seed=1, offset=0, backend="torch").token_ids.tolist() == [[1500]]


def run_draw(probs, **options):
    from cactus_kernels.contract import inputs_of_rows

    inputs = inputs_of_rows(probs, 1, 0)
    B = len(probs)
    out = VerifyOutput(torch.full((B, 1), parity.POISON), torch.zeros(B, dtype=torch.int32), torch.ones(B).bool())
    verify_triton.verify(inputs, out, None, num_warps=1, **options)
    return out
