"""Emitted tokens, laws of whole texts and the least divergence: what tests of laws are made of."""

import numpy as np
import torch

from cactus_kernels import law
from cactus_kernels.verification import verify

from . import exact

DRAWS = 100_000


def pair(V, seed=0):
    """Draft and target, p, q fp32 [V]. They agree roughly, but for token 0: the draft gives it more than half and the
    target a twentieth, so that every rule here rejects it often, with an h far from q. The target's last token, across a
    chunk's edge, has a good share."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(V, generator=generator)
    logits[-1] = logits[1:].max() + 1
    p = 0.45 * (logits + torch.randn(V, generator=generator)).softmax(0)
    q = 0.95 * logits[1:].softmax(0)
    p[0] += 0.55
    return p, torch.cat([torch.tensor([0.05]), q])


def emitted_tokens(p, q, rule, draws, seed=1):
    """Tokens emitted at the drafted position, [draws]; drafts come from numpy's generator, not from the package's."""
    V = len(p)
    p64 = p.double().numpy()
    drafted = torch.from_numpy(np.random.default_rng(seed).choice(V, size=draws, p=p64 / p64.sum()))
    size = min(draws, 2**21 // min(V, 1024))
    tokens = []
    for i in range(0, draws, size):
        ids = drafted[i : i + size, None]
        B = len(ids)
        out = verify(q.expand(B, 2, V), p.expand(B, 1, V), ids, rule, seed=seed + i, offset=i)
        out.raise_if_invalid()
        tokens.append(out.token_ids[:, 0])
    return torch.cat(tokens)


def p_value(tokens, expected):
    return exact.chi_square_p_value(np.bincount(tokens.numpy(), minlength=len(expected)), expected)


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


def least(p, q, acceptance):
    """The clip(p, b q, c q) of each row that accepts so much, at least what SpS accepts: by bisection, [N, V]."""

    def solve(rising):
        low, high = np.full((len(p), 1), 1e-300), np.full((len(p), 1), 1e300)
        for _ in range(70):
            middle = np.sqrt(low) * np.sqrt(high)
            above = rising(middle) > 0
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return low

    c = np.maximum(solve(lambda c: np.minimum(p, c * q).sum(1, keepdims=True) - acceptance[:, None]), 1)
    b = np.minimum(solve(lambda b: np.clip(p, b * q, c * q).sum(1, keepdims=True) - 1), 1)
    return np.clip(p, b * q, c * q)


def assert_no_less_than_least(p, q, P, acceptance):
    # An acceptance is known to some 1e-13, and KL(q || P) depends on that where nearly every draft is accepted.
    best = torch.from_numpy(least(p.numpy(), q.numpy(), acceptance.numpy() - 1e-12))
    for name, mine, theirs in zip(
        law.Divergences._fields, law.divergences(best, q), law.divergences(P, q), strict=True
    ):
        assert (mine <= theirs + 1e-9 * (1 + mine)).all(), name
