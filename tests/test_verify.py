"""What `verify` does with every kind of input, and the faults that others shipped.

Faults that touch neither verification nor the loop have no test here: the block rule (vllm-ascend #7807) is not offered;
rows of logits (FlashInfer #1178) are tested as the probabilities that they become; those of caches, EOS, processors and
unequal models are tests of the loop, in decoding/.
"""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from cactus_kernels import Cactus, SpS, VerifyOutput, draw, philox, verify
from cactus_kernels.rules import Coupled, resolve_rule
from cactus_kernels.testing import fuzz, oracle, parity

try:
    from cactus_kernels.kernels import race as kernel_race
    from cactus_kernels.kernels import verify as kernel_verify
except ImportError:
    kernel_race = kernel_verify = None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
no_triton = kernel_verify is None or (DEVICE == "cpu" and not kernel_race.INTERPRETED)
BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(no_triton, reason="needs triton and a GPU or TRITON_INTERPRET=1")),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = -77
nan, inf = float("nan"), float("inf")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def run(target, draft, ids, rule="sps", *, backend, seed=0, offset=0, cu_draft_tokens=None, max_draft_tokens=None):
    """`verify` into poisoned outputs, on the device of these tests; the output comes back to the CPU."""
    there = [x if not isinstance(x, torch.Tensor) else x.to(DEVICE) for x in (target, draft, ids, seed, offset)]
    if isinstance(rule, Cactus) and isinstance(rule.delta, torch.Tensor):
        rule = Cactus(rule.delta.to(DEVICE))
    if cu_draft_tokens is None:
        B, m = ids.shape
    else:
        cu_draft_tokens = torch.as_tensor(cu_draft_tokens, dtype=torch.int32, device=DEVICE)
        B, m = len(cu_draft_tokens) - 1, max_draft_tokens
    out = VerifyOutput(
        torch.full((B, m + 1), POISON, dtype=ids.dtype, device=DEVICE),
        torch.full((B,), POISON, dtype=torch.int32, device=DEVICE),
        torch.ones(B, dtype=torch.bool, device=DEVICE),
    )
    got = verify(
        *there[:3], rule, seed=there[3], offset=there[4], cu_draft_tokens=cu_draft_tokens,
        max_draft_tokens=max_draft_tokens, out=out, backend=backend,
    )  # fmt: skip
    assert got is out
    return VerifyOutput(out.token_ids.cpu(), out.num_accepted.cpu(), out.valid.cpu())


def some(backend, count):
    """So many requests, or few in the interpreter, which takes a tenth of a second for each."""
    return count if backend == "torch" or not kernel_race.INTERPRETED else max(2, count // 32)


def assert_same(a, b):
    assert torch.equal(a.valid, b.valid)
    assert torch.equal(a.num_accepted, b.num_accepted)
    assert torch.equal(a.token_ids, b.token_ids)


def random_rows(*shape, seed=0, sharpness=2.0):
    return (sharpness * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def random_batch(B, m, V, seed=0, noise=1.0):
    """target [B, m + 1, V], draft [B, m, V], and ids [B, m] drawn from the draft."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((B, m + 1, V), generator=generator)
    draft = (logits[:, :m] + noise * torch.randn((B, m, V), generator=generator)).softmax(-1)
    ids = torch.multinomial(draft.reshape(-1, V), 1, generator=generator).view(B, m) if m else torch.zeros(B, 0).long()
    return logits.softmax(-1), draft, ids


# -- the reference


def expected(target, draft, ids, rule, seed, offset=0):
    """What the reference makes of a padded batch: a `VerifyOutput`."""
    case = {"target_probs": target, "draft_probs": draft, "draft_token_ids": ids, "rule": rule}
    return oracle.verified(case | {"seed": seed, "offset": offset})


BAD_VALUES = [nan, inf, -inf, -1e-3, 1.02]


# -- bad values


def batch_of_three(where):
    """Three requests of three drafts: target, draft, ids. The middle one's third draft is rejected, or if `where` is
    "bonus" accepted as the others."""
    V = 2050
    target, draft, ids = random_batch(3, 3, V, seed=4)
    ids[1] = torch.tensor([5, 1500, 7])
    for j, n in enumerate([5, 1500, 7]):
        for rows in (target, draft):
            rows[1, j] = 0.5 / (V - 1)
            rows[1, j, n] = 0.5
    if where == "rejected":
        target[1, 2, 7] = 0
    return target, draft, ids


@cache
def without_bad_values(where, backend):
    out = run(*batch_of_three(where), Cactus(0.1), backend=backend)
    assert out.valid.all() and out.num_accepted[1] == (2 if where == "rejected" else 3)
    return out


SPOTS = {
    # where the bad value stands -> (kind of batch, rows, position, token, drafts accepted before it counts)
    "q of the first draft": ("bonus", "target", 0, 5, 0),
    "q of the second draft": ("bonus", "target", 1, 1500, 1),
    "p of the second draft": ("bonus", "draft", 1, 1500, 1),
    "q of the rejected draft": ("rejected", "target", 2, 7, 2),
    "p of the rejected draft": ("rejected", "draft", 2, 7, 2),
    "scanned target row": ("rejected", "target", 2, 2049, 2),
    "scanned draft row": ("rejected", "draft", 2, 0, 2),
    "bonus row": ("bonus", "target", 3, 1023, 3),
}


@pytest.mark.parametrize("value", BAD_VALUES)
@pytest.mark.parametrize(("kind", "rows", "position", "token", "accepted"), SPOTS.values(), ids=SPOTS)
def test_a_bad_value_stops_its_request_alone(backend, kind, rows, position, token, accepted, value):
    target, draft, ids = batch_of_three(kind)
    clean = without_bad_values(kind, backend)
    {"target": target, "draft": draft}[rows][1, position, token] = value
    out = run(target, draft, ids, Cactus(0.1), backend=backend)
    assert out.valid.tolist() == [True, False, True]
    assert out.num_accepted[1] == accepted
    assert out.token_ids[1].tolist() == [5, 1500, 7][:accepted] + [-1] * (4 - accepted)
    for b in (0, 2):
        assert torch.equal(out.token_ids[b], clean.token_ids[b]) and out.num_accepted[b] == clean.num_accepted[b]
    with pytest.raises(ValueError, match=rf"requests \[1\] at drafted positions \[{accepted}\]"):
        out.raise_if_invalid()


@pytest.mark.parametrize("bad_id", [2050, 2051, 2**31 - 1, -2, -(2**31)])
def test_an_id_outside_the_vocabulary_stops_its_request_alone(backend, bad_id):
    target, draft, ids = batch_of_three("bonus")
    clean = without_bad_values("bonus", backend)
    ids[1, 2] = bad_id
    for dtype in (torch.int32, torch.int64):
        out = run(target, draft, ids.to(dtype), Cactus(0.1), backend=backend)
        assert out.valid.tolist() == [True, False, True] and out.num_accepted[1] == 2
        assert out.token_ids[1].tolist() == [5, 1500, -1, -1]
        assert torch.equal(out.token_ids[[0, 2]].long(), clean.token_ids[[0, 2]])


def test_bad_values_that_do_not_count_do_not_matter(backend):
    """After the first rejection, and at other tokens of accepted positions."""
    target, draft, ids = batch_of_three("bonus")
    target[1, 1, 1500] = 0  # rejected for certain
    clean = run(target, draft, ids, Cactus(0.1), backend=backend)
    assert clean.num_accepted[1] == 1 and clean.valid.all()
    target[1, 0, 6], draft[1, 0, 6] = nan, inf
    target[1, 2:], draft[1, 2:], ids[1, 2] = nan, -1.0, 10**6
    assert_same(run(target, draft, ids, Cactus(0.1), backend=backend), clean)


@pytest.mark.parametrize("V", [8200, 1, 1024])
@pytest.mark.parametrize("rejected", [True, False])
def test_a_row_of_nan_emits_nothing(backend, V, rejected):
    """vLLM #53029, FlashInfer #1575 and #2456: a row of NaN emitted id V, and after a repair the last id of a tile."""
    target, draft, ids = random_batch(3, 1, V)
    clean = run(target, draft, ids, backend=backend)
    target[1, 0 if rejected else 1] = nan
    if not rejected:
        target[1, 0] = draft[1, 0]
    out = run(target, draft, ids, backend=backend)
    assert out.valid.tolist() == [True, False, True]
    assert out.token_ids[1].tolist() == ([-1, -1] if rejected else [ids[1, 0], -1])
    assert torch.equal(out.token_ids[[0, 2]], clean.token_ids[[0, 2]])


def test_a_negative_id_ends_the_draft(backend):
    """FlashInfer #879, #3551: the padding id -1 was read out of bounds, and accepted."""
    V = 5
    one_hot = torch.eye(V)
    target = torch.stack([one_hot[[1, 0, 1, 4, 2, 2]], one_hot[[1, 0, 3, 4, 2, 2]]])
    draft = torch.stack([one_hot[[1, 0, 1, 0, 0]]] * 2)
    ids = torch.tensor([[1, 0, 1, -1, -1]] * 2)
    target[:, 4:], draft[:, 3:] = nan, nan  # nothing is read from there
    out = run(target, draft, ids, Cactus(0.5), backend=backend)
    assert out.token_ids.tolist() == [[1, 0, 1, 4, -1, -1], [1, 0, 3, -1, -1, -1]]
    assert out.num_accepted.tolist() == [3, 2] and out.valid.all()
    # It ends there whatever comes after it, and a draft may be empty from the start.
    ids = torch.tensor([[1, 0, -1, 1, 10**6], [-1, 1, 0, 0, -5]])
    out = run(target, draft, ids, backend=backend)
    assert out.token_ids.tolist() == [[1, 0, 1, -1, -1, -1], [1, -1, -1, -1, -1, -1]] and out.valid.all()
    assert out.num_accepted.tolist() == [2, 0]


@pytest.mark.parametrize("delta", [nan, inf, -inf, -1e-30])
def test_a_bad_strength_stops_its_request_alone(backend, delta):
    target, draft, ids = random_batch(3, 2, 40)
    clean = run(target, draft, ids, Cactus(torch.tensor([0.1, 0.5, 1.0])), backend=backend)
    out = run(target, draft, ids, Cactus(torch.tensor([0.1, delta, 1.0])), backend=backend)
    assert out.valid.tolist() == [True, False, True]
    assert out.num_accepted[1] == 0 and out.token_ids[1].tolist() == [-1, -1, -1]
    assert torch.equal(out.token_ids[[0, 2]], clean.token_ids[[0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_request_drafts_a_token(backend):
    """The draft's rows come from numpy, whose empty arrays have strides of 0."""
    target, empty = random_rows(2, 30, seed=1), torch.from_numpy(np.zeros((0, 30), dtype=np.float32))
    ids = torch.empty(0, dtype=torch.int64)
    out = run(target, empty, ids, backend=backend, cu_draft_tokens=[0, 0, 0], max_draft_tokens=0)
    assert out.valid.all() and (out.token_ids >= 0).all() and out.token_ids.shape == (2, 1)


@pytest.mark.parametrize("rule", [SpS(), Coupled()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("cu", "valid"),
    [
        ([0, 2, 1, 4], [True, False, False]),  # goes back; the third then has 3 drafts, one too many
        ([0, 2, 1, 3], [True, False, True]),
        ([-1, 1, 2, 4], [False, True, True]),
        ([0, 1, 2, 5], [True, True, False]),  # beyond the drafts
        ([0, 0, 3, 4], [True, False, True]),  # more than max_draft_tokens
        ([2**31 - 1, -(2**31), 2, 4], [False, False, True]),
    ],
    ids=str,
)
def test_prefix_sums_out_of_order_stop_their_request_alone(backend, cu, valid, rule):
    target, draft, ids = random_rows(7, 30, seed=1), random_rows(4, 30, seed=2), torch.tensor([3, 4, 5, 6])
    sums = {"cu_draft_tokens": cu, "max_draft_tokens": 2}
    out = run(target, draft, ids, rule, backend=backend, seed=5, **sums)
    assert out.valid.tolist() == valid
    case = {"target_probs": target, "draft_probs": draft, "draft_token_ids": ids, "rule": rule, "seed": 5, "offset": 0}
    sums["cu_draft_tokens"] = torch.tensor(cu)
    assert_same(out, oracle.verified(case | sums))


def test_probabilities_a_little_above_one_are_rounding(backend):
    target = torch.tensor([[[1.005, 0, 0], [0, 1.01, 0]], [[1.02, 0, 0], [0, 1, 0]]])
    out = run(target, torch.full((2, 1, 3), 1 / 3), torch.zeros(2, 1).long(), Cactus(0.5), backend=backend)
    assert out.valid.tolist() == [True, False]
    assert out.token_ids.tolist() == [[0, 1], [-1, -1]]


def test_rows_of_zeros(backend):
    """Nothing to draw from: invalid, not token 0."""
    V = 1030
    target, draft, ids = random_batch(3, 1, V)
    target[0, 0] = 0  # rejects its draft and leaves nothing
    target[1, 0], target[1, 1] = draft[1, 0], 0  # accepts, and has no bonus
    target[2, 0] = 0
    out = run(target, draft, ids, backend=backend)
    assert out.valid.tolist() == [False, False, False]
    assert out.num_accepted.tolist() == [0, 1, 0]
    assert out.token_ids.tolist() == [[-1, -1], [ids[1, 0], -1], [-1, -1]]
    drawn = draw(torch.zeros(2, V, device=DEVICE), seed=1, offset=0, backend=backend)
    assert not drawn.valid.any() and (drawn.token_ids == -1).all()


# -- recovery


@pytest.mark.parametrize("rule", ["sps", Cactus(0.3)])
@pytest.mark.parametrize("V", [12, 2060])
def test_a_residual_of_nothing_falls_back_to_h_without_the_drafted_token(backend, V, rule):
    """Never to token 0, V - 1 or n by default: those have no probability or are the draft."""
    B = some(backend, 160)
    weights = torch.zeros(V)
    weights[[2, 3, V - 3]] = torch.tensor([0.1, 0.45, 0.45])
    draft = (weights * 10).clamp(max=1)  # too much everywhere: h - p is nowhere above 0
    ids = torch.full((B, 1), 2)
    target = torch.stack([weights, torch.eye(V)[5]])
    out = run(target.expand(B, 2, V), draft.expand(B, 1, V), ids, rule, backend=backend)
    assert out.valid.all()
    rejected = out.token_ids[out.num_accepted == 0]
    assert len(rejected) > 1 and set(rejected[:, 0].tolist()) <= {3, V - 3}
    assert (out.token_ids[out.num_accepted == 1] == torch.tensor([2, 5])).all()


def test_a_residual_of_nothing_and_nothing_else_is_invalid(backend):
    target = torch.tensor([[[0.0, 0.3, 0.0], [1, 0, 0]]]).expand(some(backend, 256), 2, 3)
    draft = torch.tensor([[[0.0, 1.0, 0.0]]]).expand(some(backend, 256), 1, 3)
    out = run(target, draft, torch.ones(len(target), 1).long(), backend=backend)
    accepted = out.num_accepted == 1
    assert 0 < accepted.sum() < len(target)
    assert torch.equal(out.valid, accepted)
    assert (out.token_ids[~accepted] == -1).all() and (out.token_ids[accepted] == torch.tensor([1, 0])).all()


def test_the_drafted_token_is_never_recovered(backend):
    V = 1100
    target, draft, _ = random_batch(some(backend, 160), 1, V)
    ids = target[:, 0].argmax(-1, keepdim=True)
    draft = (0.1 * draft).scatter_add(2, ids[:, None], torch.full((len(ids), 1, 1), 0.9))
    for p in (draft, None):
        out = run(target, p, ids, backend=backend, seed=3)
        rejected = out.num_accepted == 0
        assert rejected.any() and (out.token_ids[rejected, 0] != ids[rejected, 0]).all()


@pytest.mark.parametrize("rule", ["sps", Cactus(0.5)])
def test_a_draft_of_probability_zero_is_accepted_iff_the_target_allows_it(backend, rule):
    target = torch.tensor([[[0.0, 0.6, 0.4]] * 2, [[1e-30, 0.6, 0.4]] * 2])
    draft = torch.tensor([[[0.0, 0.5, 0.5]]] * 2)
    out = run(target, draft, torch.zeros(2, 1).long(), rule, backend=backend)
    assert out.num_accepted.tolist() == [0, 1] and out.valid.all()
    assert out.token_ids[0, 0] in (1, 2)


# -- extreme random words


WORDS = {"zeros": (0, 0), "ones": (2**32 - 1, 2**32 - 1), "high": (2**32 - 1, 0), "low": (0, 2**32 - 1)}


@pytest.fixture(params=WORDS.values(), ids=WORDS)
def constant_words(request, backend, monkeypatch):
    """Every random word of a backend that can be told so is this one."""
    if backend == "triton":
        if DEVICE != "cpu":
            pytest.skip("the words of a compiled kernel cannot be replaced")
        tl = kernel_verify.tl

        def constant(seed, c0, c1, c2, c3):
            zero = c0.to(tl.uint32) * 0
            return zero + request.param[0], zero + request.param[1], zero, zero

        monkeypatch.setattr(tl, "philox", constant)
    else:

        def constant(seed, *counter):
            shape = np.broadcast_shapes(*(np.shape(c) for c in (seed, *counter)))
            return tuple(np.full(shape, w) for w in request.param)

        monkeypatch.setattr(philox, "philox", constant)
    return request.param


@pytest.mark.parametrize("rule", ["sps", Cactus(1.0)])
def test_a_token_that_the_target_excludes_is_rejected_whatever_the_words(backend, constant_words, rule):
    """SGLang #35771: u = 0 accepted a token of target probability 0."""
    V = 6
    q = torch.tensor([0.0, 0.5, 0.5, 0, 0, 0]).expand(1, 2, V)
    for draft in (None, torch.full((1, 1, V), 1 / V)):
        out = run(q, draft, torch.tensor([[0]]), rule, backend=backend)
        assert out.num_accepted.tolist() == [0] and out.token_ids[0, 0] in (1, 2) and out.valid.all()


@pytest.mark.parametrize("V", [1, 3, 1025])
def test_excluded_tokens_never_come_out_whatever_the_words(backend, constant_words, V):
    """SGLang #33423: u = 1 picked a masked token. llama.cpp #28158: the size of the vocabulary came back as an id."""
    allowed = torch.zeros(V)
    allowed[V // 2] = 1
    ids = torch.full((1, 1), V - 1)
    drawn = draw(allowed[None].to(DEVICE), seed=0, offset=0, backend=backend)
    assert drawn.token_ids.tolist() == [[V // 2]]
    out = run(allowed.expand(1, 2, V), torch.full((1, 1, V), 1 / V), ids, backend=backend)
    expected = [[0, 0]] if V == 1 else [[V // 2, -1]]
    assert out.token_ids.tolist() == expected and out.valid.all()


@pytest.mark.parametrize("V", [5, 3000])
def test_ids_are_inside_the_vocabulary_whatever_the_words(backend, constant_words, V):
    """Equal weights and equal words are a tie, which the lowest id wins (lattice #280)."""
    q = torch.full((1, 2, V), 1 / V)
    p = torch.zeros(1, 1, V)
    p[..., 0] = 1
    out = run(q, p, torch.tensor([[0]]), backend=backend)
    assert 0 <= out.token_ids[0, 0] < V and out.valid.all()
    # The chunks of these sizes tie, or the first is heavier.
    if out.num_accepted[0] == 0:
        assert out.token_ids.tolist() == [[1, -1]] if V <= 1024 else out.token_ids[0, 0] in (1, 1024)
    else:
        assert out.token_ids.tolist() == [[0, 0]]


def test_a_draft_no_more_likely_than_the_target_is_accepted_whatever_the_words(backend, constant_words):
    q = torch.tensor([0.25, 0.75]).expand(2, 2, 2)
    p = torch.tensor([[[0.25, 0.75]], [[0.75, 0.25]]])
    out = run(q, p, torch.tensor([[0], [1]]), backend=backend)
    assert out.num_accepted.tolist() == [1, 1]


# -- random streams


def test_each_request_has_its_seed(backend):
    """FlashInfer #4861: only the first seed of the batch was used."""
    target, draft, ids = (x.expand(4, *x.shape[1:]) for x in random_batch(1, 4, 300, noise=1.5, seed=2))
    runs = [
        run(target, draft, ids, backend=backend, seed=torch.tensor(s))
        for s in ([1, 2, 3, 4], [1, 1, 1, 1], [4, 1, 3, 2])
    ]
    assert len({tuple(row) for row in runs[0].token_ids.tolist()}) == 4
    assert (runs[1].token_ids == runs[0].token_ids[0]).all()
    assert torch.equal(runs[2].token_ids, runs[0].token_ids[[3, 0, 2, 1]])


def test_an_int_seed_is_a_seed_for_each_request(backend):
    target, draft, ids = random_batch(3, 3, 100)
    for seed in (0, 2**63 - 1, -(2**63)):
        seeds = philox.request_seeds(seed, 3, torch.device("cpu"))
        one, each = (run(target, draft, ids, backend=backend, seed=s, offset=9) for s in (seed, seeds))
        assert_same(one, each)
    assert_same(one, run(target, draft, ids, backend=backend, seed=seed, offset=torch.full((3,), 9)))


def test_permuting_requests_permutes_results(backend):
    target, draft, ids = random_batch(6, 3, 1500)
    seed, offset, delta = torch.arange(6) * 1000, torch.arange(6) * 7, torch.linspace(0, 1, 6)
    order = [3, 0, 5, 1, 4, 2]
    straight = run(target, draft, ids, Cactus(delta), backend=backend, seed=seed, offset=offset)
    permuted = run(
        target[order],
        draft[order],
        ids[order],
        Cactus(delta[order]),
        backend=backend,
        seed=seed[order],
        offset=offset[order],
    )
    assert_same(
        permuted, VerifyOutput(*(x[order] for x in (straight.token_ids, straight.num_accepted, straight.valid)))
    )


def test_a_request_does_not_depend_on_its_neighbours(backend):
    """vLLM #10863."""
    target, draft, ids = random_batch(3, 3, 1500)
    seed = torch.arange(3) + 50
    together = run(target, draft, ids, Cactus(0.2), backend=backend, seed=seed, offset=3)
    for b in range(3):
        one = slice(b, b + 1)
        alone = run(target[one], draft[one], ids[one], Cactus(0.2), backend=backend, seed=seed[one], offset=3)
        assert torch.equal(alone.token_ids[0], together.token_ids[b])


@pytest.mark.parametrize("offset", [0, 2**32 - 2, -2, 2**63 - 2], ids=["0", "32 bits", "negative", "64 bits"])
def test_a_position_is_verified_as_if_alone_at_its_own_offset(backend, offset):
    """The words of position j are those of offset + j, a 64-bit sum."""
    target, draft, ids = random_batch(some(backend, 128), 4, 50, noise=0.6)
    whole = run(target, draft, ids, backend=backend, seed=1, offset=offset)
    assert len(whole.num_accepted.unique()) > 1
    for j in (1, 3):
        at = (offset + j + 2**63) % 2**64 - 2**63
        alone = run(target[:, j : j + 2], draft[:, j : j + 1], ids[:, j : j + 1], backend=backend, seed=1, offset=at)
        reached = whole.num_accepted >= j
        accepted = (whole.num_accepted > j)[reached]
        assert torch.equal(alone.num_accepted[reached] == 1, accepted)
        assert torch.equal(alone.token_ids[reached, 0], whole.token_ids[reached, j])


def test_offsets_give_other_words(backend):
    probs = random_rows(1, 1, 300, sharpness=0.5)
    none = torch.zeros(1, 0, dtype=torch.int64)
    got = {int(run(probs, None, none, backend=backend, offset=i).token_ids[0, 0]) for i in range(8)}
    assert len(got) > 5


# -- layouts


def test_flat_and_padded_are_the_same(backend):
    lengths = [0, 3, 1, 0, 2]
    target, draft, ids = random_batch(5, 3, 700)
    padded_ids = torch.stack([torch.where(torch.arange(3) < n, row, -1) for n, row in zip(lengths, ids, strict=True)])
    padded = run(target, draft, padded_ids, Cactus(0.3), backend=backend, seed=2)
    flat = run(
        torch.cat([rows[: n + 1] for n, rows in zip(lengths, target, strict=True)]),
        torch.cat([rows[:n] for n, rows in zip(lengths, draft, strict=True)]),
        torch.cat([row[:n] for n, row in zip(lengths, ids, strict=True)]),
        Cactus(0.3), backend=backend, seed=2, cu_draft_tokens=[0, 0, 3, 4, 4, 6], max_draft_tokens=3,
    )  # fmt: skip
    assert_same(flat, padded)
    assert flat.num_accepted[0] == flat.num_accepted[3] == 0 and flat.valid.all()


@pytest.mark.parametrize("with_rows", [True, False])
def test_requests_without_drafts(backend, with_rows):
    """Plain decoding: padded with m = 0, and flat with N = 0, in an output that is wider than needed."""
    target = random_rows(3, 40)
    draft = torch.zeros(3, 0, 40) if with_rows else None
    padded = run(target[:, None], draft, torch.zeros(3, 0, dtype=torch.int64), Cactus(0.3), backend=backend, seed=2)
    flat = run(
        target, draft if draft is None else draft[0], torch.zeros(0, dtype=torch.int64), Cactus(0.3), backend=backend,
        seed=2, cu_draft_tokens=[0, 0, 0, 0], max_draft_tokens=2,
    )  # fmt: skip
    assert torch.equal(flat.token_ids[:, :1], padded.token_ids) and (flat.token_ids[:, 1:] == -1).all()
    assert (padded.token_ids >= 0).all() and padded.valid.all() and flat.valid.all() and not flat.num_accepted.any()


def test_no_requests(backend):
    out = run(torch.zeros(0, 3, 5), torch.zeros(0, 2, 5), torch.zeros(0, 2, dtype=torch.int64), backend=backend)
    assert out.token_ids.shape == (0, 3) and out.num_accepted.shape == out.valid.shape == (0,)
    flat = run(
        torch.zeros(0, 5),
        None,
        torch.zeros(0, dtype=torch.int32),
        backend=backend,
        cu_draft_tokens=[0],
        max_draft_tokens=2,
    )
    assert flat.token_ids.shape == (0, 3) and flat.token_ids.dtype == torch.int32


def test_sixty_four_drafts(backend):
    target, draft, ids = random_batch(3, 64, 20, noise=0.05)
    out = run(target, draft, ids, Cactus(1.0), backend=backend)
    assert_same(out, expected(target, draft, ids, Cactus(1.0), 0))
    assert out.valid.all() and (out.num_accepted > 3).all()


@pytest.mark.parametrize("rule", ["sps", Cactus(0.5)])
def test_a_vocabulary_of_one(backend, rule):
    out = run(torch.ones(2, 4, 1), torch.ones(2, 3, 1), torch.zeros(2, 3).long(), rule, backend=backend)
    assert out.token_ids.tolist() == [[0] * 4] * 2 and out.num_accepted.tolist() == [3, 3] and out.valid.all()


@pytest.mark.parametrize("where", [0, 1023, 1024, 3076])
def test_chunks_without_mass_never_win(backend, where):
    """FlashInfer #1178: a tile that was all -inf gave NaN. One finite logit has probability 1."""
    logits = torch.full((8, 1, 3077), -inf)
    logits[..., where] = -5.0
    out = run(logits.softmax(-1), None, torch.zeros(8, 0, dtype=torch.int64), backend=backend)
    assert (out.token_ids == where).all() and out.valid.all()


def test_a_one_hot_draft_needs_no_rows(backend):
    """transformers #32867: such a draft is not verified with a softmax; see also test_law.py."""
    target, _, ids = random_batch(some(backend, 64), 2, 1100)
    rows = torch.nn.functional.one_hot(ids, 1100).float()
    for rule in ("sps", Cactus(0.5)):
        assert_same(run(target, None, ids, rule, backend=backend), run(target, rows, ids, rule, backend=backend))


@pytest.mark.parametrize(("V", "draft_size"), [(1500, 1100), (1100, 1500), (7, 5), (5, 7), (1024, 1), (1, 1024)])
def test_a_shorter_vocabulary_is_zero_beyond_its_end(backend, V, draft_size):
    """rtp-llm #1311, transformers #45307."""
    size = max(V, draft_size)
    target, draft, ids = random_batch(some(backend, 48), 2, size)
    target, draft = target[..., :V].contiguous(), draft[..., :draft_size].contiguous()
    padded = [torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in (target, draft)]
    for rule in ("sps", Cactus(0.5)):
        out = run(target, draft, ids, rule, backend=backend)
        assert out.valid.all() and (out.token_ids < V).all()
        # Its zeros change no chunk's number, so that the words are the same.
        assert_same(out, run(*padded, ids, rule, backend=backend))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_stride_gives_the_same(backend, dtype):
    """Rows repeated with stride 0, rows apart, starts that are not aligned, sliced ids."""
    B, m, V = 2, 2, 1100
    target, draft, ids = random_batch(1, m, V)
    target, draft = target.to(dtype), draft.to(dtype)
    whole = run(target.repeat(B, 1, 1), draft.repeat(B, 1, 1), ids.repeat(B, 1), Cactus(0.2), backend=backend)
    assert_same(
        run(target.expand(B, -1, -1), draft.expand(B, -1, -1), ids.expand(B, -1), Cactus(0.2), backend=backend), whole
    )
    apart = torch.full((B, m + 1, V + 5), nan, dtype=dtype)[:, :, 3 : V + 3]
    beside = torch.full((m, B, V + 1), nan, dtype=dtype).transpose(0, 1)[:, :, 1:]
    wide = torch.full((B, 2 * m), 10**6)[:, ::2]
    apart[:], beside[:], wide[:] = target, draft, ids
    assert_same(run(apart, beside, wide, Cactus(0.2), backend=backend), whole)


def test_output_of_any_stride(backend):
    target, draft, ids = random_batch(3, 2, 50)
    expected = run(target, draft, ids, backend=backend)
    out = VerifyOutput(
        torch.full((3, 6), POISON, device=DEVICE)[:, ::2],
        torch.full((6,), POISON, dtype=torch.int32, device=DEVICE)[::2],
        torch.ones(6, dtype=torch.bool, device=DEVICE)[::2],
    )
    got = verify(*(x.to(DEVICE) for x in (target, draft, ids)), "sps", seed=0, offset=0, out=out, backend=backend)
    assert_same(VerifyOutput(got.token_ids.cpu(), got.num_accepted.cpu(), got.valid.cpu()), expected)


def test_row_offsets_have_64_bits(backend):
    """vLLM #46560, #47383, #48055. The memory between the rows is reserved and never touched."""
    V, gap = 1030, 2**30 + 2**28  # elements from row to row: the third starts beyond 2^31
    try:
        memory = torch.empty(2 * gap + V, dtype=torch.bfloat16, device=DEVICE)
    except RuntimeError:
        pytest.skip("5 GB of address space are not to be had")
    target, draft, ids = random_batch(1, 2, V, seed=6)
    target, draft = target.bfloat16(), draft.bfloat16()
    expected = run(target, draft, ids, Cactus(1.0), backend=backend)
    far = memory.as_strided((1, 3, V), (0, gap, 1))
    far.copy_(target)
    # All drafts accepted, so that the bonus row is read; padded rows, flat rows, and requests that far apart.
    target[0, :2] = draft[0]
    far.copy_(target)
    expected = run(target, draft, ids, backend=backend)
    assert expected.num_accepted.tolist() == [2]
    assert_same(run(far, draft, ids, backend=backend), expected)
    flat = run(far[0], draft[0], ids[0], backend=backend, cu_draft_tokens=[0, 2], max_draft_tokens=2)
    assert_same(flat, expected)
    requests = memory.as_strided((3, 1, V), (gap, 0, 1))
    none = torch.zeros(3, 0, dtype=torch.int64)
    assert_same(
        run(requests, None, none, backend=backend),
        run(target.transpose(0, 1).contiguous(), None, none, backend=backend),
    )


# -- what holds for every input


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_zero_is_sps_bit_for_bit(backend, dtype):
    for seed in range(some(backend, 20)):
        V = [5, 1025, 64, 2500][seed % 4]
        target, draft, ids = random_batch(some(backend, 32), 4, V, seed=seed)
        target, draft = target.to(dtype), draft.to(dtype)
        sps = run(target, draft, ids, "sps", backend=backend, seed=seed)
        zero = torch.zeros(len(ids)) if seed % 2 else 0
        assert_same(run(target, draft, ids, Cactus(zero), backend=backend, seed=seed), sps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cactus_accepts_what_sps_accepts(backend, dtype):
    """And a larger delta what a smaller one accepts."""
    target, draft, ids = random_batch(some(backend, 100), 6, 60)
    accepted = [
        run(target.to(dtype), draft.to(dtype), ids, Cactus(delta), backend=backend, seed=1).num_accepted
        for delta in (0.0, 1e-6, 0.3, 1e30)
    ]
    for less, more in pairwise(accepted):
        assert (less <= more).all()
    assert (accepted[0] < accepted[2]).any()


def test_a_rule_by_name_is_the_rule_itself(backend):
    target, draft, ids = random_batch(some(backend, 16), 3, 60)
    for name in ("sps", "cactus"):
        assert_same(
            run(target, draft, ids, name, backend=backend), run(target, draft, ids, resolve_rule(name), backend=backend)
        )


def test_inputs_are_never_written_to(backend):
    for seed in range(some(backend, 64)):
        case = fuzz.fuzz_case(seed)
        held = {k: v for k, v in case.items() if isinstance(v, torch.Tensor)}
        held |= {f"strength {i}": s for i, s in enumerate(case["rule"].strengths) if isinstance(s, torch.Tensor)}
        before = {k: v.clone() for k, v in held.items()}
        parity.run_case(case, backend, DEVICE)
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_an_output_may_be_used_again(backend):
    first, second = random_batch(3, 2, 50, seed=1), random_batch(3, 2, 50, seed=2)
    second[0][1] = nan
    out = VerifyOutput(
        torch.zeros(3, 3, dtype=torch.int64, device=DEVICE),
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
        torch.zeros(3, dtype=torch.bool, device=DEVICE),
    )
    for batch in (first, second, first):
        got = verify(*(x.to(DEVICE) for x in batch), "sps", seed=0, offset=0, out=out, backend=backend)
        assert got is out
        assert_same(VerifyOutput(*(x.cpu() for x in vars(out).values() if x is not None)), run(*batch, backend=backend))


def test_ids_come_in_the_dtype_of_the_drafts(backend):
    target, draft, ids = (x.to(DEVICE) for x in random_batch(3, 2, 50))
    wide, narrow = (verify(target, draft, i, "sps", seed=0, offset=0, backend=backend) for i in (ids, ids.int()))
    assert wide.token_ids.dtype == torch.int64 and narrow.token_ids.dtype == torch.int32
    assert torch.equal(wide.token_ids, narrow.token_ids.long())
    assert wide.num_accepted.dtype == torch.int32 and wide.valid.dtype == torch.bool


def test_rows_may_differ_in_dtype(backend):
    target, draft, ids = random_batch(some(backend, 16), 3, 1100)
    for a in DTYPES:
        for b in set(DTYPES) - {a}:
            mixed = run(target.to(a), draft.to(b), ids, Cactus(0.1), backend=backend)
            assert_same(mixed, run(target.to(a).float(), draft.to(b).float(), ids, Cactus(0.1), backend=backend))


# -- drawing


def test_a_drawn_token_is_that_of_the_race_with_words_of_its_own(backend):
    V = 2060
    probs = random_rows(6, V).to(DEVICE)
    drawn = draw(probs, seed=3, offset=11, backend=backend)
    assert drawn.token_ids.dtype == torch.int64 and drawn.token_ids.shape == (6, 1) and not drawn.num_accepted.any()
    bonus = verify(
        probs[:, None],
        None,
        torch.zeros(6, 0, dtype=torch.int64, device=DEVICE),
        "sps",
        seed=3,
        offset=11,
        backend=backend,
    )
    assert not torch.equal(drawn.token_ids, bonus.token_ids)
    probs[2, 2059] = nan
    again = draw(probs, seed=3, offset=11, backend=backend)
    assert again.valid.tolist() == [True, True, False, True, True, True] and again.token_ids[2] == -1
    keep = [0, 1, 3, 4, 5]
    assert torch.equal(again.token_ids[keep], drawn.token_ids[keep])
