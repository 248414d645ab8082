"""Fuzzed rows and batches of logits, and a plain float64 account of every decision that the package makes of them.

From logits the exponential differs in its last bits between devices, so a decision may fall otherwise where it hangs on them.
The account says which: a near-tie is an acceptance, a cut-off or a race whose two sides are within 1e-5 of each other.
"""

import numpy as np
import torch
from transformers.generation import logits_process as hf

from cactus_kernels import Cactus, RowStats, Sampling, definition, philox, row_stats, sample, verify_from_logits
from cactus_kernels.host.rows import LogitRows, Place
from support import exact

NEAR = 1e-5


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of logits [..., V] in float64, by transformers' warpers in the order of `generate`."""
    x = logits.double().reshape(-1, logits.shape[-1])
    if temperature == 0:
        ids = torch.from_numpy(x.numpy().argmax(1))
        return torch.nn.functional.one_hot(ids, x.shape[1]).double().reshape(logits.shape)
    # torch has no float64 infinity less than itself: the warpers need a finite maximum, which the rows here have.
    x = hf.TemperatureLogitsWarper(float(temperature))(None, x)
    if top_k > 0:
        x = hf.TopKLogitsWarper(int(top_k))(None, x)
    if top_p < 1:
        x = hf.TopPLogitsWarper(float(top_p))(None, x)
    if min_p > 0:
        x = hf.MinPLogitsWarper(float(min_p))(None, x)
    return x.softmax(-1).reshape(logits.shape)


def fuzzed_row(rng):
    """Logits [V] of one of many kinds, and settings."""
    V = int(rng.choice([1, 2, 7, 50, 1023, 1025, 2049], p=[0.1, 0.1, 0.2, 0.3, 0.1, 0.1, 0.1]))
    x = torch.from_numpy(rng.normal(size=V)) * float(rng.choice([0.3, 2, 5]))
    kind = rng.choice(["plain", "plain", "plain", "one", "equal", "huge", "huge fp32", "ties", "half masked"])
    dtype = torch.float32
    if kind in ("plain", "ties"):
        dtype = [torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]
    if kind == "one":
        x[:] = -np.inf
        x[rng.integers(V)] = float(rng.normal())
    elif kind == "equal":
        x[:] = float(rng.normal())
    elif kind == "huge":
        x, dtype = (x * 1e3).clamp(-1e4, 1e4), torch.float16
    elif kind == "huge fp32":
        x = torch.sign(x) * 3e38
    elif kind == "ties":
        x = x.round()
    elif kind == "half masked":
        x[torch.from_numpy(rng.random(V) < 0.5)] = -np.inf
        x[rng.integers(V)] = 1.0
    settings = {
        "temperature": float(rng.choice([1.0, 1.0, 0.5, 0.7, 1.3, 2.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 20, V, V + 7])),
        "top_p": float(rng.choice([1.0, 1.0, 0.9, 0.5, 0.1, 0.0])),
        "min_p": float(rng.choice([0.0, 0.0, 0.0, 0.02, 0.5, 1.0])),
    }
    return x.to(dtype), settings


def probs_of(logits, stats):
    """Rows [R, V] as verification makes them of logits and statistics."""
    rows = LogitRows(logits[:, None], Place(), stats.packed.numpy()[:, None])
    return torch.cat([rows.whole(np.array([r]), np.array([0])) for r in range(len(logits))])


def difference_of_statistics(x, settings, backend, device):
    """What is wrong with the statistics of a row of logits [V], against transformers' warpers in float64, in words; or None.
    And whether its kept set is theirs."""
    stats = row_stats(x[None].to(device), sampling=Sampling(**settings), entropy=True, backend=backend)
    stats = RowStats(stats.packed.cpu())
    got, expected = probs_of(x[None], stats)[0].double(), warped(x, **settings)
    if not stats.valid.all() or stats.argmax.item() != x.float().numpy().argmax():
        return f"valid {stats.valid.tolist()}, arg max {stats.argmax.item()} ({settings})", False
    kept, wanted = got > 0, expected > 0
    # transformers' top-p may drop tokens equal to the last one that it keeps.
    missing, more = wanted & ~kept & (expected >= 1e-30), kept & ~wanted
    if missing.any() or (x[more].float() != x[wanted].float().min()).any():
        return f"{missing.sum()} of {wanted.sum()} tokens are not kept, {more.sum()} more are ({settings})", False
    if more.any() or (wanted & ~kept).any():
        return None, False
    exponent = ((x.double() - x.double().max()) / settings["temperature"])[kept].abs()
    error = (got[kept] / expected[kept] - 1).abs()
    # 1e-6, and for unlikely tokens what the rounding of the exponent comes to.
    if (error > torch.clamp(2.4e-7 * exponent, min=1e-6)).any():
        return f"probabilities are off by {error.max():.1e} ({settings})", True
    h = -(expected[wanted] * expected[wanted].log()).sum()
    if abs(stats.entropy.item() - h) >= 1e-5 * max(1, h):
        return f"entropy {stats.entropy.item()} for {h} ({settings})", True
    return None, True


def _words(seed, position, index, purpose):
    row = np.array([position & (2**64 - 1)], dtype=np.uint64)
    low, high = (row & np.uint64(2**32 - 1)).astype(np.int64), (row >> np.uint64(32)).astype(np.int64)
    return philox.philox(np.array([seed]), index, purpose, low, high)


def _race(weights, seed, position, of_chunks, of_tokens):
    """The token that wins by weights float64 [V], and whether it was close."""

    def race(w, purpose):
        keys = w / philox.exponential(*_words(seed, position, np.arange(len(w)), purpose)).astype(np.float64)
        best = int(keys.argmax())
        second = np.delete(keys, best).max(initial=0.0)
        return best, second > keys[best] * (1 - NEAR)

    chunk, close = race(np.add.reduceat(weights, np.arange(0, len(weights), 1024)), of_chunks)
    token, close_too = race(weights[1024 * chunk : 1024 * chunk + 1024], of_tokens)
    return 1024 * chunk + token, close or close_too


def account(target, draft, ids, delta, seed, offset, bonus):
    """(tokens, near) of one request: target probabilities float64 [m + 1 or m, V], draft [m, V'] or None, ids [m]."""
    V, m = target.shape[1], len(ids)
    tokens, near = [], False
    for j in range(m + 1):
        n = ids[j] if j < m else -1
        if n < 0:
            if j == m and bonus is not None:
                return [*tokens, bonus], near
            weights = target[j]
            break
        q_n = target[j, n] if n < V else 0.0
        p_n = 1.0 if draft is None else draft[j, n] if n < draft.shape[1] else 0.0
        h = exact.verified_against(target[j], n, delta) if n < V else target[j]
        h_n = h[n] if n < V else 0.0
        u = float(philox.uniform(*_words(seed, offset + j, 0, definition.ACCEPT))[0])
        near |= abs(u * p_n - h_n) <= NEAR * max(h_n, q_n, 1e-300) and h_n > 0
        if u * p_n < h_n:
            tokens.append(n)
            continue
        p = np.zeros(V)
        if draft is not None:
            p[: draft.shape[1]] = draft[j, :V]
        weights = np.maximum(h - p, 0) if draft is not None else h.copy()
        near |= bool((np.abs(h - p) < NEAR * np.maximum(h, p)).any() and weights.max() < 1e-4)
        if n < V:
            weights[n] = 0
        if weights.sum() < 1e-6:  # what is left is rounding
            return tokens, True
        break
    token, close = _race(weights, seed, offset + j, definition.PICK_CHUNK, definition.PICK_TOKEN)
    return [*tokens, token], near | close


def near_cut(logits, settings):
    """Whether the cut-off of a row is close to falling elsewhere."""
    x = logits.double().sort(descending=True).values
    gaps = 0.0
    for change in (1 - NEAR, 1 + NEAR):
        top_p = settings["top_p"] if settings["top_p"] == 1 else min(settings["top_p"] * change, 1.0)
        moved = settings | {"top_p": top_p, "min_p": min(settings["min_p"] * change, 1.0)}
        gaps += ((warped(logits, **moved) > 0) != (warped(logits, **settings) > 0)).sum()
    kept = warped(logits, **settings) > 0
    ties = settings["temperature"] > 0 and settings["top_p"] < 1 and (x.diff() == 0).any() and not kept.all()
    return bool(gaps) or bool(ties)


def fuzzed_batch(rng, truncated):
    """Arguments of `verify_from_logits`, and for each request what `account` needs."""
    B, m = int(rng.integers(1, 4)), int(rng.integers(0, 5))
    V = int(rng.choice([2, 7, 300, 1025] if truncated else [2, 7, 300, 1025, 3000]))
    V_draft = V if rng.random() < 0.7 else max(1, V + int(rng.choice([-1, 3, -V // 2])))
    flat = rng.random() < 0.5
    lengths = rng.integers(0, m + 1, size=B) if flat else np.full(B, m)
    N, dtype = int(lengths.sum()), [torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]
    has_bonus = rng.random() < 0.75 or not flat
    draft_kind = rng.choice(["logits", "stats", "probs", "one-hot"])
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    rows = 3 * torch.randn(N + B, max(V, V_draft), generator=generator)
    of_target = np.arange(N) + np.repeat(np.arange(B), lengths)
    draft = (rows[of_target] + torch.randn(N, rows.shape[1], generator=generator))[:, :V_draft].to(dtype)
    target = rows[:, :V].to(dtype)
    if not has_bonus:
        target = target[of_target]

    def settings(truncates):
        one = {"temperature": float(rng.choice([1.0, 1.0, 0.7, 1.3, 0.0])), "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if truncates:
            one |= {"top_k": int(rng.choice([0, 3, 40])), "top_p": float(rng.choice([1.0, 0.9, 0.6]))}
        if rng.random() < 0.3:
            one["min_p"] = 0.03
        return one

    per_target = [settings(truncated) for _ in range(B)]
    per_draft = [settings(truncated and rng.random() < 0.5) for _ in range(B)] if rng.random() < 0.5 else per_target

    def as_sampling(per_request):
        return Sampling(
            torch.tensor([s["temperature"] for s in per_request]),
            torch.tensor([s["top_k"] for s in per_request]) if truncated else 0,
            torch.tensor([s["top_p"] for s in per_request]) if truncated else 1.0,
            torch.tensor([s["min_p"] for s in per_request]),
        )

    cu = np.concatenate([[0], np.cumsum(lengths)])
    request = np.repeat(np.arange(B), lengths)
    p = [warped(draft[i], **per_draft[request[i]]) for i in range(N)]
    ids = torch.tensor([int(torch.multinomial(x, 1, generator=generator)) for x in p], dtype=torch.int64)
    if N and rng.random() < 0.3:
        ids[rng.integers(N)] = int(rng.choice([-1, V - 1, V_draft - 1]))
    if draft_kind == "one-hot":
        ids = ids.clamp(max=V - 1)
    delta = float(rng.choice([0.0, 0.3, 1.0]))
    case = {
        "rule": Cactus(delta), "draft_token_ids": ids, "sampling": as_sampling(per_target), "draft_logits": draft,
        "seed": torch.from_numpy(rng.integers(-(2**63), 2**63, size=B)),
        "offset": torch.from_numpy(rng.integers(0, 2**40, size=B)),
        "target_logits": target, "cu_draft_tokens": torch.from_numpy(cu), "max_draft_tokens": int(m),
    }  # fmt: skip
    case["bonus_token_ids"] = None if has_bonus else torch.from_numpy(rng.integers(0, V, size=B))
    if draft_kind == "logits":
        case["draft_sampling"] = None if per_draft is per_target else as_sampling(per_draft)
    elif draft_kind == "stats":
        each = [getattr(as_sampling(per_draft), n) for n in ("temperature", "top_k", "top_p", "min_p")]
        each = [x[request] if isinstance(x, torch.Tensor) else x for x in each]
        case["draft_stats"] = row_stats(draft, sampling=Sampling(*each))
    elif draft_kind == "probs":
        case |= {"draft_logits": None, "draft_probs": torch.stack(p).float() if N else torch.zeros(0, V_draft)}
    else:
        case["draft_logits"] = None
    if not flat:
        case |= {"cu_draft_tokens": None, "max_draft_tokens": None, "draft_token_ids": ids.view(B, m)}
        case["target_logits"] = target.view(B, m + 1, V)
        for name in ("draft_logits", "draft_probs"):
            if case.get(name) is not None:
                case[name] = case[name].view(B, m, V_draft)
        if "draft_stats" in case:
            case["draft_stats"] = RowStats(case["draft_stats"].packed.view(B, m, 8))
    if case["draft_logits"] is not None and rng.random() < 0.4:  # by slot, in reverse
        slots, K = B + 2, max(m, 1) + 1
        held = torch.full((slots, K, V_draft), float("nan"), dtype=dtype)
        stats = torch.full((slots, K, 8), float("nan"))
        for b in range(B):
            held[B - b, : lengths[b]] = draft[cu[b] : cu[b + 1]]
            if "draft_stats" in case:
                stats[B - b, : lengths[b]] = case["draft_stats"].packed.reshape(N, 8)[cu[b] : cu[b + 1]]
        case |= {"draft_logits": held, "row_map": torch.arange(B, 0, -1)}
        if "draft_stats" in case:
            case["draft_stats"] = RowStats(stats)
    requests = []
    for b in range(B):
        first, own = cu[b] + (b if has_bonus else 0), per_target[b]
        of_request = target[first : first + lengths[b] + has_bonus]
        q = np.stack([warped(x, **own).numpy() for x in of_request]) if len(of_request) else np.zeros((0, V))
        one_hot = draft_kind == "one-hot"
        of_draft = None if one_hot else np.stack([x.numpy() for x in p[cu[b] : cu[b + 1]]] or [np.zeros(V_draft)])
        tokens, near = account(
            q, of_draft, ids[cu[b] : cu[b + 1]].tolist(), delta, int(case["seed"][b]), int(case["offset"][b]),
            None if has_bonus else int(case["bonus_token_ids"][b]),
        )  # fmt: skip
        near |= any(near_cut(x, own) for x in of_request)
        near |= not one_hot and any(near_cut(x, per_draft[b]) for x in draft[cu[b] : cu[b + 1]])
        requests.append((tokens, near))
    return case, requests


def on(device, case):
    """A case with its tensors on a device."""
    moved = {k: v.to(device) if isinstance(v, (torch.Tensor, Sampling)) else v for k, v in case.items()}
    if "draft_stats" in case:
        moved["draft_stats"] = RowStats(case["draft_stats"].packed.to(device))
    return moved


def differences_of_a_batch(case, requests, backend, device):
    """What differs from the account in each request of a `fuzzed_batch`, in words or None, near-ties left out."""
    out = verify_from_logits(**on(device, case), backend=backend)
    found = []
    for b, (tokens, near) in enumerate(requests):
        got = [t for t in out.token_ids[b].tolist() if t >= 0]
        right = got == tokens and out.valid[b].item() and out.num_accepted[b].item() == len(tokens) - 1
        found.append(None if near or right else f"request {b}: {got} for {tokens}, valid {out.valid[b].item()}")
    return found


def difference_of_a_draw(x, settings, seed, offset, backend, device):
    """What differs from the account in a draw from a row of logits [V], in words or None; and whether it is a near-tie."""
    out = sample(x[None].to(device), seed=torch.tensor([seed], device=device), offset=offset, sampling=Sampling(**settings),
                 backend=backend)  # fmt: skip
    expected = warped(x, **settings)
    token, close = _race(expected.numpy(), seed, offset, definition.DRAFT_CHUNK, definition.DRAFT_TOKEN)
    if close or near_cut(x, settings):
        return None, True
    got, p = out.token_ids.item(), out.probs.item()
    exponent = (x[token].double() - x.double().max()).abs().item() / (settings["temperature"] or 1.0)
    if got != token or abs(p / expected[token].item() - 1) > 4e-6 + 5e-7 * exponent:
        return f"{got} with probability {p} for {token} with {expected[token].item()} ({settings})", False
    return None, False
