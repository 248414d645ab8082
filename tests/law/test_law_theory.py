"""The statements of docs/law.md that need more than one law: worst cases of delta, optimality, a budget for a sequence."""

import numpy as np
import pytest
import torch
from scipy.optimize import differential_evolution
from support import exact
from support.laws import sequence_law

from cactus_kernels import GenerationStats, law
from cactus_kernels.rules import Cactus, Interpolation, Rule, SpS, m


def two_coins(x, y):
    """KL between two coins."""
    return exact.kl(np.array([x, 1 - x]), np.array([y, 1 - y]))


# -- what delta bounds: h


@pytest.mark.parametrize(
    ("q_n", "delta", "gamma", "kl"), [(0.3, 1.0, 0.948, 0.956), (0.8, 0.05, 0.926, 0.062)], ids=["below", "above"]
)
def test_where_the_kl_of_h_is_below_delta(q_n, delta, gamma, kl):
    """If gamma <= 1 - q_n it is; beyond, as here, both occur."""
    h_n = exact.verified_against(np.array([q_n, 1 - q_n]), 0, delta)[0]
    assert h_n == pytest.approx(gamma, abs=5e-4) and h_n > 1 - q_n
    assert two_coins(h_n, q_n) == pytest.approx(kl, abs=5e-4) and bool(two_coins(h_n, q_n) < delta) is (q_n < 0.5)
    inside = 0
    for q_n in np.linspace(0.001, 0.499, 250):
        for delta in np.geomspace(1e-4, 30, 60):
            h_n = exact.verified_against(np.array([q_n, 1 - q_n]), 0, delta)[0]
            if h_n <= 1 - q_n:
                inside += 1
                assert two_coins(h_n, q_n) <= delta + 1e-12
    assert inside > 3000


# -- worst cases of delta


def worst_pair(V, delta):
    """k = V - 1 tokens with p = 1/k each and the least q that accepts them all, a token with p = 0 and the rest of q."""
    k = V - 1
    # (1/k - a)^2 = 2 delta a (1 - a), the smaller root, without cancellation.
    half = (1 / k + delta) / (1 + 2 * delta)
    a = 1 / (k**2 * (1 + 2 * delta)) / (half + np.sqrt(half**2 - 1 / (k**2 * (1 + 2 * delta))))
    a = max(a, 1 / (1 + 2 * delta)) if k == 1 else a
    return np.append(np.full(k, 1 / k), 0), np.append(np.full(k, a), 1 - k * a)


@pytest.mark.parametrize("delta", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("V", [2, 3, 6, 32, 2048])
def test_the_worst_case_of_delta_grows_with_the_vocabulary(V, delta):
    p, q = worst_pair(V, delta)
    # A hair more than delta, so that rounding does not reject.
    P = law.emitted(torch.from_numpy(p), torch.from_numpy(q), Cactus(delta * (1 + 1e-6))).numpy()
    found = exact.kl(P, q)
    assert found == pytest.approx(-np.log(q[0] * (V - 1)), abs=1e-5)
    assert np.log(2 * delta * (V - 1)) <= found <= 2 * np.log(1 + np.sqrt(2 * delta * V))


# The table of docs/law.md.
WORST = {6: (0.66, 1.42, 2.46), 2048: (5.33, 6.93, 8.32), 151_936: (9.63, 11.24, 12.62)}


@pytest.mark.parametrize("V", WORST)
def test_figures_of_the_worst_case(V):
    for delta, said in zip((0.05, 0.25, 1.0), WORST[V], strict=True):
        p, q = worst_pair(V, delta)
        assert exact.kl(p, q) == pytest.approx(said, abs=0.005)


@pytest.mark.parametrize(("V", "delta"), [(2, 0.25), (3, 0.05), (3, 1.0)])
def test_optimisation_finds_no_worse_pair(V, delta):
    """All pairs of two or three tokens, searched by differential evolution on their logits."""

    def gain(logits):
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in logits.reshape(2, V))
        return -exact.kl(exact.emitted(p, q, delta), q)

    found = -differential_evolution(gain, [(-12, 0)] * (2 * V), seed=1, maxiter=200, popsize=10, tol=1e-8).fun
    p, q = worst_pair(V, delta)
    assert found == pytest.approx(exact.kl(p, q), rel=2e-3) and found <= exact.kl(p, q) + 1e-9


# The second table of docs/law.md: of the closed form and of the KL form.
OF_FORMS = {
    2: ((0.10, 0.05), (0.41, 0.25), (1.10, 1.00)),
    3: ((0.36, 0.37), (0.86, 0.99), (1.70, 2.66)),
    6: ((0.66, 0.74), (1.42, 2.04), (2.46, 5.89)),
    41: ((1.76, 2.94), (3.09, 10.99), (4.41, 40.99)),
}


@pytest.mark.parametrize("V", OF_FORMS)
def test_the_worst_case_of_the_kl_form(V):
    """KL(h || q) <= delta exactly, and yet KL(P || q) is k delta and up to 1 more; with two tokens, just delta."""
    k = V - 1
    for delta, said in zip((0.05, 0.25, 1.0), OF_FORMS[V], strict=True):
        low, high = 1e-300, 1 / k
        for _ in range(2000):
            a = np.sqrt(low * high)
            far = two_coins(1 / k, a) > delta
            low, high = (a, high) if far else (low, a)
        p, q = np.append(np.full(k, 1 / k), 0), np.append(np.full(k, high), 1 - k * high)
        rule = Cactus(delta * (1 + 1e-4), divergence="kl")
        P = law.emitted(torch.from_numpy(p), torch.from_numpy(q), rule).numpy()
        np.testing.assert_allclose(P, p, atol=1e-9)
        closed, found = exact.kl(*worst_pair(V, delta)), exact.kl(p, q)
        assert (closed, found) == pytest.approx(said, abs=0.005)
        beyond = (k - 1) * np.log1p((1 - k * high) / (k - 1)) if k > 1 else 0.0
        assert found == pytest.approx(k * delta + beyond, rel=1e-9) and found <= k * delta + 1 - k * high + 1e-12
        assert bool(found > closed) is (V > 2)


def test_with_two_tokens_the_forms_change_places():
    """The KL form's worst is delta, no pair has more; the closed form's is ln(1 + 2 delta), until delta = 1.256."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        p, q = (torch.tensor([x, 1 - x], dtype=torch.float64) for x in rng.uniform(1e-4, 1 - 1e-4, 2))
        for delta in (0.05, 0.5, 2.0):
            assert law.kl(law.emitted(p, q, Cactus(delta, "kl")), q) <= delta + 1e-5
            assert law.kl(law.emitted(p, q, Cactus(delta)), q) <= np.log1p(2 * delta) + 1e-12
    for delta in (1.2564, 1.2565):
        assert exact.kl(*worst_pair(2, delta)) == pytest.approx(np.log1p(2 * delta))
    assert np.log1p(2 * 1.2564) > 1.2564 and np.log1p(2 * 1.2565) < 1.2565


def kl_gamma(V, delta, divergence):
    """A Gamma(delta) of the paper's Theorem 3, for KL."""
    if divergence == "taylor":
        return 2 * np.log1p(np.sqrt(2 * delta * V))
    return (V - 1) * delta + min(1.0, (V - 1) * np.sqrt(delta / 2))


@pytest.mark.parametrize("divergence", ["taylor", "kl"])
def test_the_emitted_law_converges_to_the_target(divergence):
    """KL(P || q) is at most Gamma(delta), and so falls to 0 with delta."""
    rng = np.random.default_rng(0)
    for V in (2, 3, 8, 30):
        pairs = [rng.dirichlet(np.full(V, a), size=2) for a in (0.1, 0.3, 1.0) for _ in range(40)]
        for delta in (1e-6, 1e-3, 0.05, 1.0):
            bound = kl_gamma(V, delta, divergence)
            for p, q in [*pairs, worst_pair(V, delta)]:
                p, q = (torch.from_numpy(x) for x in (p, q))
                assert law.kl(law.emitted(p, q, Cactus(delta, divergence)), q) <= bound + 1e-9
    assert kl_gamma(30, 1e-12, divergence) < 1e-4


# -- the lemma


def test_the_lemma_asks_nothing_of_an_accepted_token():
    """Interpolation has s_n = 1 below (1 - h_n) / (1 - q_n) for some n, all of them accepted always."""
    rng, asked_too_much = np.random.default_rng(0), 0
    rule = Interpolation(0.3)
    for _ in range(200):
        p, q = rng.dirichlet(np.full(12, 0.4), size=2)
        h = 0.3 * q + 0.7 * p
        below = (1 - h) / (1 - q) > 1 + 1e-12
        asked_too_much += below.any()
        assert (h[below] >= p[below]).all()
        P = law.emitted(torch.from_numpy(p), torch.from_numpy(q), rule).numpy()
        assert (P >= np.minimum(p, q) - 1e-12).all() and (P <= np.maximum(p, q) + 1e-12).all()
    assert asked_too_much > 100


class Twice(Rule):
    """Accepts every draft, so that the lemma asks nothing of its recovery, which under a cap is from (2 q - p)+."""

    name = "twice"

    def accept(self, q_n, p_n, stat):
        return q_n if self.capped else m.minimum(q_n, 0.0) + 1.0

    def recover(self, q, q_n, h_n, stat):
        return 2 * q

    def __init__(self, capped):
        self.capped = capped


def test_a_budget_asks_of_every_token_that_a_cap_may_reject():
    rng = np.random.default_rng(0)
    p, q = (torch.from_numpy(x) for x in rng.dirichlet(np.ones(6), size=2))
    np.testing.assert_allclose(law.emitted(p, q, Twice(False)), p, atol=1e-12)
    assert (law.emitted(p, q, Twice(True)) / q).max() > 1.01  # with nothing left to spend
    np.testing.assert_allclose(law.emitted(p, q, SpS()), q, atol=1e-12)


# -- a budget for a whole sequence


def random_tree(rng, V=4, length=4):
    tree, prefixes = {}, [()]
    while prefixes:
        prefix = prefixes.pop()
        tree[prefix] = rng.dirichlet(np.full(V, rng.choice([0.3, 1.0])), size=2)
        if len(prefix) < length - 1:
            prefixes += [(*prefix, x) for x in range(V)]
    return tree


def worst_log_ratio(tree, delta, budget):
    mine, target = sequence_law(tree, delta, budget)
    assert sum(mine.values()) == pytest.approx(1)
    ratios = [(mass, np.log(mass / target[s])) for s, mass in mine.items()]
    return max(r for _, r in ratios), sum(mass * r for mass, r in ratios)


@pytest.mark.parametrize("trees", [200])
def test_a_budget_is_never_overspent(trees):
    """Of every sequence of length 4: ln(P / Q) <= budget, and so KL(P || Q) <= budget."""
    rng = np.random.default_rng(0)
    reached = []
    for _ in range(trees):
        budget, delta = rng.choice([0.0, 0.1, 0.5, 1.5]), rng.choice([0.1, 1.0])
        ratio, kl = worst_log_ratio(random_tree(rng), delta, budget)
        assert ratio <= budget + 1e-9 and kl <= budget + 1e-9
        reached.append(ratio > budget - 1e-6)
    assert any(reached)


def test_a_budget_bounds_the_total_variation():
    """1 - e^-B of texts, reached by a pair with P = e^B Q; below what KL <= B gives."""
    rng = np.random.default_rng(1)
    for budget in (0.1, 0.5, 1.5):
        bound = GenerationStats("cactus", [1.0], budget=[budget]).total_variation_bound[0]
        assert bound == pytest.approx(1 - np.exp(-budget))
        for _ in range(30):
            mine, target = sequence_law(random_tree(rng), 1.0, budget)
            texts = mine.keys() | target.keys()
            assert sum(abs(mine.get(t, 0) - target.get(t, 0)) for t in texts) / 2 <= bound + 1e-12
        p, q = np.array([1.0, 0.0]), np.array([np.exp(-budget), 1 - np.exp(-budget)])
        assert np.abs(p - q).sum() / 2 == pytest.approx(bound) and exact.kl(p, q) == pytest.approx(budget)
    budget = np.linspace(1e-4, 30, 300_000)
    quotient = (1 - np.exp(-budget)) / np.sqrt(budget / 2)
    assert quotient.max() == pytest.approx(0.9025, abs=5e-5)
    assert budget[quotient.argmax()] == pytest.approx(1.256, abs=5e-4)
    assert (1 - np.exp(-budget) <= np.sqrt(1 - np.exp(-budget))).all()


def test_without_a_budget_the_log_ratio_exceeds_it():
    ratio, _ = worst_log_ratio(random_tree(np.random.default_rng(0)), 1.0, np.inf)
    assert ratio > 1.5
