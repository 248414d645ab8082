"""Every rule through verification: its law, that an error in its recovery shows, what its constructor refuses."""

import ast
import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support import exact
from support.laws import DRAWS, emitted_tokens, p_value, pair, sequence_law
from support.models import table_pair
from support.rule_laws import LAWS, draws_of, f

from cactus_kernels import Sampling, draw, embedded_pair, law, speculative_generate
from cactus_kernels.host import statistics as host_statistics
from cactus_kernels.rules import (
    RULES,
    AdaptiveCactus,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Lenience,
    Mentored,
    Optimal,
    Rule,
    Solve,
    SpS,
    TopK,
    Typical,
    rebuild,
    resolve_rule,
    table,
)
from cactus_kernels.rules.cactus import cactus_accept, proportional_recover
from cactus_kernels.rules.clipped import optimal_cap_accept, solved_recover
from cactus_kernels.rules.elementary import exp, log
from cactus_kernels.verification import verify, verify_from_logits

SIZES = [37, pytest.param(2051, marks=pytest.mark.slow)]


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("name", LAWS)
def test_emitted_tokens_follow_the_exact_law(name, V):
    rule, brute_force = LAWS[name]
    p, q = pair(V)
    tokens = emitted_tokens(p, q, rule, draws_of(rule, DRAWS // 4))
    p, q = p.double().numpy(), q.double().numpy()
    assert p_value(tokens, exact.emitted_by(p, q, *brute_force(p, q))) > exact.FALSE_ALARM


def from_the_target(q, q_n, h_n, stat, epsilon, alpha):
    return q


class Mutant(Rule):
    """A rule whose recovery is wrong: the draft taken off or not, against the rule; for Typical, the whole target row."""

    def __init__(self, rule):
        self.name, self.rule = "mutant", rule
        self.accept, self.recover = rule.accept, from_the_target if rule.name == "typical" else rule.recover
        self.statistics, self.subtracts_draft = rule.statistics, not rule.subtracts_draft
        self.solves, self.strengths = rule.solves, rule.strengths


@pytest.mark.parametrize("name", LAWS)
def test_a_wrong_recovery_is_caught(name):
    rule, brute_force = LAWS[name]
    p, q = pair(37)
    tokens = emitted_tokens(p, q, Mutant(rule), draws_of(rule, DRAWS // 4))
    p, q = p.double().numpy(), q.double().numpy()
    expected = exact.emitted_by(p, q, *brute_force(p, q))
    never = np.bincount(tokens.numpy(), minlength=37)[expected == 0].any()
    assert never or p_value(tokens, expected) < exact.FALSE_ALARM


@pytest.mark.parametrize(
    ("neutral", "same_as"),
    [
        (Cactus(0.0, "kl"), SpS()),
        (AdaptiveCactus(0.0), SpS()),
        (Capped(1.0), SpS()),
        (Lenience(1.0), SpS()),
        (Interpolation(1.0), SpS()),
        (Typical(0.25), Typical(0.25, 0.5)),
        (Lenience(0.25), Capped(4.0)),
    ],
    ids=str,
)
def test_rules_that_are_another_bit_for_bit(neutral, same_as):
    generator = torch.Generator().manual_seed(0)
    target, draft = (2 * torch.randn(2, 300, 5, 1030, generator=generator)).softmax(-1)
    draft = 0.5 * (draft + target)[:, :4]
    ids = torch.multinomial(draft.reshape(-1, 1030), 1, generator=generator).view(300, 4)
    a, b = (verify(target, draft, ids, rule, seed=1, offset=0) for rule in (neutral, same_as))
    assert torch.equal(a.token_ids, b.token_ids) and 0 < a.num_accepted.float().mean() < 4


def test_strengths_mix_within_a_batch():
    """Each request as if it were alone with its number."""
    generator = torch.Generator().manual_seed(0)
    target, draft = (2 * torch.randn(2, 40, 4, 200, generator=generator)).softmax(-1)
    draft = 0.5 * (draft + target)[:, :3]
    ids = torch.multinomial(draft.reshape(-1, 200), 1, generator=generator).view(40, 3)
    seed = torch.arange(40)
    for make, values in (
        (lambda x: Cactus(x, "kl"), (0.0, 0.1, 1.0, 5.0)),
        (AdaptiveCactus, (0.0, 0.1, 1.0, 5.0)),
        (Capped, (1.0, 1.5, 3.0, 10.0)),
        (Interpolation, (0.0, 0.3, 0.9, 1.0)),
        (Typical, (0.0, 0.01, 0.1, 1.0)),
    ):
        together = verify(target, draft, ids, make(torch.tensor(values * 10)), seed=seed, offset=0)
        for i, value in enumerate(values):
            alone = verify(target[i::4], draft[i::4], ids[i::4], make(value), seed=seed[i::4], offset=0)
            assert torch.equal(alone.token_ids, together.token_ids[i::4])
        assert len(set(together.num_accepted.tolist())) > 1


@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.05, 0.5, 5.0])
def test_the_kl_form_is_the_largest_within_the_budget(delta):
    """Against bisection in float64; its errors are those of fp32 numbers up to 1."""
    q = torch.cat([torch.logspace(-37, -1e-3, 1000), 1 - torch.logspace(-6, -0.5, 200)])
    rule = Cactus(delta, "kl")
    h = rule.accept(q, q, None, *rule.strengths)
    want = [exact._largest_within_kl(x, f(delta)) for x in q.double().tolist()]
    np.testing.assert_allclose(h.double(), want, atol=2e-7, rtol=5e-6)
    assert (h >= q).all()


def test_logarithm_and_exponential():
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 0, 200_000)
    x = torch.cat([x[x > 0], torch.linspace(0.5, 2.0, 100_000)])
    np.testing.assert_allclose(log(x).double(), x.double().log(), rtol=3e-7, atol=0)
    y = torch.linspace(-87, 88, 200_000)
    np.testing.assert_allclose(exp(y).double(), y.double().exp(), rtol=3e-7, atol=0)
    assert log(torch.ones(1)) == 0 and exp(torch.zeros(1)) == 1


@pytest.mark.parametrize("V", [1, 2, 1000, 150_001])
def test_row_statistics(V):
    generator = torch.Generator().manual_seed(V)
    q = (3 * torch.randn(4, V, generator=generator)).softmax(-1)
    q[1] = 1 / V
    q[2] *= torch.rand(V, generator=generator) < 0.1
    H = -torch.special.xlogy(q.double(), q.double()).sum(1)
    np.testing.assert_allclose(host_statistics.of_rows("entropy", q), H, rtol=2e-6, atol=V * 2**-40 + 1e-12)
    relative = host_statistics.of_rows("relative entropy", q)
    np.testing.assert_allclose(relative, H / np.log(max(V, 2)), rtol=2e-6, atol=V * 2**-40 + 1e-12)
    wide, total = q.double(), q.double().sum(1)
    certainty = (
        (torch.special.xlogy(wide, wide * V).sum(1) - total + 1) / np.log(max(V, 2)) if V > 1 else torch.zeros(4)
    )
    got = host_statistics.of_rows("certainty", q)
    np.testing.assert_allclose(got, certainty, rtol=2e-6, atol=V * 2**-52 + 1e-12)
    assert torch.equal(host_statistics.of_rows("largest", q), q.amax(1))
    for k in (1, 2, 10, V, V + 1):
        kth = host_statistics.of_rows(("k-th largest", k), q)
        assert torch.equal(kth, q.sort(descending=True)[0][:, k - 1] if k <= V else torch.zeros(4))


@pytest.mark.parametrize("V", [1000, 32_000, 151_936])
def test_the_certainty_of_a_nearly_uniform_row(V):
    """1 - H / ln V by subtraction would be off by a tenth and more."""
    for spread in (1e-3, 0.01, 0.1):
        q = (1 + spread * torch.randn(2, V, generator=torch.Generator().manual_seed(V), dtype=torch.float64)).float()
        q = q / q.sum(1, keepdim=True)
        t = q.double() * V
        expected = (torch.special.xlogy(t, t) - t + 1).sum(1) / V / np.log(V)
        got = host_statistics.of_rows("certainty", q).double()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=V * 2.0**-52 / np.log(V))
        if spread == 0.01:
            by_subtraction = 1 - host_statistics.of_rows("relative entropy", q).double()
            assert (by_subtraction / expected - 1).abs().max() > (got / expected - 1).abs().max()


EXTREMES = [
    *(Cactus(x, d) for x in (1.0, 104.6, 105.0, 3e38) for d in ("taylor", "kl")),
    *(AdaptiveCactus(x, s) for x in (1.0, 3e38) for s in ("certain", "uncertain")),
    *(Capped(x) for x in (1.0, 3e38)),
    *(Optimal(cap=x) for x in (1.0, 3e38)),
    *(Optimal(price=x) for x in (1.0, 3e38)),
    *(Mentored(x) for x in (0.0, 0.1, 200.0, 3e38)),
    *(Typical(x, y) for x in (0.0, 1.0) for y in (0.0, 1.0)),
    *(TopK(k) for k in (1, 4, 2**31 - 1)),
    SpS(),
    Coupled(),
]


# In the interpreter, which is slow, one of each pair of functions.
INTERPRETED = [
    Cactus(3e38), Cactus(105.0, "kl"), AdaptiveCactus(3e38, "uncertain"), Capped(3e38), Optimal(cap=3e38),
    Optimal(price=3e38), Mentored(0.1), Typical(0.0, 0.0), TopK(1), Coupled(),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "rule"), [*(("torch", r) for r in EXTREMES), *(("triton", r) for r in INTERPRETED)], ids=str
)
def test_a_token_that_the_target_excludes_never_comes_out(backend, rule, device):
    generator = torch.Generator().manual_seed(0)
    B, V, V_draft = (60 if backend == "torch" else 2), 6, 8
    target = torch.rand(B, 3, V, generator=generator) ** 8
    target[torch.rand(B, 3, V, generator=generator) < 0.5] = 0
    target[..., 1] += 1e-3
    target /= target.sum(-1, keepdim=True)
    draft = torch.rand(B, 2, V_draft, generator=generator).softmax(-1)
    ids = torch.multinomial(draft.view(-1, V_draft), 1, generator=generator).view(B, 2)
    possible = torch.nn.functional.pad(target > 0, (0, V_draft - V))
    of_drafts = [(draft, False), (None, True), (None, False), (draft, True)]
    for p, logits in of_drafts if backend == "torch" else of_drafts[:2]:
        rows = [x if x is None else x.log() if logits else x for x in (target, p)]
        rows = [x if x is None else x.to(device) for x in rows]
        function = verify_from_logits if logits else verify
        drafted = ids.clamp(max=V - 1) if p is None else ids
        out = function(*rows, drafted.to(device), rule, seed=1, offset=0, backend=backend)
        assert out.valid.all()
        tokens = out.token_ids.cpu()
        for j in range(3):
            some = tokens[:, j] >= 0
            assert possible[some, j].gather(1, tokens[some, j, None]).all()


@pytest.mark.parametrize(("backend", "count"), [("torch", 20), ("triton", 3)])
def test_interpolation_accepts_what_the_draft_alone_allows_but_no_id_beyond_the_target(backend, count, device):
    target = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], device=device).expand(count, 2, 2)
    draft = torch.tensor([[[0.1, 0.3, 0.1, 0.5]]], device=device).expand(count, 1, 4)
    for n, accepted in ((1, True), (2, False), (3, False)):
        ids = torch.full((count, 1), n, device=device)
        for p in (draft, None) if n < 2 else (draft,):
            out = verify(target, p, ids, Interpolation(0.1), seed=1, offset=0, backend=backend)
            assert out.valid.all() and bool(out.num_accepted.any()) == accepted and (out.token_ids < 2).all()


@pytest.mark.filterwarnings("error::RuntimeWarning:cactus_kernels")
@pytest.mark.parametrize("name", RULES)
def test_a_token_that_the_target_excludes_is_replaced_without_a_warning(name):
    target, draft, ids = torch.tensor([[[0.0, 1.0]] * 2]), torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0]])
    out = verify(target, draft, ids, name, seed=0, offset=0, backend="torch")
    assert out.token_ids.tolist() == [[1, -1]] and out.valid.all()


def test_typical_recovers_the_likeliest_and_always_accepts_it():
    q = torch.tensor([0.1, 0.5, 0.15, 0.25]).expand(50, 2, 4)
    ids = torch.tensor([0, 1, 2, 3] * 12 + [0, 1])[:, None]
    out = verify(q, None, ids, Typical(0.2), seed=0, offset=0)  # the threshold: min(.2, sqrt(.2) e^-H) = .13
    assert out.num_accepted.bool().tolist() == [bool(i) for i in ids[:, 0]]
    assert (out.token_ids[:, 0] == torch.where(ids[:, 0] == 0, 1, ids[:, 0])).all()


@pytest.mark.parametrize("recovery", ["target", "upstream"])
def test_top_k_never_leaves_the_k_likeliest(recovery):
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 200, 2, 50, generator=generator).softmax(-1)
    ids = torch.multinomial(draft[:, 0], 1, generator=generator)
    out = verify(target, draft[:, :1], ids, TopK(4, recovery), seed=0, offset=0)
    kept = target[:, 0].gather(1, out.token_ids[:, :1])[:, 0] >= target[:, 0].topk(4)[0][:, -1]
    assert kept.all() and 0 < out.num_accepted.sum() < 200


def coupled_batch(B=300, V=60):
    """Rows of three drafts, drawn with the noise of their positions."""
    target, noise = torch.randn(2, B, 4, V, generator=torch.Generator().manual_seed(0))
    draft = (1.5 * target + noise)[:, :3].softmax(-1)
    seeds, offset = torch.arange(B), torch.arange(B) * 7
    ids = torch.cat([draw(draft[:, j], seed=seeds, offset=offset + j).token_ids for j in range(3)], 1)
    return (1.5 * target).softmax(-1), draft, ids, {"seed": seeds, "offset": offset}


def test_coupled_emits_the_draws_of_the_target(device):
    target, draft, ids, stream = coupled_batch()
    m = ids.shape[1]
    plain = torch.stack(
        [draw(target[:, j], seed=stream["seed"], offset=stream["offset"] + j).token_ids[:, 0] for j in range(m + 1)], 1
    )
    out = verify(target, draft, ids, Coupled(), **stream)
    emitted = out.token_ids >= 0
    assert torch.equal(emitted.sum(1), out.num_accepted + 1) and out.valid.all()
    assert torch.equal(out.token_ids[emitted], plain[emitted])
    equal = (plain[:, :3] == ids).int().cumprod(1).sum(1)
    assert torch.equal(out.num_accepted.long(), equal) and 0.5 < (equal > 0).float().mean() < 0.95
    # Without draft rows, flat, and by the kernel: the same.
    cu = torch.arange(0, 3 * 300 + 1, 3, dtype=torch.int32)
    flat = verify(
        target.flatten(0, 1), None, ids.flatten(), "coupled", cu_draft_tokens=cu, max_draft_tokens=3, **stream
    )
    assert torch.equal(flat.token_ids, out.token_ids)
    few = [x[:6].to(device) for x in (target, ids, *stream.values())]
    kernel = verify(few[0], None, few[1], Coupled(), seed=few[2], offset=few[3], backend="triton")
    assert torch.equal(kernel.token_ids.cpu(), out.token_ids[:6])


def test_coupled_follows_the_target_though_it_shares_its_noise_with_the_draft():
    p, q = pair(37)
    draws = DRAWS // 2
    ids = draw(p.expand(draws, 37), seed=3, offset=0).token_ids
    out = verify(q.expand(draws, 2, 37), p.expand(draws, 1, 37), ids, Coupled(), seed=3, offset=0)
    assert p_value(out.token_ids[:, 0], q.double().numpy()) > exact.FALSE_ALARM
    meeting = exact.meeting(p.double().numpy(), q.double().numpy()).sum()
    assert abs(out.num_accepted.float().mean() - meeting) < 6 * 0.5 / draws**0.5


def test_coupled_refuses_a_bonus_token_of_the_callers():
    target, _, ids, stream = coupled_batch(2)
    bonus = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="leave bonus_token_ids out"):
        verify_from_logits(target[:, :3].log(), None, ids, Coupled(), bonus_token_ids=bonus, **stream)


@pytest.mark.slow
def test_coupled_gives_one_text_with_speculation_off_and_on():
    """100 prompts, float64 models, m = 0, 1, 3 and 8, two drafts."""
    target, draft, tokenizer = embedded_pair(dtype=torch.float64)
    words = tokenizer("Maria has 12 boxes of pencils and gives 7 to each of her friends. How many are left?").input_ids
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor(words)[torch.randint(0, len(words), (100, 6), generator=generator)]
    settings = {"rule": "coupled", "seed": list(range(100)), "do_sample": True, "max_new_tokens": 24}
    plain = speculative_generate(target, prompts, assistant_model=draft, num_assistant_tokens=[0] * 100, **settings)
    for assistant in (draft, target):
        for count in (1, 3, 8):
            out = speculative_generate(
                target,
                prompts,
                assistant_model=assistant,
                num_assistant_tokens=count,
                return_dict_in_generate=True,
                **settings,
            )
            assert torch.equal(out.sequences, plain)
            # Drafts do come through: of eight the later ones seldom, so the rate says little.
            assert out.stats.tokens_per_forward > (1.25 if assistant is draft else 0.8 * (count + 1))


@pytest.mark.parametrize("rule", [Typical(0.2), Optimal(cap=1.5), Optimal(price=2.0)], ids=str)
def test_from_logits_on_triton(rule, device):
    """The tokens of the torch backend: a greedy request, one truncated, one plain. Logits are well apart from ties."""
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(3, 3, 300, generator=generator)
    draft = target[:, :2] + torch.randn(3, 2, 300, generator=generator)
    ids = draft.argmax(-1)
    sampling = Sampling(torch.tensor([0.0, 0.8, 1.0]), top_k=torch.tensor([0, 20, 0]))
    expected = verify_from_logits(target, draft, ids, rule, seed=1, offset=0, sampling=sampling, backend="torch")
    assert expected.valid.all()
    target, draft, ids = (x.to(device) for x in (target, draft, ids))
    options = {"seed": 1, "offset": 0, "sampling": sampling.to(device), "backend": "triton"}
    got = verify_from_logits(target, draft, ids, rule, **options)
    assert torch.equal(got.token_ids.cpu(), expected.token_ids)
    with pytest.raises(ValueError, match="padded layout"):
        verify_from_logits(target[:, :2], draft, ids, rule, bonus_token_ids=ids[:, 0], **options)


# -- a budget for a sequence


@pytest.mark.parametrize(
    "rule", [Cactus(0.5), Cactus(0.5, "kl"), AdaptiveCactus(1.0), Capped(3.0), Interpolation(0.3)], ids=str
)
def test_a_budget_caps_h_and_is_reported(rule):
    """One position at three budgets: the law with h_n <= q_n e^budget, in float64 by the rule's own body."""
    p, q = pair(37)
    p64, q64 = p.double(), q.double()
    draws = DRAWS // 4
    stat = tuple(host_statistics.of_rows(name, q[None])[0].double() for name in rule.statistics) or None
    h = rule.accept(q64, p64, stat, *rule.strengths)
    spent = []
    for budget in (0.0, 0.2, 50.0):
        h_n = torch.minimum(h, q64 * np.exp(budget))
        scale = (1 - h_n) / (1 - q64) if isinstance(rule, (Cactus, AdaptiveCactus)) else torch.ones(37).double()

        def recovery(n, scale=scale):
            return (q64 * scale[n] - p64).clamp(min=0).numpy()

        expected = exact.emitted_by(p64.numpy(), q64.numpy(), (h_n / p64).clamp(max=1).numpy(), recovery)
        ids = torch.from_numpy(np.random.default_rng(1).choice(37, size=(draws, 1), p=p64.numpy() / p64.sum().item()))
        left = torch.full((draws,), budget, dtype=torch.float64)
        out = verify(q.expand(draws, 2, 37), p.expand(draws, 1, 37), ids, rule, seed=1, offset=0, budget=left)
        assert p_value(out.token_ids[:, 0], expected) > exact.FALSE_ALARM
        n = ids[:, 0]
        should = (torch.minimum(p64, h_n)[n] / q64[n]).log().clamp(min=0) * (out.num_accepted > 0)
        assert (out.spent <= left).all() and (out.spent >= should - 2e-6).all() and (out.spent <= should + 4e-6).all()
        spent.append(out.spent.mean().item())
        if budget == 0:
            sps = verify(q.expand(draws, 2, 37), p.expand(draws, 1, 37), ids, "sps", seed=1, offset=0)
            assert torch.equal(out.token_ids, sps.token_ids)
    assert spent[0] == 0 < spent[1] < spent[2]


def markov_tree(p, q, context, length):
    tree = {}

    def grow(prefix, token):
        tree[prefix] = p[token], q[token]
        if len(prefix) < length - 1:
            for x in range(len(p)):
                grow((*prefix, x), x)

    grow((), context)
    return tree


@pytest.mark.parametrize("count", [2, 3])
def test_texts_within_a_budget_follow_their_exact_law(count):
    """12,000 texts of three tokens through the loop against enumeration; the last of four tokens follows the target."""
    target, draft = table_pair(5)
    tables = [torch.softmax(model.table.double(), -1).numpy() for model in (draft, target)]
    law, of_target = sequence_law(markov_tree(*tables, 3, 3), 1.0, 0.4, count, 3)
    out = speculative_generate(
        target, torch.full((12_000, 1), 3), assistant_model=draft, rule=Cactus(1.0), budget=0.4, seed=5, do_sample=True, top_k=0,
        num_assistant_tokens=count, max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True,
    )  # fmt: skip
    texts = [tuple(t) for t in out.sequences[:, 1:4].tolist()]
    codes = np.array([t[0] * 25 + t[1] * 5 + t[2] for t in texts])
    expected = np.zeros(125)
    for text, mass in law.items():
        expected[text[0] * 25 + text[1] * 5 + text[2]] = mass
    assert exact.chi_square_p_value(np.bincount(codes, minlength=125), expected) > exact.FALSE_ALARM
    assert max(np.log(mass / of_target[text]) for text, mass in law.items() if mass) <= 0.4 + 1e-9
    assert 0 < np.mean(out.stats.spent) < 0.4 and max(out.stats.spent) <= 0.4 and min(out.stats.spent) >= 0
    assert out.stats.total_variation_bound[0] == pytest.approx(1 - np.exp(-0.4))


@pytest.mark.parametrize(
    ("budget", "rule", "error", "says"),
    [
        (-0.1, "cactus", ValueError, "at least 0"),
        (float("nan"), "cactus", ValueError, "at least 0"),
        ("1", "cactus", TypeError, "number of nats"),
        ([1.0], "cactus", ValueError, "1 entries for 2 rows"),
        (1.0, "typical", ValueError, "keeps the target's proportions"),
        (1.0, Optimal(cap=2.0), ValueError, "keeps the target's proportions"),
    ],
)
def test_budgets_are_refused(budget, rule, error, says):
    target, draft = table_pair(5)
    with pytest.raises(error, match=says):
        speculative_generate(target, torch.ones(2, 1).long(), assistant_model=draft, rule=rule, budget=budget)


def fixed_accept(q_n, p_n, stat):
    return cactus_accept(q_n, p_n, stat, 1.0)


def fixed_recover(q, q_n, h_n, stat):
    return proportional_recover(q, q_n, h_n, stat, 1.0)


class Fixed(Rule):
    """`Cactus(1)`, its strength in the body."""

    name = "fixed"
    keeps_proportions = True
    accept = staticmethod(fixed_accept)
    recover = staticmethod(fixed_recover)


@pytest.mark.parametrize(("backend", "count"), [("torch", 400), ("triton", 6)])
def test_a_rule_without_strengths_keeps_its_budget(backend, count, device):
    device = device if backend == "triton" else "cpu"
    p, q = (x.to(device) for x in pair(37))
    ids = torch.multinomial(p.expand(3 * count, 37), 1, generator=torch.Generator(device).manual_seed(0)).view(count, 3)
    p, q = p.expand(count, 3, 37), q.expand(count, 4, 37)
    options = {"seed": 1, "offset": 0, "backend": backend}
    none, some = (torch.full((count,), x, dtype=torch.float64, device=device) for x in (0.0, 0.5))
    assert (
        verify(q, p, ids, Fixed(), **options).num_accepted.sum()
        > verify(q, p, ids, "sps", **options).num_accepted.sum()
    )
    out = verify(q, p, ids, Fixed(), budget=none, **options)
    assert torch.equal(out.token_ids, verify(q, p, ids, "sps", **options).token_ids) and not out.spent.any()
    out, expected = (verify(q, p, ids, rule, budget=some, **options) for rule in (Fixed(), Cactus(1.0)))
    assert torch.equal(out.token_ids, expected.token_ids) and torch.equal(out.spent, expected.spent)
    assert out.spent.any()


@pytest.mark.parametrize("name", RULES)
def test_which_rules_are_lossless(name):
    assert resolve_rule(name).lossless is (name in ("block", "coupled", "sps"))


def second_cap_accept(q_n, p_n, stat, unused, cap):
    return optimal_cap_accept(q_n, p_n, stat, cap)


def second_cap_recover(q, q_n, h_n, stat, unused, cap):
    return solved_recover(q, q_n, h_n, stat, cap)


class Solved(Rule):
    """`Optimal(cap=1.5)` with no more than `Rule` declares, its cap the second of two strengths."""

    name, solves = "solved", Solve("cap", strength=1)
    strengths = (0.5, 1.5)
    accept = staticmethod(second_cap_accept)
    recover = staticmethod(second_cap_recover)


@pytest.mark.parametrize(("backend", "count"), [("torch", 400), ("triton", 6)])
def test_a_solved_rule_of_ones_own(backend, count, device):
    device = device if backend == "triton" else "cpu"
    p, q = (x.to(device) for x in pair(37))
    ids = torch.multinomial(p.expand(count, 37), 1, generator=torch.Generator(device).manual_seed(0))
    p, q = p.expand(count, 1, 37), q.expand(count, 2, 37)
    out, expected = (verify(q, p, ids, r, seed=1, offset=0, backend=backend) for r in (Solved(), Optimal(cap=1.5)))
    assert torch.equal(out.token_ids, expected.token_ids) and 0 < out.num_accepted.sum() < count


CORE = (
    "verification", "host/verify", "kernels/verify", "kernels/judge", "host/clip", "kernels/clip", "host/statistics",
    "kernels/statistics", "coupled", "host/block", "kernels/block", "contract", "backends", "law/exact", "ops",
    "decoding/stats",
)  # fmt: skip


def test_what_is_read_of_a_rule_is_declared():
    def is_rule(x):
        return (isinstance(x, ast.Name) and x.id == "rule") or (isinstance(x, ast.Attribute) and x.attr == "rule")

    package = Path(law.__file__).parents[1]
    nodes = [x for name in CORE for x in ast.walk(ast.parse((package / f"{name}.py").read_text()))]
    read = {x.attr for x in nodes if isinstance(x, ast.Attribute) and is_rule(x.value)}
    assert (
        {"strengths", "accept", "recover", "solves", "lossless"} <= read <= Rule.__annotations__.keys() | {"reads_rows"}
    )


# -- what is refused

REFUSED = [
    *((lambda x=x: Cactus(x, "kl"), ValueError, "delta") for x in (-1.0, float("nan"), float("inf"))),
    (lambda: Cactus(1.0, "kl2"), ValueError, "divergence"),
    (lambda: AdaptiveCactus(True), TypeError, "delta"),
    (lambda: AdaptiveCactus(1.0, "never"), ValueError, "spend"),
    (lambda: Capped(0.99), ValueError, "cap must be finite and at least 1"),
    (lambda: Capped(torch.ones(2, 2)), ValueError, "cap must have shape"),
    (lambda: Lenience(0), ValueError, "lenience"),
    (lambda: Lenience(1.5), ValueError, "lenience"),
    (lambda: Lenience("1"), TypeError, "lenience"),
    (lambda: Interpolation(1.01), ValueError, r"weight must be in \[0, 1\]"),
    (lambda: Interpolation(torch.ones(2, dtype=torch.int64)), TypeError, "weight"),
    (lambda: Typical(1.5), ValueError, "epsilon"),
    (lambda: Typical(0.5, 2.0), ValueError, "alpha"),
    (lambda: TopK(0), ValueError, "at least 1"),
    (lambda: RULES["top-k"].make(1e39), ValueError, "k must be at least 1 and fit in 32 bits, got 9{5}"),
    (lambda: TopK(2, "draft"), ValueError, "recovery must be"),
    (lambda: TopK(2.0), TypeError, "k must be an int, got 2.0"),
    *(
        (lambda x=x: RULES["top-k"].make(x), TypeError, f"k must be an int, got {x}")
        for x in (2.5, float("inf"), float("nan"))
    ),
    (lambda: Optimal(), ValueError, "one of"),
    (lambda: Optimal(cap=2.0, price=2.0), ValueError, "one of"),
    (lambda: Optimal(cap=0.5), ValueError, "cap"),
    (lambda: Mentored(-0.1), ValueError, "kl"),
]


@pytest.mark.parametrize(("make", "error", "says"), REFUSED)
def test_rules_refuse(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_the_readme_holds_the_table_of_rules():
    assert table() in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_rule_of_docs_rules(tmp_path, monkeypatch):
    """The example in docs/rules.md, as a module of its own: its source has to be found when it is compiled."""
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", page, re.S)[1].replace("Halfway())", "Halfway(), cases=2)")
    (tmp_path / "halfway_rule.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("halfway_rule")


@pytest.mark.parametrize("name", RULES)
def test_rules_by_name(name):
    rule = resolve_rule(name)
    assert rule.name == name or name == "lenience"
    again = rebuild(rule.name, rule.strengths)
    assert (
        type(again) is type(rule)
        and again.strengths == rule.strengths
        and getattr(again, "accept", None) is getattr(rule, "accept", None)
    )
    with pytest.raises(ValueError, match="takes the rules"):
        rebuild("mine", ())
