"""From raw logits: kept sets and probabilities against transformers' warpers in float64, laws, and both backends against a plain
float64 account of every decision.

From logits the exponential differs in its last bits between devices, so a decision may fall otherwise where it hangs on them.
The plain account says which: a near-tie is an acceptance, a cut-off or a race whose two sides are within 1e-5 of each other.
"""

import exact
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from cactus_kernels import Cactus, RowStats, Sampling, philox, row_stats, rows_torch, sample, verify_from_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
try:
    from cactus_kernels import race_triton

    BACKENDS = ["torch", "triton"] if DEVICE == "cuda" or race_triton.INTERPRETED else ["torch"]
except ImportError:
    BACKENDS = ["torch"]
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


# -- kept sets and probabilities


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
    index = lambda request, position: (request,)  # noqa: E731
    rows = rows_torch.LogitRows(logits, index, stats.packed.numpy(), index)
    return torch.cat([rows.whole(np.array([r]), np.array([0])) for r in range(len(logits))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_sets_and_probabilities_are_those_of_transformers(backend):
    rng, kinds = np.random.default_rng(5), set()
    for _ in range(300 if backend == "torch" else 30):
        x, settings = fuzzed_row(rng)
        stats = row_stats(x[None].to(DEVICE), sampling=Sampling(**settings), entropy=True, backend=backend)
        got = probs_of(x[None], RowStats(stats.packed.cpu()))[0].double()
        expected = warped(x, **settings)
        assert stats.valid.all() and stats.argmax.item() == x.float().numpy().argmax()
        kept, wanted = got > 0, expected > 0
        lowest = x[wanted].float().min()
        # transformers' top-p may drop tokens equal to the last one that it keeps.
        assert (kept | ~wanted | (expected < 1e-30)).all() and (x[kept & ~wanted].float() == lowest).all(), settings
        if (kept == wanted).all():
            exponent = ((x.double() - x.double().max()) / settings["temperature"])[kept].abs()
            error = (got[kept] / expected[kept] - 1).abs()
            # 1e-6, and for unlikely tokens what the rounding of the exponent comes to.
            assert (error <= torch.clamp(2.4e-7 * exponent, min=1e-6)).all(), (settings, error.max())
            h = -(expected[wanted] * expected[wanted].log()).sum()
            assert abs(stats.entropy.item() - h) < 1e-5 * max(1, h)
            kinds.add((x.dtype, settings["top_k"] > 0, settings["top_p"] < 1, settings["min_p"] > 0))
    assert len(kinds) > (15 if backend == "torch" else 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("row", "says"),
    [([0.0, np.nan], "NaN"), ([np.inf, 0.0], "+inf"), ([-np.inf, -np.inf], "nothing")],
    ids=["nan", "inf", "nothing"],
)
def test_bad_rows_of_logits_are_flagged(backend, row, says):
    logits = torch.tensor([[0.0, 1.0], row], device=DEVICE)
    out = sample(logits, seed=0, offset=0, backend=backend)
    assert out.stats.valid.tolist() == [True, False], says
    assert out.token_ids[1] == -1 and out.probs[1].isnan() and 0 <= out.token_ids[0] < 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_settings_of_a_request_are_flagged(backend):
    bad = [("temperature", -1.0), ("temperature", np.nan), ("top_p", 1.5), ("min_p", -0.1), ("top_k", -3)]
    for name, value in bad:
        good = 1 if name == "top_k" else 1.0
        values = torch.tensor([good, value], dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE)
        out = sample(
            torch.zeros(2, 5, device=DEVICE), seed=0, offset=0, sampling=Sampling(**{name: values}), backend=backend
        )
        assert out.stats.valid.tolist() == [True, False], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows_take_the_lowest_of_equal_ids(backend):
    """lattice #280: the last of tied maxima won."""
    logits = torch.zeros(1, 3000, device=DEVICE)
    logits[0, [1500, 2600]] = 1.0
    out = sample(logits, seed=0, offset=0, sampling=Sampling(temperature=0.0), backend=backend)
    assert (out.token_ids.item(), out.probs.item(), out.stats.argmax.item()) == (1500, 1.0, 1500)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_probability_drawn_with_is_the_one_verified_with(backend, dtype):
    """In every bit: else acceptance would follow another law than the draft."""
    generator = torch.Generator().manual_seed(3)
    x = (4 * torch.randn(6, 1500, generator=generator)).to(dtype)
    sampling = Sampling(temperature=torch.tensor([1, 0.7, 0, 1.3, 0.6, 1]), min_p=0.01)
    on_device = sampling.to(DEVICE)
    out = sample(x.to(DEVICE), seed=1, offset=0, sampling=on_device, backend=backend)
    if backend == "torch":
        rows = probs_of(x, out.stats)
        assert torch.equal(out.probs, rows.gather(1, out.token_ids[:, None])[:, 0])
    # A drafted token with q equal to p bit for bit is accepted whatever the random word, since u < 1.
    target = torch.stack([x, x], 1).to(DEVICE)
    for seed in range(20):
        verified = verify_from_logits(
            target, x[:, None].to(DEVICE), out.token_ids[:, None], "sps", seed=seed, offset=1, sampling=on_device,
            draft_stats=RowStats(out.stats.packed[:, None]), backend=backend,
        )  # fmt: skip
        assert (verified.num_accepted == 1).all()
        if backend == "triton":
            break


# -- laws

DRAWS = 200_000
LAWS = {
    "plain": ({}, {}),
    "temperatures": ({"temperature": 0.7}, {"temperature": 1.4}),
    "target truncated": ({"top_k": 4, "top_p": 0.9}, {}),
    "draft truncated": ({}, {"top_p": 0.8}),
    "both truncated": ({"temperature": 0.8, "top_p": 0.85}, {"top_k": 3}),
    "min-p": ({"min_p": 0.1}, {"min_p": 0.2}),
    "greedy draft": ({}, {"temperature": 0.0}),
}


def pair_of_logits(V, dtype=torch.float32):
    generator = torch.Generator().manual_seed(V)
    q = 1.5 * torch.randn(V, generator=generator)
    p = q + torch.randn(V, generator=generator)
    return p.to(dtype), q.to(dtype)


def drafted_and_verified(p, q, delta, target, draft, offset=0, draws=DRAWS):
    """First tokens that come out: drafts drawn by `sample`, then verified. int64 [draws]."""
    rows = p.expand(draws, -1)
    drawn = sample(rows, seed=1, offset=offset, sampling=draft)
    out = verify_from_logits(
        q.expand(draws, 2, -1), rows[:, None], drawn.token_ids[:, None], Cactus(delta), seed=1, offset=offset,
        sampling=target, draft_stats=RowStats(drawn.stats.packed[:, None]),
    )  # fmt: skip
    out.raise_if_invalid()
    return out.token_ids[:, 0].numpy()


@pytest.mark.parametrize("delta", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_tokens_follow_the_exact_law(law, dtype, delta):
    (p, q), V = pair_of_logits(11, dtype), 11
    target, draft = law
    # In torch rows are cut one by one.
    truncated = {"top_k", "top_p", "min_p"} & {*target, *draft}
    draws = DRAWS // 8 if truncated else DRAWS
    tokens = drafted_and_verified(p, q, delta, Sampling(**target), Sampling(**draft), draws=draws)
    expected = exact.emitted(warped(p, **draft).numpy(), warped(q, **target).numpy(), delta)
    assert exact.chi_square_p_value(np.bincount(tokens, minlength=V), expected) > exact.FALSE_ALARM


def test_mixed_temperatures_each_follow_their_own_law():
    (p, q), V = pair_of_logits(9), 9
    temperatures = (0.0, 0.5, 1.0, 1.7)
    each = torch.tensor(temperatures).repeat(DRAWS // 4)
    tokens = drafted_and_verified(p, q, 0.0, Sampling(temperature=each), Sampling(), draws=DRAWS // 4 * 4)
    laws = [exact.emitted(warped(p).numpy(), warped(q, temperature=t).numpy(), 0.0) for t in temperatures]
    for k in range(4):
        counts = np.bincount(tokens[k::4], minlength=V)
        assert exact.chi_square_p_value(counts, laws[k]) > exact.FALSE_ALARM
        another = laws[(k + 1) % 4]
        if k and another.min() > 0:
            assert exact.chi_square_p_value(counts, another) < exact.FALSE_ALARM


def test_a_draft_verified_by_another_law_is_caught():
    """The deliberate error of transformers #47932: drafted at one temperature, verified at another."""
    p, q = pair_of_logits(9)
    rows = p.expand(DRAWS, -1)
    drawn = sample(rows, seed=1, offset=0, sampling=Sampling(temperature=0.5))
    out = verify_from_logits(q.expand(DRAWS, 2, -1), rows[:, None], drawn.token_ids[:, None], "sps", seed=1, offset=0)
    counts = np.bincount(out.token_ids[:, 0].numpy(), minlength=9)
    assert exact.chi_square_p_value(counts, warped(q).numpy()) < exact.FALSE_ALARM


# -- both backends against a plain float64 account


def account(target, draft, ids, delta, seed, offset, bonus):
    """(tokens, near) of one request: target probabilities float64 [m + 1 or m, V], draft [m, V'] or None, ids [m]."""
    V, m = target.shape[1], len(ids)

    def words(index, purpose, row):
        row = np.array([(offset + row) & (2**64 - 1)], dtype=np.uint64)
        low, high = (row & np.uint64(2**32 - 1)).astype(np.int64), (row >> np.uint64(32)).astype(np.int64)
        return philox.philox(np.array([seed]), index, purpose, low, high)

    def race(w, purpose, row):
        keys = w / philox.exponential(*words(np.arange(len(w)), purpose, row)).astype(np.float64)
        best = int(keys.argmax())
        second = np.delete(keys, best).max(initial=0.0)
        return best, second > keys[best] * (1 - NEAR)

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
        u = float(philox.uniform(*words(0, philox.ACCEPT, j))[0])
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
    chunk, close = race(np.add.reduceat(weights, np.arange(0, V, 1024)), philox.PICK_CHUNK, j)
    near |= close
    token, close = race(weights[1024 * chunk : 1024 * chunk + 1024], philox.PICK_TOKEN, j)
    return [*tokens, 1024 * chunk + token], near | close


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


CASES = {("torch", False): 300, ("torch", True): 150, ("triton", False): 60, ("triton", True): 12}


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "truncated"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_decision_is_that_of_a_plain_account(backend, truncated):
    rng = np.random.default_rng(int(truncated))
    seen = near_ties = 0
    for case_number in range(CASES[backend, truncated]):
        case, requests = fuzzed_batch(rng, truncated)
        moved = {k: v.to(DEVICE) if isinstance(v, (torch.Tensor, Sampling)) else v for k, v in case.items()}
        if "draft_stats" in case:
            moved["draft_stats"] = RowStats(case["draft_stats"].packed.to(DEVICE))
        out = verify_from_logits(**moved, backend=backend)
        for b, (tokens, near) in enumerate(requests):
            seen, near_ties = seen + 1, near_ties + near
            got = [t for t in out.token_ids[b].tolist() if t >= 0]
            assert near or got == tokens, (case_number, b, got, tokens)
            assert near or (out.valid[b] and out.num_accepted[b] == len(tokens) - 1), (case_number, b)
    # With 16-bit logits many tokens are equal to the last one kept, where transformers' top-p keeps but some.
    assert near_ties < (0.25 if truncated else 0.1) * seen + 3, (near_ties, seen)


@pytest.mark.skipif(len(BACKENDS) == 1, reason="needs triton")
def test_results_do_not_depend_on_how_rows_are_split():
    from cactus_kernels import rows_triton
    from cactus_kernels.rows import RowInputs, SampleOutput

    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(2, 20_000, generator=generator)).to(DEVICE)
    for sampling in (Sampling(0.8, min_p=0.01), Sampling(top_k=30, top_p=0.9)):
        inputs, outs = RowInputs(x, sampling, True, 5, 7), []
        for splits, num_warps in ((1, 4), (3, 4), (2, 8), (5, 1)):
            ids, probs = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, device=DEVICE)
            out = SampleOutput(ids, probs, RowStats(torch.zeros(2, 8, device=DEVICE)))
            rows_triton.row_stats(inputs, out, splits=splits, num_warps=num_warps)
            outs.append((ids, probs, out.stats.packed))
        for other in outs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


# -- what is refused, before any work

LOGITS, DRAFT, IDS = torch.zeros(2, 4, 9), torch.zeros(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64)
STATS = row_stats(DRAFT.flatten(0, 1)).packed.view(2, 3, 8)
REFUSED = {
    "an empty dict": ({"sampling": {}}, TypeError, "sampling must be a Sampling, got dict"),
    "draft sampling": ({"draft_sampling": 0.7}, TypeError, "draft_sampling must be a Sampling, got float"),
    "lengths": ({"sampling": Sampling(torch.ones(3))}, ValueError, "settings for 3 requests in a batch of 2"),
    "stats of others": ({"draft_stats": RowStats(STATS[:, :2])}, ValueError, "must be those of draft_logits"),
    "a tensor of stats": ({"draft_stats": STATS}, TypeError, "draft_stats must be a RowStats, got Tensor"),
    "stats and sampling": (
        {"draft_stats": RowStats(STATS), "draft_sampling": Sampling()}, ValueError, "leave draft_sampling out"
    ),
    "probs and logits": ({"draft_probs": DRAFT}, ValueError, "draft_probs and draft_logits are both given"),
    "map without rows": ({"draft_logits": None, "row_map": IDS[:, 0]}, ValueError, "belong to draft rows"),
    "map of floats": ({"row_map": torch.zeros(2)}, TypeError, "row_map must be int32 or int64"),
    "map of others": ({"row_map": IDS[0]}, ValueError, r"row_map must have shape \(2,\)"),
    "slots too short": (
        {"draft_logits": DRAFT[:, :2], "row_map": IDS[:, 0]}, ValueError, r"\[slots, at least 3, V\] beside row_map"
    ),
    "bonus and its rows": ({"bonus_token_ids": IDS[:, 0]}, ValueError, r"target_logits must have shape \[2, 3, V\]"),
    "bonus of two dimensions": (
        {"target_logits": LOGITS[:, :3], "bonus_token_ids": IDS[:, :1]}, ValueError, "bonus_token_ids must have 1 dim"
    ),
    "float64": ({"target_logits": LOGITS.double()}, TypeError, "target_logits must be float32 .*, got float64: cast"),
    "a list": ({"target_logits": LOGITS.tolist()}, TypeError, "target_logits must be a tensor, got list"),
    "columns": ({"target_logits": LOGITS.mT.contiguous().mT}, ValueError, "contiguous in its last dimension"),
    "elsewhere": ({"draft_logits": DRAFT.to("meta")}, ValueError, "all tensors must be on the target's device"),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("given", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_verification_from_logits_refuses(given, error, says, backend):
    arguments = {"target_logits": LOGITS, "draft_logits": DRAFT, "draft_token_ids": IDS, "rule": "sps"} | given
    with pytest.raises(error, match=says):
        verify_from_logits(**arguments, seed=0, offset=0, backend=backend)


@pytest.mark.parametrize("sampling", [{}, 0, "", 0.7], ids=repr)
def test_drawing_refuses_what_is_no_sampling(sampling):
    """Also what is false, which must not be taken for the default."""
    for call in (
        lambda s: sample(LOGITS[:, 0], seed=0, offset=0, sampling=s),
        lambda s: row_stats(LOGITS[:, 0], sampling=s),
    ):
        with pytest.raises(TypeError, match="sampling must be a Sampling"):
            call(sampling)


SETTINGS_REFUSED = {
    "temperature": [(-1, ValueError), (np.nan, ValueError), (np.inf, ValueError), ("1", TypeError), (True, TypeError)],
    "top_k": [(-1, ValueError), (2**31, ValueError), (1.5, TypeError), (torch.ones(2), TypeError)],
    "top_p": [(1.1, ValueError), (-0.1, ValueError), (None, TypeError), (torch.ones(2, dtype=torch.int64), TypeError)],
    "min_p": [(2, ValueError), (torch.ones(2, 2), ValueError)],
}


@pytest.mark.parametrize(
    ("name", "value", "error"), [(name, *case) for name, cases in SETTINGS_REFUSED.items() for case in cases], ids=str
)
def test_settings_refused(name, value, error):
    with pytest.raises(error, match=name):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    "packed", [[1.0], torch.zeros(2, 7), torch.zeros(2, 8, dtype=torch.int32), torch.zeros(8, 2).T]
)
def test_statistics_refused(packed):
    with pytest.raises((TypeError, ValueError), match="packed must be"):
        RowStats(packed)
