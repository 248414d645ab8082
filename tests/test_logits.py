"""From raw logits: kept sets and probabilities against transformers' warpers in float64, laws, and both backends against a plain
float64 account of every decision, near-ties excepted (tests/logit_cases.py).
"""

import numpy as np
import pytest
import torch
from support import exact
from support.logit_cases import (
    difference_of_a_draw,
    difference_of_statistics,
    differences_of_a_batch,
    fuzzed_batch,
    fuzzed_row,
    probs_of,
    warped,
)
from support.rule_laws import LAWS as RULE_LAWS
from support.rule_laws import draws_of

from cactus_kernels import (
    Cactus,
    RowStats,
    SampleOutput,
    Sampling,
    TopK,
    Typical,
    row_stats,
    sample,
    verify,
    verify_from_logits,
)
from cactus_kernels.contract import Logits
from cactus_kernels.host.rows import Place, rows_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
try:
    from cactus_kernels.kernels import race as kernel_race

    BACKENDS = ["torch", "triton"] if DEVICE == "cuda" or kernel_race.INTERPRETED else ["torch"]
except ImportError:
    BACKENDS = ["torch"]


# -- kept sets and probabilities


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_sets_and_probabilities_are_those_of_transformers(backend):
    rng, kinds = np.random.default_rng(5), set()
    for _ in range(300 if backend == "torch" else 30):
        x, settings = fuzzed_row(rng)
        difference, same = difference_of_statistics(x, settings, backend, DEVICE)
        assert difference is None
        if same:
            kinds.add((x.dtype, settings["top_k"] > 0, settings["top_p"] < 1, settings["min_p"] > 0))
    assert len(kinds) > (15 if backend == "torch" else 8)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_small_probabilities_come_to_beside_a_large_one(backend, temperature):
    """Of a large vocabulary: added to the large one by one, each would be lost in rounding."""
    x = torch.full((2, 151_936), -17.4 * temperature, device=DEVICE)
    x[0, 3] = x[1, 70_000] = 0
    norm = row_stats(x, sampling=Sampling(temperature), backend=backend).norm
    expected = (x.double() / temperature).softmax(-1).amax(1)
    assert (norm / expected - 1).abs().max() < 1e-6 and expected.max() < 0.996


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("row", "says"),
    [([0.0, np.nan], "NaN"), ([np.inf, 0.0], "+inf"), ([-np.inf, -np.inf], "nothing")],
    ids=["nan", "inf", "nothing"],
)
def test_bad_rows_of_logits_are_flagged(backend, row, says):
    logits = torch.tensor([[0.0, 1.0], row], device=DEVICE)
    out = sample(logits, seed=0, offset=0, backend=backend)
    assert out.valid.tolist() == out.stats.valid.tolist() == [True, False], says
    assert out.token_ids[1] == -1 and out.probs[1].isnan() and 0 <= out.token_ids[0] < 2
    with pytest.raises(ValueError, match=r"^bad values in rows \[1\]: logits must not hold NaN"):
        out.raise_if_invalid()
    sample(logits[:1], seed=0, offset=0, backend=backend).raise_if_invalid()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_settings_of_a_request_are_flagged(backend):
    bad = [("temperature", -1.0), ("temperature", np.nan), ("top_p", 1.5), ("min_p", -0.1), ("top_k", -3)]
    for name, value in bad:
        good = 1 if name == "top_k" else 1.0
        values = torch.tensor([good, value], dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE)
        out = sample(
            torch.zeros(2, 5, device=DEVICE), seed=0, offset=0, sampling=Sampling(**{name: values}), backend=backend
        )
        assert out.valid.tolist() == out.stats.valid.tolist() == [True, False], name


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
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_tokens_follow_the_exact_law(law, dtype, delta):
    (p, q), V = pair_of_logits(11, dtype), 11
    target, draft = law
    # In torch rows are cut one by one.
    truncated = {"top_k", "top_p", "min_p"} & {*target, *draft}
    draws = DRAWS // 10 if truncated else DRAWS // 4
    tokens = drafted_and_verified(p, q, delta, Sampling(**target), Sampling(**draft), draws=draws)
    expected = exact.emitted(warped(p, **draft).numpy(), warped(q, **target).numpy(), delta)
    assert exact.chi_square_p_value(np.bincount(tokens, minlength=V), expected) > exact.FALSE_ALARM


CUT = {"whole": {}, "truncated": {"temperature": 0.8, "top_k": 7, "top_p": 0.95}}


def verified_by(rule, settings, draws, backend, V=11):
    """First tokens that come out under a rule where draft and target have the same settings, int64 [draws]; their law's p, q."""
    p, q = pair_of_logits(V)
    sampling, rows = Sampling(**settings), p.expand(draws, -1)
    drawn = sample(rows, seed=2, offset=0, sampling=sampling, backend="torch")
    out = verify_from_logits(
        q.expand(draws, 2, -1).to(DEVICE), rows[:, None].to(DEVICE), drawn.token_ids[:, None].to(DEVICE), rule, seed=2,
        offset=0, sampling=sampling, backend=backend,
    )  # fmt: skip
    out.raise_if_invalid()
    return out.token_ids[:, 0].cpu().numpy(), warped(p, **settings).numpy(), warped(q, **settings).numpy()


@pytest.mark.parametrize("settings", CUT.values(), ids=CUT)
@pytest.mark.parametrize("name", RULE_LAWS)
def test_every_rule_follows_its_exact_law(name, settings):
    rule, brute_force = RULE_LAWS[name]
    tokens, p, q = verified_by(rule, settings, draws_of(rule, 3_000 if settings else 10_000), "torch")
    expected = exact.emitted_by(p, q, *brute_force(p, q))
    assert exact.chi_square_p_value(np.bincount(tokens, minlength=11), expected) > exact.FALSE_ALARM


@pytest.mark.parametrize("draws", [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", CUT.values(), ids=CUT)
@pytest.mark.parametrize("name", RULE_LAWS)
def test_every_rule_gives_the_same_tokens_on_both_backends(name, settings, draws):
    """On torch they follow the law, see above. A near-tie would be a difference, which is rarer than one in 10^4."""
    if "triton" not in BACKENDS:
        pytest.skip("triton is not there, or does not run here")
    rule, _ = RULE_LAWS[name]
    tokens, _, _ = verified_by(rule, settings, draws, "triton")
    assert (tokens == verified_by(rule, settings, draws, "torch")[0]).all()


def test_a_probability_compared_with_its_row_is_the_one_in_it():
    """A threshold such as the k-th largest is taken from the whole row, the drafted token's probability is asked for alone."""
    for V, scale in ((50, 1.0), (32_000, 1.0), (151_936, 4.0)):
        logits = scale * torch.randn(4, 3, V, generator=torch.Generator().manual_seed(V))
        for k in (1, 3):
            ids = logits[:, :2].topk(k)[1][..., -1]  # the k-th itself is among the k
            for sampling in (None, Sampling(top_p=0.99), Sampling(torch.tensor([1.0, 0.7, 1.3, 0.9]))):
                out = verify_from_logits(
                    logits, None, ids, TopK(k), seed=0, offset=0, sampling=sampling, backend="torch"
                )
                assert (out.num_accepted == 2).all() and out.valid.all()
        every = row_stats(logits[:, 0]).argmax[:, None]
        out = verify_from_logits(logits[:, :2], None, every, Typical(1.0, 1.0), seed=0, offset=0, backend="torch")
        assert (out.num_accepted == 1).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_probabilities_do_not_depend_on_what_is_asked_for_beside_them(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        V, request, position = 151_936, np.arange(6), np.zeros(6, dtype=np.int64)
        logits = 5 * torch.randn(6, 1, V, generator=torch.Generator().manual_seed(0))

        def rows():
            return rows_of(Logits(logits, Sampling(0.9)), Place(), np.ones((6, 1), dtype=bool))

        together = rows().whole(request, position)
        for r in range(6):
            token = np.array([int(logits[r].argmax()), 5, V - 1])
            of_row = rows()
            some = of_row.at(request[r, None].repeat(3), position[:3], token)
            assert (some == together[r].numpy()[token]).all()
            for _ in range(2):
                assert torch.equal(of_row.whole(request[r : r + 1], position[:1])[0], together[r])
    finally:
        torch.set_num_threads(before)


def test_a_residual_below_the_unit_of_sums_is_none_on_both_backends():
    """2^-52 is the unit of chunk sums, from logits as from probabilities; then the token comes from h without n."""
    inf = np.inf
    for small, expected in ((-36.0, 1), (-37.0, 0), (-60.0, 0)):
        target = torch.tensor([[[0.0, small, -inf], [0.0, 0.0, 0.0]]], device=DEVICE)
        draft, ids = torch.tensor([[[0.0, -inf, -inf]]], device=DEVICE), torch.tensor([[2]], device=DEVICE)
        for backend in BACKENDS:
            out = verify_from_logits(target, draft, ids, "sps", seed=0, offset=0, backend=backend)
            assert out.token_ids[0, 0] == expected and out.valid.all()
            out = verify(target.softmax(-1), draft.softmax(-1), ids, "sps", seed=0, offset=0, backend=backend)
            assert out.token_ids[0, 0] == expected and out.valid.all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(0.0)], ids=["plain", "top-k", "greedy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_are_written_in_full(backend, sampling):
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for entropy in (False, True):
        first, second = (torch.full((3, 8), x, device=DEVICE) for x in (7.0, -3.0))
        for packed in (first, second):
            out = SampleOutput(
                torch.empty(3, dtype=torch.int64, device=DEVICE), torch.empty(3, device=DEVICE), RowStats(packed)
            )
            sample(logits, seed=0, offset=0, sampling=sampling, entropy=entropy, out=out, backend=backend)
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))
        assert (first[:, 7] == 0).all()


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


CASES = {("torch", False): 300, ("torch", True): 150, ("triton", False): 20, ("triton", True): 5}


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "truncated"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_decision_is_that_of_a_plain_account(backend, truncated):
    rng = np.random.default_rng(int(truncated))
    seen = near_ties = 0
    for case_number in range(CASES[backend, truncated]):
        case, requests = fuzzed_batch(rng, truncated)
        assert not any(differences_of_a_batch(case, requests, backend, DEVICE)), case_number
        seen, near_ties = seen + len(requests), near_ties + sum(near for _, near in requests)
    # With 16-bit logits many tokens are equal to the last one kept, where transformers' top-p keeps but some.
    assert near_ties < (0.25 if truncated else 0.1) * seen + 3, (near_ties, seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_draw_is_that_of_a_plain_account(backend):
    rng, near_ties, count = np.random.default_rng(2), 0, 200 if backend == "torch" else 20
    for i in range(count):
        x, settings = fuzzed_row(rng)
        difference, near = difference_of_a_draw(x, settings, int(rng.integers(2**62)), 2**32 - 3 + i, backend, DEVICE)
        near_ties += near
        assert difference is None
    assert near_ties < 0.4 * count  # many of these rows hold equal logits, where top-p may cut


@pytest.mark.skipif(len(BACKENDS) == 1, reason="needs triton")
def test_results_do_not_depend_on_how_rows_are_split():
    from cactus_kernels.contract import RowInputs, SampleOutput
    from cactus_kernels.kernels import rows as kernel_rows

    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(2, 20_000, generator=generator)).to(DEVICE)
    for sampling in (Sampling(0.8, min_p=0.01), Sampling(top_k=30, top_p=0.9)):
        inputs, outs = RowInputs(x, sampling, True, 5, 7), []
        for splits, num_warps in ((1, 4), (3, 4), (2, 8), (5, 1)):
            ids, probs = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, device=DEVICE)
            out = SampleOutput(ids, probs, RowStats(torch.zeros(2, 8, device=DEVICE)))
            kernel_rows.row_stats(inputs, out, splits=splits, num_warps=num_warps)
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
