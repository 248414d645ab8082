"""The multipliers b and c of solved rules: right, by solutions in float64; exact sums; the same bits from the kernel."""

import numpy as np
import pytest
import torch
from support import exact

from cactus_kernels import Mentored, Optimal, definition, verify
from cactus_kernels.contract import Inputs, Probs
from cactus_kernels.host import clip as host_clip
from cactus_kernels.rules import SpS
from cactus_kernels.rules.elementary import log_of_number, without_log


def pairs(V, seed):
    """Draft and target rows of many kinds, fp32 [V], by name."""
    rng = np.random.default_rng(seed)
    logits, noise = 3 * rng.standard_normal(V), rng.standard_normal(V)
    few = np.argsort(logits)[-max(2, V // 50) :]
    found = {
        "alike": (logits + noise, logits),
        "nearly equal": (logits + 1e-3 * noise, logits),
        "apart": (3 * noise, logits),
        "truncated": (np.full(V, -np.inf), np.full(V, -np.inf)),
        "one-hot": (np.where(np.arange(V) == V // 2, 0.0, -np.inf), logits),
        "equal": (logits, logits),
    }
    found["truncated"][0][few[:-1]], found["truncated"][1][few[1:]] = (logits + noise)[few[:-1]], logits[few[1:]]
    return {
        kind: tuple((np.exp(x - x.max()) / np.exp(x - x.max()).sum()).astype(np.float32) for x in pair)
        for kind, pair in found.items()
    }


KINDS = list(pairs(3, 0))
SIZES = [3, 40, 20_000]


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_b_is_that_of_a_float64_solution(kind, V):
    p, q = pairs(V, V)[kind]
    wide = p.astype(np.float64), q.astype(np.float64)
    for form, strength in (("cap", 1.0), ("cap", 1.3), ("cap", 20.0), ("price", 1.0), ("price", 1.5), ("price", 1e3)):
        b, c = host_clip.solve(p, q, np.float32(strength), form)
        assert 0 < b <= 1 and c == (np.float32(strength) if form == "cap" else b * np.float32(strength))
        law = np.clip(wide[0], float(b) * wide[1], float(c) * wide[1])
        if np.maximum(wide[0] - float(c) * wide[1], 0).sum() == 0:  # nothing is rejected
            continue
        assert abs(law.sum() - wide[0].sum()) < 3e-7
        other = exact.clip(*wide, **{"c" if form == "cap" else "price": float(np.float32(strength))})
        np.testing.assert_allclose(law, np.clip(wide[0], other[0] * wide[1], other[1] * wide[1]), atol=3e-7)


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_is_the_budget(kind, V):
    """Within a millionth, and the rounding of the rows, whose sums differ from 1; or less, where nothing is rejected."""
    p, q = pairs(V, V)[kind]
    wide = p.astype(np.float64), q.astype(np.float64)
    for kl in (0.0, 1e-3, 0.05, 0.5):
        b, c = host_clip.solve(p, q, np.float32(kl), "kl")
        law = np.clip(wide[0], float(b) * wide[1], float(c) * wide[1])
        assert 0 < b <= 1 <= c
        if c == definition.LARGEST_MULTIPLE:
            rejected = wide[0][wide[1] == 0].sum()
            assert exact.kl(wide[1], law if rejected else wide[0]) <= float(np.float32(kl)) * (1 + 1e-6) + 3e-7
        else:
            assert abs(law.sum() - wide[0].sum()) < 3e-7
            assert abs(exact.kl(wide[1], law / law.sum()) - float(np.float32(kl))) < 1e-6 * kl + 3e-7


@pytest.mark.parametrize("V", [2, 50])
def test_the_divergence_is_the_budget_down_to_the_smallest_normal_number(V):
    """Tokens that the draft is sure of and the target nearly excludes: the sum of their q counts c times, up to 1e38 times.
    The largest relative error of the solved divergence is 6e-6, from q_n = 1e-10 to 2^-126."""
    rng, errors = np.random.default_rng(V), []
    for exponent in [*range(-10, -38, -1), np.log2(10) ** -1 * -126]:
        for _ in range(10):
            p, q = rng.dirichlet(np.ones(V), size=2)
            q[0], p[0] = max(10.0**exponent, 2.0**-126), rng.uniform(0.05, 0.95)
            p[1:] *= (1 - p[0]) / p[1:].sum()
            q[1:] *= (1 - q[0]) / q[1:].sum()
            p, q = p.astype(np.float32), q.astype(np.float32)
            wide = p.astype(np.float64), q.astype(np.float64)
            kl = np.float32(exact.kl(wide[1], wide[0]) * rng.uniform(0.05, 0.9))
            b, c = host_clip.solve(p, q, kl, "kl")
            law = np.clip(wide[0], float(b) * wide[1], float(c) * wide[1])
            errors.append(abs(exact.kl(wide[1], law / law.sum()) / kl - 1))
    assert max(errors) < 1e-5


def test_what_a_sum_loses_is_rejected_not_accepted(device):
    """Denormal probabilities of the target: below what the solution is exact for, every backend rejects."""
    p = torch.tensor([[[0.1, 0.9]]], device=device)
    ids = torch.ones(1, 1, dtype=torch.int64, device=device)
    for q_n in (1e-20, 2.0**-126, 1e-39, 2.0**-149, 0.0):
        q = torch.tensor([[[1 - q_n, q_n]] * 2], device=device)
        for rule in (Mentored(0.1), Mentored(5.0), Optimal(cap=3e38), Optimal(price=3e38)):
            for backend, B in (("torch", 60), ("triton", 2)):
                rows = q.expand(B, 2, 2), p.expand(B, 1, 2), ids.expand(B, 1)
                out = verify(*rows, rule, seed=1, offset=0, backend=backend)
                assert out.valid.all() and not (q_n < 2.0**-126 and out.num_accepted.any())
                if backend == "torch":
                    expected = out.token_ids[:2]
            assert torch.equal(out.token_ids, expected)
        if q_n == 1e-20:  # c q_n is .095 of .9
            accepted = verify(
                q.expand(300, 2, 2), p.expand(300, 1, 2), ids.expand(300, 1), Mentored(0.1), seed=1, offset=0
            )
            assert 0.07 < accepted.num_accepted.float().mean() < 0.15


def test_b_does_not_depend_on_where_the_search_begins(monkeypatch):
    largest, found = host_clip._largest, {}
    for start in (None, 2100, 2040, 1900, 1000):  # edges, 2049 is that at 1

        def begun_there(sides, k=host_clip.BINS, start=start):
            return largest(sides, k if start is None else start)

        monkeypatch.setattr(host_clip, "_largest", begun_there)
        for V in SIZES:
            for kind, (p, q) in pairs(V, V + 1).items():
                for form, strength in (("cap", 1.2), ("price", 1.4), ("kl", 0.02)):
                    found.setdefault((V, kind, form), set()).add(host_clip.solve(p, q, np.float32(strength), form))
    assert {case: results for case, results in found.items() if len(results) > 1} == {}


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["normalised", "beyond what float64 can sum"])
def test_sums_are_exact(scale):
    p, q = (np.minimum(x * np.float32(scale), np.float32(1)) for x in pairs(5000, 3)["apart"])
    q[:20], p[10:30] = 0, 0
    with np.errstate(all="ignore"):
        pair, ratio = host_clip.Pair(p, q, False), p / q
    fixed = [[int(x) for x in np.float64(row) * 2**52] for row in (p, q)]
    assert (max(map(sum, fixed)) >= 2**53) == (scale > 1)
    for x in np.float32([0, 1e-30, 2**-16, 0.3, 0.999, 1, 1.0001, 77, 2**16, 1e9, 3e38]):
        below, up_to = ratio < x, ratio <= x
        assert pair.below(x) == [sum(np.array(row, dtype=object)[below]) for row in fixed]
        power = max(1.0, 2.0 ** float(np.floor(np.log2(x)))) if x else 1.0
        assert host_clip.power_below(x) == power
        scaled = [int(float(y) * power * 2**52) + bool(y > 0) for y in q]
        assert list(pair.above(x)) == [sum(np.array(row, dtype=object)[~up_to]) for row in (fixed[0], scaled)]


def test_logarithms():
    x = np.exp(np.random.default_rng(0).uniform(-80, 80, 100_000)).astype(np.float32)
    near = (1 + np.random.default_rng(1).uniform(-0.3, 0.4, 100_000)).astype(np.float32)
    for values in (x, near):
        wide = values.astype(np.float64)
        np.testing.assert_allclose(log_of_number(torch.from_numpy(values)), np.log(wide), rtol=1e-13, atol=1e-13)
        expected = (wide - 1) - np.log(wide)
        some = np.abs(wide - 1) > 1e-3  # nearer to 1 float64 cancels too
        np.testing.assert_allclose(without_log(torch.from_numpy(values))[some], expected[some], rtol=5e-7)
    tiny = np.linspace(-1e-3, 1e-3, 1001).astype(np.float32)
    f = (1 + tiny).astype(np.float64) - 1
    series = f**2 / 2 - f**3 / 3 + f**4 / 4 - f**5 / 5
    np.testing.assert_allclose(without_log(torch.from_numpy(1 + tiny)), series, rtol=5e-7)


RULES = [Optimal(cap=1.2), Optimal(price=1.5), Optimal(price=1.0), Mentored(0.0), Mentored(0.05), Mentored(0.5)]


@pytest.mark.parametrize(
    "rule", [RULES[1], RULES[4], *(pytest.param(RULES[i], marks=pytest.mark.slow) for i in (0, 2, 3, 5))], ids=str
)
def test_the_kernel_gives_the_same_bits(rule, device):
    clip_triton = pytest.importorskip("cactus_kernels.kernels.clip")
    for V, V_draft, dtype in ((3, 3, torch.float32), (1030, 1030, torch.bfloat16), (40, 41, torch.float32)):
        rows = pairs(V_draft, V).values()
        B = len(rows)
        draft = torch.from_numpy(np.stack([p for p, _ in rows])).to(dtype)[:, None].to(device)
        target = torch.from_numpy(np.stack([q for _, q in rows])).to(dtype)[:, None, :V].repeat(1, 2, 1).to(device)
        ids, numbers = torch.zeros(B, 1, dtype=torch.int64, device=device), torch.arange(B, device=device)
        inputs = Inputs(Probs(target), Probs(draft), ids, rule, numbers, numbers, None, 1, B)
        asked = torch.zeros(B, dtype=torch.int32, device=device)
        with np.errstate(all="ignore"):
            got = clip_triton.compute(inputs, at=asked).view(2, B, 2)[..., 0].cpu().numpy()
        p, q = draft[:, 0].float().cpu().numpy(), np.zeros((B, V_draft), dtype=np.float32)
        q[:, :V] = target[:, 0].float().cpu()
        expected = [host_clip.solve(*x, np.float32(*rule.strengths), rule.solves.what) for x in zip(p, q, strict=True)]
        np.testing.assert_array_equal(got, np.transpose(expected))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rule", [Optimal(price=1.5), Mentored(0.05)], ids=str)
def test_rows_whose_token_is_accepted_anyway_are_not_read(rule, backend, device):
    """What SpS accepts, every c >= 1 accepts: a bad entry elsewhere in such a row does not matter, in another it does."""
    if backend == "triton":
        pytest.importorskip("triton")
    rng = torch.Generator().manual_seed(0)
    target, draft = (torch.rand(16, k, 50, generator=rng) ** 6 for k in (2, 1))
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    ids = torch.multinomial(draft[:, 0], 1, generator=rng)
    by_sps = verify(target, draft, ids, SpS(), seed=1, offset=0).num_accepted
    other = (ids + 1) % 50
    target[:, 0].scatter_(1, other, float("nan"))
    with np.errstate(all="ignore"):
        out = verify(*(x.to(device) for x in (target, draft, ids)), rule, seed=1, offset=0, backend=backend)
    assert torch.equal(out.valid.cpu(), by_sps == 1) and 0 < by_sps.sum() < 16
