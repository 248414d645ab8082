"""What comes out follows the exact law: chi-square with fixed seeds against brute force in float64 (tests/exact.py)."""

import numpy as np
import pytest
import torch
from support import exact
from support.laws import DRAWS, emitted_tokens, p_value, pair

from cactus_kernels import definition, law, philox
from cactus_kernels.drawing import draw
from cactus_kernels.host import reduce
from cactus_kernels.rules import Cactus, SpS
from cactus_kernels.verification import verify

RULES = [pytest.param(SpS(), 0.0, id="sps")] + [pytest.param(Cactus(d), d, id=f"cactus-{d}") for d in (0, 0.05, 0.5, 1)]
SIZES = [2, 7, 37, *(pytest.param(V, marks=pytest.mark.slow) for V in (1025, 2051))]


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize(("rule", "delta"), RULES)
def test_emitted_tokens_follow_the_exact_law(rule, delta, V):
    p, q = pair(V)
    tokens = emitted_tokens(p, q, rule, DRAWS // 2)
    assert p_value(tokens, exact.emitted(p.double().numpy(), q.double().numpy(), delta)) > exact.FALSE_ALARM


def wrong_recover(q, q_n, h_n, stat, delta):
    return q


@pytest.mark.parametrize("V", [7, 37])
def test_a_wrong_recovery_weight_is_caught(V, monkeypatch):
    """The deliberate error: recovering from (q - p)+ where the rule says (h - p)+."""
    rule = Cactus(0.5)
    monkeypatch.setattr(Cactus, "recover", staticmethod(wrong_recover))
    p, q = pair(V)
    tokens = emitted_tokens(p, q, rule, DRAWS)
    assert p_value(tokens, exact.emitted(p.double().numpy(), q.double().numpy(), 0.5)) < exact.FALSE_ALARM


def test_a_bonus_token_follows_the_target():
    _, q = pair(37)
    out = verify(q.expand(DRAWS, 1, 37), None, torch.zeros(DRAWS, 0, dtype=torch.int64), "sps", seed=5, offset=0)
    assert p_value(out.token_ids[:, 0], q.double().numpy()) > exact.FALSE_ALARM


def test_drawn_tokens_follow_their_row():
    p, _ = pair(37)
    out = draw(p.expand(DRAWS, 37), seed=5, offset=0)
    assert p_value(out.token_ids[:, 0], p.double().numpy()) > exact.FALSE_ALARM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_rows_follow_the_law_of_the_rows_as_they_are(dtype):
    p, q = pair(37)
    p, q = p.to(dtype), q.to(dtype)
    tokens = emitted_tokens(p, q, Cactus(0.05), DRAWS)
    assert p_value(tokens, law.emitted(p, q, Cactus(0.05)).numpy()) > exact.FALSE_ALARM


def test_a_one_hot_draft_is_not_verified_with_its_softmax():
    """transformers #32867: the arg max of a draft (.8, .2) is a one-hot draft; the target's (.6, .4) must come out."""
    q = torch.tensor([0.6, 0.4])
    ids = torch.zeros(DRAWS, 1, dtype=torch.int64)
    out = verify(q.expand(DRAWS, 2, 2), None, ids, "sps", seed=3, offset=0)
    assert p_value(out.token_ids[:, 0], q.double().numpy()) > exact.FALSE_ALARM


def test_a_smaller_draft_vocabulary_is_padded_with_zeros():
    """rtp-llm #1311: tokens beyond the draft's vocabulary have p = 0, and nothing else shifts."""
    p, q = pair(37)
    p = p[:30] / p[:30].sum()
    drafted = torch.from_numpy(
        np.random.default_rng(2).choice(30, size=DRAWS, p=p.double().numpy() / p.double().sum().item())
    )
    out = verify(q.expand(DRAWS, 2, 37), p.expand(DRAWS, 1, 30), drafted[:, None], Cactus(0.5), seed=3, offset=0)
    p64 = np.pad(p.double().numpy(), (0, 7))
    assert p_value(out.token_ids[:, 0], exact.emitted(p64, q.double().numpy(), 0.5)) > exact.FALSE_ALARM


def test_acceptances_of_four_positions_are_independent(draws=DRAWS // 4):
    """Four positions of a request, each verified alone at its own offset, against the product of their acceptances."""
    p, q = pair(37)
    a = law.acceptance(p, q, SpS())
    assert 0.3 < a < 0.7
    rng = np.random.default_rng(7)
    drafted = torch.from_numpy(rng.choice(37, size=(draws, 4), p=p.double().numpy() / p.double().sum().item()))
    seed = torch.from_numpy(rng.integers(-(2**63), 2**63, size=draws))
    alone = torch.stack(
        [
            verify(
                q.expand(draws, 2, 37), p.expand(draws, 1, 37), drafted[:, i, None], "sps", seed=seed, offset=i
            ).num_accepted
            for i in range(4)
        ],
        dim=1,
    )
    pattern = (alone.long() * torch.tensor([1, 2, 4, 8])).sum(1)
    k = np.array([bin(i).count("1") for i in range(16)])
    assert (
        exact.chi_square_p_value(np.bincount(pattern.numpy(), minlength=16), a**k * (1 - a) ** (4 - k))
        > exact.FALSE_ALARM
    )
    together = verify(q.expand(draws, 5, 37), p.expand(draws, 4, 37), drafted, "sps", seed=seed, offset=0).num_accepted
    assert torch.equal(together.long(), alone.long().cumprod(1).sum(1))


# -- the tail of a draw


def test_half_of_the_mass_outside_one_token_comes_half_of_the_time():
    V, draws = 150_000, 4_000
    w = torch.full((V,), 0.5 / (V - 1))
    w[77_777] = 0.5
    tokens = torch.cat([draw(w.expand(200, V), seed=9, offset=i).token_ids[:, 0] for i in range(draws // 200)])
    heads = int((tokens == 77_777).sum())
    assert abs(heads - draws / 2) < 5.4 * (draws / 4) ** 0.5  # 5.4 standard deviations: below 1e-7
    others = tokens[tokens != 77_777]
    assert len(others.unique()) > 0.98 * len(others)


def test_tiny_weights_do_not_win_out_of_turn():
    """150,000 weights of 1e-12 beside one of nearly 1: together 1.5e-7, so one win in 2,000 draws has chance 3e-4 and two
    have 5e-8."""
    V = 150_000
    w = torch.full((V,), 1e-12)
    w[123] = 1 - 1e-6
    tokens = torch.cat([draw(w.expand(200, V), seed=4, offset=i).token_ids[:, 0] for i in range(10)])
    assert int((tokens != 123).sum()) <= 1


def words(v_high, v_low):
    """Random words whose 24 leading bits are v_high and whose next 23 bits are v_low."""
    return v_high << 8, v_low << 9


def test_a_relative_weight_of_1e_11_has_its_probability():
    """P(E1 < eps E2) integrated over the random words: exactly over E1's, by the midpoints of 2^16 strata over E2's."""
    eps = 1e-11
    strata = torch.arange(2**16)
    e2 = philox.exponential(*words(strata * 2**8 + 2**7, torch.zeros_like(strata)))
    low = torch.arange(2**16)
    e1 = philox.exponential(
        *words(torch.zeros_like(low), low)
    )  # the smallest values, in order: one word pair in 2^47 each
    assert (e1.diff() > 0).all() and e1[-1] > eps * e2.max()
    wins = torch.searchsorted(e1.double(), eps * e2.double()).double()
    assert (wins * 2.0**-47).mean().item() == pytest.approx(eps, rel=0.01)
    # The race itself agrees with the comparison above.
    keys = torch.tensor([eps, 1.0]) / torch.stack([e1[100], e2[-1]])
    assert int(keys.argmax()) == int(e1[100] >= eps * e2[-1])


def test_an_acceptance_of_1e_11_has_its_probability():
    low = torch.arange(2**16)
    u = philox.uniform(*words(torch.zeros_like(low), low))
    p, h = torch.tensor(1.0), torch.tensor(1e-11)
    accepted = u * p < h
    assert not accepted[-1]
    assert accepted.sum().item() * 2.0**-47 == pytest.approx(1e-11, rel=0.01)


def test_a_token_that_is_lighter_than_the_fixed_point_is_never_drawn_and_breaks_nothing():
    w = torch.tensor([[2.0**-53, 2.0**-20, 0.0]])
    out = draw(w.expand(1000, 3), seed=1, offset=0)
    assert (out.token_ids == 1).sum() >= 999 and out.valid.all()
    assert not draw(w[:, :1].contiguous(), seed=1, offset=0).valid.any()


# -- law.py itself


@pytest.mark.parametrize("V", range(1, 13))
def test_the_law_equals_brute_force(V):
    rng = np.random.default_rng(V)
    for _ in range(40):
        p, q = rng.dirichlet(np.full(V, rng.choice([0.1, 1, 10])), size=2) if V > 1 else np.ones((2, 1))
        if rng.random() < 0.3:
            p = np.where(rng.random(V) < 0.5, p, 0) + 1e-300
            p /= p.sum()
        for delta in (0.0, 0.05, 0.5, 1.0):
            delta = float(np.float32(delta))
            mine = law.emitted(torch.from_numpy(p), torch.from_numpy(q), Cactus(delta)).numpy()
            np.testing.assert_allclose(mine, exact.emitted(p, q, delta), atol=1e-12)
            accept = sum(min(p[n], exact.verified_against(q, n, delta)[n]) for n in range(V))
            assert law.acceptance(torch.from_numpy(p), torch.from_numpy(q), Cactus(delta)) == pytest.approx(
                accept, abs=1e-12
            )


def test_sps_emits_the_target():
    p, q = pair(2051)
    q = q.double() / q.double().sum()
    p = p.double() / p.double().sum()
    np.testing.assert_allclose(law.emitted(p, q, "sps"), q, atol=1e-15)


def test_the_emitted_law_lies_between_draft_and_target():
    """The lemma of docs/law.md: P(x) is between p(x) and q(x) for every x, so P is no further from q than p is."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        p, q = (torch.from_numpy(x) for x in rng.dirichlet(np.full(20, rng.choice([0.05, 0.3, 1])), size=2))
        for delta in (0.01, 0.2, 1.0, 10.0):
            P = law.emitted(p, q, Cactus(delta))
            assert (P >= torch.minimum(p, q) - 1e-12).all() and (P <= torch.maximum(p, q) + 1e-12).all()
            assert law.kl(P, q) <= law.kl(p, q) + 1e-12


def test_delta_does_not_bound_the_emitted_law():
    """The design's example: delta = 0.05 and a KL of 0.64."""
    p = torch.tensor([0.2] * 5 + [0.0], dtype=torch.float64)
    q = torch.tensor([0.105] * 5 + [0.475], dtype=torch.float64)
    assert law.kl(law.emitted(p, q, Cactus(0.05)), q) == pytest.approx(0.64, abs=0.01)


def test_h_keeps_its_own_bounds():
    """chi2(h || q) <= 2 delta; KL(h || q) <= ln(1 + 2 delta), reached at q_n = 1 / (1 + 2 delta); KL <= delta does fail."""
    for delta in (0.01, 0.05, 0.3, 1.0):
        for q_n in np.linspace(1e-6, 1 - 1e-6, 2001):
            q = np.array([q_n, 1 - q_n])
            h = exact.verified_against(q, 0, delta)
            kl = sum(x * np.log(x / y) for x, y in zip(h, q, strict=True) if x > 0)
            assert ((h - q) ** 2 / q).sum() <= 2 * delta + 1e-9
            assert kl <= np.log(1 + 2 * delta) + 1e-12
        q_n = 1 / (1 + 2 * delta)
        h = exact.verified_against(np.array([q_n, 1 - q_n]), 0, delta)
        assert h[0] == pytest.approx(1) and -np.log(q_n) == pytest.approx(np.log(1 + 2 * delta))
    h = exact.verified_against(np.array([0.8, 0.2]), 0, 0.05)
    assert sum(x * np.log(x / y) for x, y in zip(h, (0.8, 0.2), strict=True)) == pytest.approx(0.062, abs=5e-4)


def test_divergences():
    a, b = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert law.kl(a, b) == pytest.approx(np.log(2))
    assert law.total_variation(a, b) == pytest.approx(0.5)
    assert law.chi_square(a, b) == pytest.approx(1.0)
    assert law.kl(b, a) == np.inf


@pytest.mark.parametrize(
    ("p", "q", "rule", "says"),
    [
        (torch.ones(2) / 2, torch.ones(3) / 3, "sps", "shape"),
        (torch.tensor([float("nan"), 1]), torch.ones(2) / 2, "sps", "finite"),
        (torch.zeros(2), torch.ones(2) / 2, "sps", "not all 0"),
        (torch.ones(2) / 2, torch.ones(2) / 2, Cactus(torch.ones(3)), "a number"),
    ],
)
def test_bad_input_to_the_law_is_refused(p, q, rule, says):
    with pytest.raises(ValueError, match=says):
        law.emitted(p, q, rule)


def test_group_and_chunk_sizes_meet():
    """The law tests above reach every branch of the reference only while these hold."""
    assert definition.CHUNK == 1024 and reduce.GROUP >= definition.CHUNK
