"""The exact law of every rule against brute force over the drafted token, by the formulas of tests/exact.py."""

import numpy as np
import pytest
import torch
from support import exact

from cactus_kernels import definition, law
from cactus_kernels.law import exact as law_exact
from cactus_kernels.rules import (
    AdaptiveCactus,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Lenience,
    Mentored,
    Optimal,
    Rule,
    SpS,
    TopK,
    Typical,
)


def f(x):
    """A strength as rules hold it, fp32."""
    return float(np.float32(x))


# Each rule, its brute force, and the tolerance: the root of the KL form is solved by a fixed number of steps.
RULES = [
    (SpS(), lambda p, q: exact.sps(p, q), 1e-12),
    *((Cactus(x), lambda p, q, x=x: exact.cactus(p, q, f(x)), 1e-12) for x in (0.0, 0.05, 0.5, 3.0)),
    *((Cactus(x, "kl"), lambda p, q, x=x: exact.cactus(p, q, f(x), "kl"), 3e-6) for x in (0.0, 0.05, 0.5, 3.0)),
    *(
        (AdaptiveCactus(x, s), lambda p, q, x=x, s=s: exact.adaptive(p, q, f(x), s), 1e-12)
        for x in (0.3, 2.0)
        for s in ("certain", "uncertain")
    ),
    *((Capped(x), lambda p, q, x=x: exact.capped(p, q, f(x)), 1e-12) for x in (1.0, 1.3, 4.0)),
    (Lenience(0.25), lambda p, q: exact.capped(p, q, 4), 1e-12),
    *((Interpolation(x), lambda p, q, x=x: exact.interpolation(p, q, f(x)), 1e-12) for x in (0.0, 0.3, 1.0)),
    *((Optimal(cap=x), lambda p, q, x=x: exact.clipped(p, q, *exact.clip(p, q, f(x))), 1e-12) for x in (1.0, 1.3, 4.0)),
    *(
        (Optimal(price=x), lambda p, q, x=x: exact.clipped(p, q, *exact.clip(p, q, price=f(x))), 1e-12)
        for x in (1.0, 1.3, 4.0)
    ),
    *((Typical(x), lambda p, q, x=x: exact.typical(p, q, f(x), f(np.sqrt(x))), 1e-12) for x in (0.09, 0.4)),
    (Typical(0.3, 0.4), lambda p, q: exact.typical(p, q, f(0.3), f(0.4)), 1e-12),
    *((TopK(k), lambda p, q, k=k: exact.top_k(p, q, k), 1e-12) for k in (1, 3, 100)),
    *((TopK(k, "upstream"), lambda p, q, k=k: exact.top_k(p, q, k, upstream=True), 1e-12) for k in (1, 3, 100)),
]


def rows(rng, V):
    """Random distributions p and q: flat, peaked, with zeros in either, with tiny entries, equal to each other."""
    p, q = rng.dirichlet(np.full(V, rng.choice([0.1, 1, 10])), size=2)
    kind = rng.integers(6)
    if kind == 0:
        p = np.where(rng.random(V) < 0.5, p, 0)
    elif kind == 1:
        q = np.where(rng.random(V) < 0.5, q, 0)
    elif kind == 2:
        p, q = (np.where(rng.random(V) < 0.4, 1e-12 * x, x) for x in (p, q))
    elif kind == 3:
        p = q
    return tuple(x / x.sum() if x.sum() > 0 else np.eye(V)[0] for x in (p, q))


@pytest.mark.parametrize(("rule", "brute", "tolerance"), RULES, ids=lambda x: repr(x) if hasattr(x, "name") else "")
def test_the_law_of_every_rule_equals_brute_force(rule, brute, tolerance):
    rng = np.random.default_rng(0)
    for V in range(1, 13):
        pairs = [rows(rng, V) for _ in range(6)]
        together = law.emitted(*(torch.from_numpy(np.stack(x)) for x in zip(*pairs, strict=True)), rule)
        for (p, q), of_many in zip(pairs, together.numpy(), strict=True):
            accept, recovery = brute(p, q)
            p_, q_ = torch.from_numpy(p), torch.from_numpy(q)
            mine = law.emitted(p_, q_, rule).numpy()
            np.testing.assert_allclose(mine, exact.emitted_by(p, q, accept, recovery), rtol=0, atol=tolerance)
            np.testing.assert_allclose(of_many, mine, rtol=0, atol=1e-15)
            assert law.acceptance(p_, q_, rule) == pytest.approx((p * accept).sum(), abs=tolerance)


@pytest.mark.parametrize("kl", [0.0, 0.02, 0.5])
def test_mentored_keeps_its_budget(kl):
    """The law is clip(p, b q, c q), and KL(q || law) is the budget; or less, where every draft is accepted."""
    rng, spent = np.random.default_rng(1), 0
    for V in range(2, 13):
        for _ in range(10):
            p, q = rows(rng, V)
            P = law.emitted(torch.from_numpy(p), torch.from_numpy(q), Mentored(kl)).numpy()
            some = q > 0
            ratios = P[some] / q[some]
            assert P.sum() == pytest.approx(1, abs=1e-12) and (P[~some] == 0).all()
            np.testing.assert_allclose(P, np.clip(p, ratios.min() * q, ratios.max() * q), atol=1e-12)
            if kl == 0:
                np.testing.assert_allclose(P, q, atol=1e-7)
            elif exact.kl(q, P) < f(kl) - 1e-9:
                assert (P[some] >= p[some] - 1e-12).all()  # whatever the target can emit is accepted
            else:
                spent += 1
                assert exact.kl(q, P) == pytest.approx(f(kl), abs=1e-9)
    assert spent > 30 or kl == 0


@pytest.mark.parametrize("some", [0.1, 1e-2, 1e-3, 1e-4])
def test_mentored_where_b_is_tiny(some):
    """Two tokens, p = (1, 0): KL(q || P) = kl down to the least b that float64 has, also where 1 - c q is 0 in it."""
    p, q = torch.tensor([[1.0, 0.0], [1 - some, some]], dtype=torch.float64)
    for kl in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        P = law.emitted(p, q, Mentored(kl))
        log_b = -(f(kl) - (1 - some) * np.log1p(-some)) / some  # where b some is nothing beside 1
        found = law.divergences(P, q).kl_reverse
        if log_b > -700:
            assert found == pytest.approx(f(kl), rel=1e-9)
            assert log_b > -20 or P[1].log().item() == pytest.approx(np.log(some) + log_b, rel=1e-6)
        else:
            assert 600 * some < found < f(kl)
    if some == 1e-3:
        assert law.divergences(law.emitted(p, q, Mentored(1.0)), q).kl_reverse == pytest.approx(0.707, abs=5e-4)


def race(weights, chunk_noise, token_noise, chunk):
    """The tokens drawn by the two-level race, for noise [draws, C] and [draws, chunk]."""
    padded = np.pad(weights, (0, -len(weights) % chunk)).reshape(-1, chunk)
    first = (padded.sum(1) / chunk_noise).argmax(1)
    return first * chunk + (padded[first] / token_noise).argmax(1)


@pytest.mark.parametrize(("V", "chunk"), [(6, 1024), (1024, 1024), (2500, 1024), (9, 4)])
def test_coupled_accepts_as_often_as_two_races_agree(V, chunk, monkeypatch):
    """Exact: by the formula over all pairs of tokens; and by races with shared noise, 200,000 of them (5.7 deviations)."""
    monkeypatch.setattr(law_exact, "CHUNK", chunk)
    rng = np.random.default_rng(V)
    logits = 2 * rng.standard_normal(V)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits + rng.standard_normal(V), logits))
    mine = law.acceptance(torch.from_numpy(p), torch.from_numpy(q), Coupled())
    parts = [(p[i : i + chunk], q[i : i + chunk]) for i in range(0, V, chunk)]
    chunks = exact.meeting(*(np.array([part[i].sum() for part in parts]) for i in (0, 1)))
    assert mine == pytest.approx(
        sum(c * exact.meeting(*part).sum() for c, part in zip(chunks, parts, strict=True)), abs=1e-12
    )
    if V > 1000:
        return
    draws = 200_000
    noise = rng.standard_exponential((draws, len(parts))), rng.standard_exponential((draws, chunk if V > chunk else V))
    agree = (race(p, *noise, noise[1].shape[1]) == race(q, *noise, noise[1].shape[1])).mean()
    assert abs(agree - mine) < 5.7 * np.sqrt(mine * (1 - mine) / draws)
    np.testing.assert_allclose(law.emitted(torch.from_numpy(p), torch.from_numpy(q), Coupled()), q, atol=1e-15)


def test_coupled_takes_the_chunks_of_the_race():
    assert law_exact.CHUNK == definition.CHUNK


class Squared(Rule):
    """Recovers from q squared by the drafted token, which is no multiple of q, nor the same for all drafted tokens."""

    name = "squared"

    @staticmethod
    def accept(q_n, p_n, stat):
        return q_n * q_n

    @staticmethod
    def recover(q, q_n, h_n, stat):
        return q * q * (1 - q_n)


class OfTheDrafted(Rule):
    """Does not subtract the draft, and yet recovers from weights that depend on n."""

    name = "of the drafted"
    subtracts_draft = False

    @staticmethod
    def accept(q_n, p_n, stat):
        return q_n * q_n

    @staticmethod
    def recover(q, q_n, h_n, stat):
        return q * q_n


@pytest.mark.parametrize("rule", [Squared(), OfTheDrafted()], ids=lambda rule: rule.name)
def test_a_rule_of_another_form_is_refused(rule):
    p, q = (torch.from_numpy(x) for x in rows(np.random.default_rng(3), 9))
    for shape in ((9,), (1, 9)):
        with pytest.raises(ValueError, match=f"law of {rule.name} is not known"):
            law.emitted(p.view(shape), q.view(shape), rule)
