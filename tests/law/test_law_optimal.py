"""What docs/law.md says of `Optimal`: its bound, and that no rule that verifies token by token does better."""

import numpy as np
import pytest
import torch
from support import exact
from support.laws import assert_no_less_than_least

from cactus_kernels import law
from cactus_kernels.rules import (
    AdaptiveCactus,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Mentored,
    Optimal,
    SpS,
    TopK,
    Typical,
)

LOSSY = [
    *(Cactus(x, form) for x in (0.01, 0.1, 1.0) for form in ("taylor", "kl")),
    *(AdaptiveCactus(0.5, spend) for spend in ("certain", "uncertain")),
    *(Capped(x) for x in (1.2, 2.0, 8.0)),
    *(Optimal(cap=x) for x in (1.2, 2.0, 8.0)),
    *(Interpolation(x) for x in (0.2, 0.8)),
    *(Mentored(x) for x in (0.01, 0.3)),
    *(Typical(x) for x in (0.01, 0.3)),
    *(TopK(k, recovery) for k in (1, 5) for recovery in ("target", "upstream")),
    SpS(),
    Coupled(),
]


def model_rows(count, V, seed, truncated=False):
    """Rows like a language model's, p and q float64 [count, V]; truncated: only the 8 largest of each are left."""
    rng = np.random.default_rng(seed)
    logits = rng.uniform(0.5, 4, (count, 1)) * rng.standard_normal((count, V))
    both = torch.from_numpy(
        np.stack([logits + rng.uniform(0.1, 1.5, (count, 1)) * rng.standard_normal((count, V)), logits])
    )
    if truncated:
        both = both.masked_fill(both < both.topk(8)[0][..., -1:], -torch.inf)
    return both.softmax(-1)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("rule", LOSSY, ids=repr)
def test_at_one_position_no_rule_has_less_divergence_at_equal_acceptance(rule, truncated):
    p, q = model_rows(200, 50, 0, truncated)
    assert_no_less_than_least(p, q, law.emitted(p, q, rule), law.acceptance(p, q, rule))


def test_at_one_position_no_arbitrary_rule_has_less_divergence():
    """Any acceptances and any recovery: the law is p a + (1 - sum of p a) g for some distribution g."""
    rng = np.random.default_rng(5)
    p, q = model_rows(2000, 6, 1)
    accept = torch.from_numpy(rng.beta(*rng.choice([0.3, 1, 3], 2), (2000, 6)))
    accept = torch.where(
        torch.rand(2000, 1, generator=torch.Generator().manual_seed(0)) < 0.5, (2 * q / p).clamp(max=1), accept
    )
    accepted = p * accept
    g = torch.from_numpy(rng.dirichlet(np.ones(6), 2000))
    acceptance = accepted.sum(1)
    assert_no_less_than_least(p, q, accepted + (1 - acceptance[:, None]) * g, acceptance)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("rule", LOSSY, ids=repr)
def test_on_average_no_rule_is_below_the_curve_of_constant_prices(rule, truncated):
    """KL - ln(price) acceptance is least under that price: a line that supports the curve, and no point lies below it."""
    p, q = model_rows(200, 50, 2, truncated)

    def means(rule):
        return law.divergences(law.emitted(p, q, rule), q).kl.mean().item(), law.acceptance(p, q, rule).mean().item()

    kl, acceptance = means(rule)
    for price in (1.0, 1.2, 2.0, 4.0, 20.0):
        best_kl, best_acceptance = means(Optimal(price=price))
        assert kl - np.log(price) * acceptance >= best_kl - np.log(price) * best_acceptance - 1e-9


def test_a_fixed_cap_is_above_that_curve():
    """At equal mean acceptance a constant price has less KL; on truncated rows even Cactus can have less than a cap."""
    p, q = model_rows(200, 50, 2, truncated=True)

    def means(rule):
        return law.divergences(law.emitted(p, q, rule), q).kl.mean().item(), law.acceptance(p, q, rule).mean().item()

    cap = means(Optimal(cap=2.0))
    prices = np.array([means(Optimal(price=x)) for x in np.geomspace(1, 40, 60)])
    assert np.interp(cap[1], prices[:, 1], prices[:, 0]) < 0.98 * cap[0]


@pytest.mark.parametrize("cap", [1.0, 1.01, 1.5, 4.0, 100.0])
def test_the_cap_bounds_the_kl_of_every_position(cap):
    """KL(P || q) <= ln c, and P <= c q everywhere, on 2,000 pairs a cap, 10,000 together: random, peaked, disjoint, near."""
    rng = np.random.default_rng(int(10 * cap))
    for kind in range(8):
        alpha = (0.02, 0.1, 0.5, 1, 5, 1, 1, 0.1)[kind]
        p, q = (rng.dirichlet(np.full(9, alpha), 250) for _ in range(2))
        if kind == 5:  # the target barely allows what the draft proposes
            q = np.where(np.arange(9) < 5, 1e-12 * q, q)
        elif kind == 6:  # disjoint but for one token
            p, q = np.where(np.arange(9) < 5, p, 0), np.where(np.arange(9) > 3, q, 0)
        elif kind == 7:  # the bound is reached: all that is proposed has p = c q
            p = np.where(np.arange(9) < 5, q, 0)
            p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
        p, q = (torch.from_numpy(np.maximum(x, 1e-300) if kind < 5 else x) for x in (p, q))
        p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
        P = law.emitted(p, q, Optimal(cap=cap))
        assert (P <= np.float32(cap) * q * (1 + 1e-9) + 1e-15).all()
        assert (law.divergences(P, q).kl <= np.log(np.float32(cap)) + 1e-9).all()


@pytest.mark.parametrize("truncated", [False, True])
def test_at_delta_0_and_the_like_every_law_is_that_of_sps(truncated):
    p, q = model_rows(100, 50, 3, truncated)
    sps, accepted = law.emitted(p, q, SpS()), law.acceptance(p, q, SpS())
    assert torch.equal(law.emitted(p, q, Cactus(0)), sps) and torch.equal(law.acceptance(p, q, Cactus(0)), accepted)
    for rule in (
        Cactus(0, "kl"),
        AdaptiveCactus(0),
        Capped(1),
        Interpolation(1),
        Optimal(cap=1),
        Optimal(price=1),
        Mentored(0),
    ):
        np.testing.assert_allclose(law.emitted(p, q, rule), sps, atol=1e-9)
        np.testing.assert_allclose(law.acceptance(p, q, rule), accepted, atol=1e-8)
    np.testing.assert_allclose(accepted, torch.minimum(p, q).sum(1), atol=1e-14)


@pytest.mark.parametrize("truncated", [False, True])
def test_laws_lie_between_draft_and_target(truncated):
    """The lemma of docs/law.md, for every rule but the two that take no account of p, which break it."""
    p, q = model_rows(200, 50, 7, truncated)
    for rule in LOSSY:
        P = law.emitted(p, q, rule)
        outside = (P < torch.minimum(p, q) - 1e-12) | (P > torch.maximum(p, q) + 1e-12)
        assert outside.any() == isinstance(rule, (Typical, TopK)), rule


def test_what_coupling_costs():
    """Shared noise meets less often than min(p, q) allows, and at least (1 - TV) / (1 + TV) of the time."""
    p, q = model_rows(500, 300, 4)
    overlap, met = law.acceptance(p, q, SpS()), law.acceptance(p, q, Coupled())
    assert (met <= overlap + 1e-12).all() and (met >= overlap / (2 - overlap) - 1e-12).all()


def test_divergences_of_rows_are_those_of_each():
    p, q = model_rows(5, 20, 6)
    for i in range(5):
        P, Q = p[i].numpy(), q[i].numpy()
        expected = exact.kl(P, Q), exact.kl(Q, P), abs(P - Q).sum() / 2, ((P - Q) ** 2 / Q).sum()
        assert [float(x[i]) for x in law.divergences(p, q)] == pytest.approx(expected, abs=1e-12)
        assert law.divergences(p[i], q[i]) == pytest.approx(expected, abs=1e-12)
