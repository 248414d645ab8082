"""Verification of one request in plain torch, a token at a time, to be read beside the paper: the oracle of parity.

for each drafted token n, with its target row q and draft row p:                        (Hao & Mou 2026, Algorithm 1)
    accept n with probability min(1, h_n / p_n), h_n = gamma*(q_n) for Cactus
    else emit a token from norm((h - p)+), and stop                                      (r of a rule stands for h off n)
if all were accepted, emit a token from the target's next row"""

import numpy as np
import torch

from . import philox, rules
from .definition import ACCEPT, CHUNK, MAX_PROB, ONE, PICK_CHUNK, PICK_TOKEN
from .host import clip, statistics


def verify(target, draft, token_ids, rule, *, seed, offset, budget=None):  # noqa: C901 (the whole algorithm in one piece)
    """Verify the draft of one request: (tokens emitted, number accepted, whether all values that count are good, nats spent).
    target: fp32 [m + 1, V]. draft: fp32 [m, V_draft], or None: one-hot. token_ids: m ints, -1 from where the draft ends. rule:
    one that judges token by token, its strengths numbers. seed, offset: ints. budget: nats, or None, as of lossless rules.
    """
    if draft is None:
        draft = torch.from_numpy(np.float32(np.arange(target.shape[1]) == np.array(token_ids)[:, None]))
    V, size, tokens, left = target.shape[1], max(target.shape[1], draft.shape[1]), list[int](), None
    target, draft = (torch.nn.functional.pad(rows, (0, size - rows.shape[1], 0, 1)) for rows in (target, draft))
    if not all(0 <= s < float("inf") for s in rule.strengths) or not (budget is None or budget >= 0):
        return tokens, 0, False, 0.0
    if budget is not None:
        whole = left = torch.tensor(int(min(budget, rules.MOST) * rules.UNIT), dtype=torch.int64, device="cpu")
    for j, (n, q, p) in enumerate(zip([*token_ids, -1], target, draft, strict=False)):
        nats, at = 0.0 if left is None else int(whole - left) / rules.UNIT, (seed, (offset + j) % 2**64)
        if n == -1:
            token = [] if bad(q) else draw(q[:V], at)
            return [*tokens, *token], j, bool(token), nats
        if not 0 <= n < size or bad(q[n]) or bad(p[n]):
            return tokens, j, False, nats
        q_n, p_n, u = q[n].clamp(max=1), p[n].clamp(max=1), philox.uniform(*words(at, 0, ACCEPT))[0]
        solves = rule.solves and not rule.solves.where_rejected and bool(u * p_n >= q_n)  # c >= 1 accepts others
        if (rule.statistics and bad(q)) or (solves and (bad(q) or bad(p))):
            return tokens, j, False, nats
        stat = tuple(statistics.of_rows(name, q[None, :V])[0] for name in rule.statistics)
        stat = (solved(rule, p, q) if solves else (torch.ones_like(u),) * 2) if rule.solves else stat
        h_n = rule.accept(q_n, p_n, stat, *rule.strengths)
        if left is not None:
            spends, h_n = rules.spend(h_n, q_n, p_n), torch.minimum(h_n, q_n * rules.cap(left))
        if u * p_n < h_n and n < V:
            tokens, left = [*tokens, n], None if left is None else (left - spends).clamp(min=0)
            continue
        if bad(q) or bad(p if rule.solves else p[: V * rule.subtracts_draft]):
            return tokens, j, False, nats
        r = rule.recover(q, q_n, h_n, solved(rule, p, q) if rule.solves else stat, *rule.strengths)
        r = r.clone() if left is None else torch.maximum(r, q * rules.room(q_n, h_n))
        r[n] = 0
        token = draw((r - p).clamp(min=0)[:V] if rule.subtracts_draft else r[:V], at) or draw(r[:V], at)
        return [*tokens, *token], j, bool(token), nats


def solved(rule, p, q):  # b and c
    strength = np.float32(rule.strengths[rule.solves.strength])
    return tuple(map(p.new_tensor, clip.solve(p.numpy(), q.numpy(), strength, rule.solves.what)))


def bad(x):
    return not bool(((x >= 0) & (x <= MAX_PROB)).all())


def words(at, index, purpose):
    return philox.philox(
        torch.tensor([at[0]], dtype=torch.int64, device="cpu"), index, purpose, at[1] % 2**32, at[1] >> 32
    )


def draw(w, at, purposes=(PICK_CHUNK, PICK_TOKEN)):
    """A token from weights [V] by two exponential races, between chunks and in the winning one: [token], or [] if all are 0."""
    sums = torch.stack([(chunk * ONE).long().sum() for chunk in w.split(CHUNK)])
    c = CHUNK * race(sums, at, purposes[0])
    return [c + race(w[c : c + CHUNK], at, purposes[1])] if sums.any() else []


def race(w, at, purpose):
    return int((w / philox.exponential(*words(at, np.arange(len(w)), purpose))).argmax())
