"""The statements of docs/law.md that need more than one law: worst cases of delta, optimality, a budget for a sequence."""

import exact
import numpy as np
import pytest
import torch
from scipy.optimize import differential_evolution

from cactus_kernels import law
from cactus_kernels.rules import Cactus

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


@pytest.mark.parametrize("V", [6, 41])
def test_the_kl_form_has_a_worse_worst_case(V):
    """KL(h || q) <= delta exactly, and yet KL(P || q) is close to (V - 1) delta + 1."""
    k, delta = V - 1, 0.25
    low, high = 1e-300, 1 / k
    for _ in range(2000):
        a = np.sqrt(low * high)
        far = exact.kl(np.array([1 / k, 1 - 1 / k]), np.array([a, 1 - a])) > delta
        low, high = (a, high) if far else (low, a)
    p, q = np.append(np.full(k, 1 / k), 0), np.append(np.full(k, high), 1 - k * high)
    rule = Cactus(delta * (1 + 1e-4), divergence="kl")
    P = law.emitted(torch.from_numpy(p), torch.from_numpy(q), rule).numpy()
    np.testing.assert_allclose(P, p, atol=1e-9)
    assert exact.kl(*worst_pair(V, delta)) < exact.kl(p, q) <= k * delta + 1
    assert exact.kl(p, q) > 0.9 * k * delta


# -- a budget for a whole sequence


def spend(p, q, delta, left):
    """Cactus with h_n capped at q_n e^left: the mass of each token accepted and recovered, and what its acceptance spends."""
    V = len(q)
    accepted, recovered, uncapped = np.zeros(V), np.zeros(V), np.zeros(V)
    for n in np.flatnonzero(p):
        gamma = exact.verified_against(q, n, delta)[n]
        h_n = min(gamma, q[n] * np.exp(left))
        accepted[n] = min(p[n], h_n)
        if q[n] > 0:
            uncapped[n] = max(0, np.log(min(p[n], gamma) / q[n]))
        if p[n] - accepted[n] > 1e-15:
            residual = np.maximum((q * (1 - h_n) / (1 - q[n]) if q[n] < 1 else 0 * q) - p, 0)
            residual[n] = 0
            recovered += (p[n] - accepted[n]) * residual / residual.sum()
    return accepted, recovered, uncapped


def sequence_law(tree, delta, budget, drafted=2, length=4):
    """The laws of all sequences under verification with a budget and under the target: {sequence: probability}, by
    enumeration. Rounds draft `drafted` tokens, end with the first rejection or a bonus token, and start again."""
    mine, target = {}, {}

    def walk(prefix, place, spent, mass, q_mass):
        """place: tokens accepted in this round. spent: the sum of the uncapped a's, as an implementation keeps it."""
        if mass == 0:
            return
        if len(prefix) == length:
            mine[prefix] = mine.get(prefix, 0) + mass
            target[prefix] = q_mass
            return
        p, q = tree[prefix]
        if place == drafted:
            for x in range(len(q)):
                walk((*prefix, x), 0, spent, mass * q[x], q_mass * q[x])
            return
        accepted, recovered, a = spend(p, q, delta, max(0.0, budget - spent))
        for x in range(len(q)):
            walk((*prefix, x), place + 1, spent + a[x], mass * accepted[x], q_mass * q[x])
            walk((*prefix, x), 0, spent, mass * recovered[x], q_mass * q[x])

    walk((), 0, 0.0, 1.0, 1.0)
    return mine, target


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


def test_without_a_budget_the_log_ratio_exceeds_it():
    ratio, _ = worst_log_ratio(random_tree(np.random.default_rng(0)), 1.0, np.inf)
    assert ratio > 1.5
