"""`Block`: the law of whole drafts by enumeration, what verification emits against it, the bits of both backends."""

import itertools

import numpy as np
import pytest
import torch
from support import exact
from support.logit_cases import fuzzed_batch
from support.models import table_pair

from cactus_kernels import Block, Sampling, SpS, law, speculative_generate
from cactus_kernels.rules import block, resolve_rule
from cactus_kernels.testing import fuzz, oracle, parity
from cactus_kernels.verification import verify, verify_from_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of bad values
OUTCOMES = ("num_accepted", "valid", "token_ids")


def tree(V, m, kind, seed=0):
    """Rows after every prefix of up to m tokens: p of m levels, q of m + 1, float64 [V, ..., V] with the row last."""
    rng = np.random.default_rng([V, m, seed])
    p, q = ([rng.dirichlet(np.full(V, 0.7), size=(V,) * i) for i in range(count)] for count in (m, m + 1))
    if kind == "zeros":
        for rows in (*p, *q):
            rows *= (rng.random(rows.shape) < 0.6) | (np.arange(V) == rng.integers(V, size=(*rows.shape[:-1], 1)))
            rows /= rows.sum(-1, keepdims=True)
    elif kind == "equal":
        p = [x.copy() for x in q[:-1]]
    elif kind == "equal in part":
        p = [np.where(rng.random((*x.shape[:-1], 1)) < 0.5, x, y) for x, y in zip(p, q, strict=False)]
    elif kind == "one-hot":
        p = [np.eye(V)[rng.integers(V, size=x.shape[:-1])] for x in p]
    return [torch.from_numpy(x) for x in p], [torch.from_numpy(x) for x in q]


def shares(p, q):
    """By the recursion: the mass with which i drafted tokens are kept and a token y drawn, [V] * (i + 1) for i = 0 .. m."""
    m = len(p)
    chance, path = [torch.ones((), dtype=torch.float64)], torch.ones((), dtype=torch.float64)
    for i in range(m):
        chance.append(block.chance_with(chance[i][..., None], q[i], p[i]))
        path = path[..., None] * p[i]
    left, found = path * (1 - chance[m]), [(path * chance[m])[..., None] * q[m]]
    for i in reversed(range(m)):
        w = block.residual(chance[i][..., None], q[i], p[i])
        total = w.sum(-1)
        keep = torch.where(total > 0, total / (total + (1 - chance[i])), 0.0) if i else torch.ones_like(total)
        mine = left.sum(tuple(range(i, m))) if i < m else left
        # What comes after i tokens is not looked at any more: the mass of all that goes on from them.
        found.insert(0, torch.where(total > 0, mine * keep / total, 0.0)[..., None] * w)
        left = left * (1 - keep)[(...,) + (None,) * (m - i)]
    return found


def text_law(found, q):
    """The law of m + 1 tokens where the target goes on after what was emitted."""
    texts = found[0]
    for share, row in zip(found[1:], q[1:], strict=True):
        texts = texts[..., None] * row + share
    return texts


def expected_kept(found):
    return sum(i * share.sum().item() for i, share in enumerate(found))


KINDS = ("drawn", "one-hot", "zeros", "equal", "equal in part")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_whole_drafts_follow_the_target(m, kind):
    for V, seed in itertools.product((1, 2, 3, 5), range(3)):
        p, q = tree(V, m, kind, seed)
        found = shares(p, q)
        of_target = torch.ones((), dtype=torch.float64)
        for row in q:
            of_target = of_target[..., None] * row
        np.testing.assert_allclose(text_law(found, q), of_target, rtol=0, atol=1e-12)
        # As many as by SpS, or more.
        path = torch.ones((), dtype=torch.float64)
        token_by_token = 0.0
        for i in range(m):
            path = path[..., None] * torch.minimum(p[i], q[i])
            token_by_token += path.sum().item()
        assert expected_kept(found) >= token_by_token - 1e-12
        assert kind != "equal" or expected_kept(found) == pytest.approx(m, abs=1e-12)


def test_the_example_of_the_paper():
    """Two tokens, p = (2/3, 1/3), q = (1/3, 2/3), m = 2: 10/9 are accepted token by token, 11/9 by the block."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([2 / 3, 1 / 3], [1 / 3, 2 / 3]))
    found = shares([p, p.expand(2, 2)], [q, q.expand(2, 2), q.expand(2, 2, 2)])
    assert expected_kept(found) == pytest.approx(11 / 9, abs=1e-12)
    draws = 20_000
    ids = torch.from_numpy(np.random.default_rng(0).choice(2, size=(draws, 2), p=p.numpy()))
    for rule, mean in ((SpS(), 10 / 9), (Block(), 11 / 9)):
        out = verify(q.float().expand(draws, 3, 2), p.float().expand(draws, 2, 2), ids, rule, seed=1, offset=0)
        assert out.valid.all()
        assert abs(out.num_accepted.double().mean().item() - mean) < 6 * 0.9 / draws**0.5


@pytest.mark.parametrize(
    ("kind", "V", "m"), [("drawn", 3, 2), ("zeros", 4, 3), ("one-hot", 5, 2), ("equal in part", 2, 4)]
)
def test_what_comes_out_follows_the_recursion(kind, V, m):
    """Kept tokens and the drawn one together, 20,000 drafts, against the enumeration."""
    draws, rng = 20_000, np.random.default_rng(0)
    p, q = tree(V, m, kind)
    ids = np.zeros((draws, m), dtype=np.int64)
    for i in range(m):
        rows = p[i].numpy()[tuple(ids[:, :i].T)] if i else np.broadcast_to(p[0].numpy(), (draws, V))
        ids[:, i] = (rng.random((draws, 1)) > rows.cumsum(-1)).sum(-1).clip(max=V - 1)
    at = [tuple(torch.from_numpy(ids[:, :i]).T) for i in range(m + 1)]
    of = [torch.stack([x[i][at[i]] if i else x[0].expand(draws, V) for i in range(len(x))], 1).float() for x in (q, p)]
    drafts = None if kind == "one-hot" else of[1]
    out = verify(of[0], drafts, torch.from_numpy(ids), "block", seed=3, offset=7)
    assert out.valid.all()
    tokens = out.token_ids.numpy() + 1  # what is not emitted is 0
    codes = np.ravel_multi_index(tuple(tokens.T), (V + 1,) * (m + 1))
    expected = np.zeros((V + 1,) * (m + 1))
    for i, share in enumerate(shares(p, q)):
        expected[(slice(1, None),) * (i + 1) + (0,) * (m - i)] = share
    expected = expected.ravel()
    expected[expected < 1e-14] = 0
    assert exact.chi_square_p_value(np.bincount(codes, minlength=len(expected)), expected) > exact.FALSE_ALARM


def test_a_coin_keeps_what_the_recursion_says():
    chance, total = (torch.tensor(x) for x in (0.4, 0.15))
    bar = 0.15 / (0.15 + 0.6)
    assert block.keeps(torch.tensor(bar - 1e-6), chance, total)
    assert not block.keeps(torch.tensor(bar + 1e-6), chance, total)
    most = torch.tensor(1 - 2**-24)
    assert all(block.keeps(most, torch.ones(()), torch.tensor(x)) for x in (1e-30, 0.3, 0.5, 0.99))
    assert not block.keeps(torch.zeros(()), torch.ones(()), torch.zeros(()))


# -- the bits


def assert_same(a, b, what):
    for name in OUTCOMES:
        assert torch.equal(getattr(a, name), getattr(b, name)), (name, what)


def case_of(seed):
    return {name: value for name, value in fuzz.fuzz_case(seed).items() if name != "budget"} | {"rule": Block()}


def test_fuzzed_cases_are_verified_as_the_reference_does():
    kept = emptied = ended = 0
    for seed in range(200):
        case = case_of(seed)
        expected, got = oracle.verified(case), parity.run_case(case, "torch")
        assert_same(expected, got, f"case {seed}: {fuzz.describe(case)}")
        kept += int((expected.num_accepted > 0).sum())
        emptied += int((~expected.valid & (expected.num_accepted == 0)).sum())
        ended += int((case["draft_token_ids"] == -1).any())
        assert (expected.token_ids >= 0).sum() == (expected.num_accepted + expected.valid).sum()
    assert kept > 100 and emptied > 50 and ended > 5


@pytest.mark.parametrize("start", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(5, 205, 20))])
def test_the_kernels_give_the_same_bits(start, device):
    pytest.importorskip("triton")
    for seed in range(start, start + (20 if start else 5)):
        difference = parity.difference(case_of(seed), ("torch", "cpu"), ("triton", str(device)))
        assert difference is None, f"case {seed}: {difference}"


def test_splits_and_warps_change_no_bit(device):
    kernels = pytest.importorskip("cactus_kernels.kernels.block")
    from cactus_kernels.contract import Inputs, Probs, new_output

    generator = torch.Generator().manual_seed(0)
    target, draft = (2 * torch.randn(2, 1, 3, 2100, generator=generator)).softmax(-1).to(device)
    draft = (0.5 * (target + draft))[:, :2].contiguous()
    ids = torch.multinomial(draft.reshape(-1, 2100), 1, generator=generator).view(1, 2)
    inputs = Inputs(Probs(target), Probs(draft), ids, Block(), 1, 5, None, 2, 1)
    expected = verify(target.cpu(), draft.cpu(), ids.cpu(), Block(), seed=1, offset=5, backend="torch")
    for splits, warps in ((1, 1), (2, 8), (99, 2)):
        out = new_output(inputs)
        kernels.verify(inputs, out, None, splits, warps)
        for name in OUTCOMES:
            assert torch.equal(getattr(out, name).cpu(), getattr(expected, name))


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_from_logits_both_backends_decide_alike(count, device):
    """Ragged or padded, draft rows by slot, with statistics or none, the caller's bonus tokens, truncated or not."""
    pytest.importorskip("triton")
    rng, requests, different = np.random.default_rng(5), 0, 0
    for number in range(count):
        case, _ = fuzzed_batch(rng, number % 4 == 0)
        case["rule"] = Block()
        a = verify_from_logits(**case, backend="torch")
        moved = {k: v.to(device) if isinstance(v, torch.Tensor | Sampling) else v for k, v in case.items()}
        b = verify_from_logits(**moved, backend="triton")
        assert a.valid.all() and b.valid.all()
        different += int((a.token_ids != b.token_ids.cpu()).any(1).sum())
        requests += len(a.valid)
    assert different <= requests / 50, (different, requests)  # near-ties


def test_from_logits_as_from_their_probabilities():
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(300, 5, 40, generator=generator)
    draft = target[:, :4] + torch.randn(300, 4, 40, generator=generator)
    ids = torch.multinomial(draft.softmax(-1).reshape(-1, 40), 1, generator=generator).view(300, 4)
    a = verify_from_logits(target, draft, ids, Block(), seed=0, offset=0)
    b = verify(target.softmax(-1), draft.softmax(-1), ids, Block(), seed=0, offset=0)
    assert (a.token_ids != b.token_ids).any(1).sum() <= 3
    token_by_token = verify(target.softmax(-1), draft.softmax(-1), ids, SpS(), seed=0, offset=0)
    assert a.num_accepted.float().mean() > token_by_token.num_accepted.float().mean()


# -- edges


def test_one_drafted_token_is_judged_as_by_sps():
    generator = torch.Generator().manual_seed(0)
    target, draft = (2 * torch.randn(2, 300, 2, 1030, generator=generator)).softmax(-1)
    draft = (0.5 * (draft + target))[:, :1]
    ids = torch.multinomial(draft[:, 0], 1, generator=generator)
    a, b = (verify(target, draft, ids, rule, seed=1, offset=0) for rule in (Block(), SpS()))
    assert torch.equal(a.num_accepted, b.num_accepted) and torch.equal(a.token_ids, b.token_ids)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_counts_of_bad_values(backend, device):
    """Every pair of the draft, the row pairs down to where it stops, the bonus row if all is accepted: nothing else."""
    device = "cpu" if backend == "torch" else device
    q = torch.tensor([0.25, 0.25, 0.5, 0.0], device=device).expand(5, 4, 4).clone()
    p, ids = q[:, :3].clone(), torch.tensor([[0, 1, 2]] * 5, device=device)
    q[0, 1, 1] = p[1, 2, 2] = float("nan")  # pairs of drafted tokens
    q[2, 1, 3] = float("nan")  # in a row that is not looked at: all is accepted
    q[3, 3, 0] = -0.5  # the bonus row
    ids[4, 2], q[4, 2, 0] = 3, 1.5  # q = 0 there: the chain has no chance, and stops before; its row pair is bad
    p[4, 2, 3] = 0.5
    out = verify(q, p, ids, "block", seed=0, offset=0, backend=backend)
    assert out.valid.tolist() == [False, False, True, False, False]
    assert out.num_accepted.tolist() == [0, 0, 3, 3, 0]
    assert (out.token_ids[[0, 1, 4]] == -1).all() and out.token_ids[3].tolist() == [0, 1, 2, -1]


def test_what_is_refused():
    q, p, ids = torch.full((1, 2, 4), 0.25), torch.full((1, 1, 4), 0.25), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="keeps the target's proportions, got block"):
        verify(q, p, ids, "block", seed=0, offset=0, budget=torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="block judges a whole draft"):
        law.emitted(p[0, 0], q[0, 0], "block")
    with pytest.raises(ValueError, match="one of the rules"):
        pytest.importorskip("cactus_kernels.plugins.vllm.patch").parse_rule({"rule": "block"})
    assert resolve_rule("block") == Block()


def test_texts_of_the_loop_follow_the_target():
    """3,000 texts of three tokens; more of them accepted than by SpS."""
    target, draft = table_pair(5)
    q = torch.softmax(target.table.double(), -1).numpy()
    accepted = {}
    for rule in ("block", "sps"):
        out = speculative_generate(
            target, torch.full((3_000, 1), 3), assistant_model=draft, rule=rule, seed=5, do_sample=True, top_k=0,
            num_assistant_tokens=3, max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True,
        )  # fmt: skip
        texts = out.sequences[:, 1:4].numpy()
        expected = np.einsum("a,ab,bc->abc", q[3], q, q).ravel()
        counts = np.bincount(texts @ np.array([25, 5, 1]), minlength=125)
        assert exact.chi_square_p_value(counts, expected) > exact.FALSE_ALARM
        accepted[rule] = sum(out.stats.accepted)
    assert accepted["block"] > 1.02 * accepted["sps"]
