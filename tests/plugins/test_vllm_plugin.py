"""The vLLM plugin without vLLM: laws, what the two model runners share, bad values, streams, settings, signatures."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from support.exact import FALSE_ALARM, chi_square_p_value, emitted

from cactus_kernels import Cactus, SpS, law, verify_from_logits
from cactus_kernels.plugins.vllm import verifier as plugin
from cactus_kernels.plugins.vllm.patch import V1, V2, activate, parse_rule, replace
from cactus_kernels.plugins.vllm.verifier import Verifier, new_seeds

V = 12


def metadata(temperature, generators=None):
    """vLLM's SamplingMetadata as far as it is read. temperature: fp32 [B]."""
    greedy = temperature == 0
    return SimpleNamespace(
        temperature=temperature, all_greedy=bool(greedy.all()), all_random=not greedy.any(), generators=generators or {}
    )


def v1(verifier, q, p, ids, lengths, temperature, bonus=None, generators=None):
    """V1's call: q processed logits [T, V], p probabilities [T, V] or None, ids int32 [T]."""
    lengths = list(lengths)
    cu = torch.tensor(lengths).cumsum(0).int().to(q.device)
    bonus = torch.zeros(len(lengths), 1, dtype=torch.int32, device=q.device) if bonus is None else bonus
    return verifier.v1(ids, lengths, max(lengths), cu, p, q, bonus, metadata(temperature, generators))


def pair(seed=0, sharpness=1.5):
    """Two distributions over V tokens, float64 [V]."""
    generator = torch.Generator().manual_seed(seed)
    q, p = (sharpness * torch.randn(2, V, generator=generator, dtype=torch.float64)).softmax(-1)
    return q, p


def v2(verifier, q, p, ids):
    """V2's call for requests of one drafted token, in slots turned by one: logits q, p [V], p None: one-hot drafts."""
    B = len(ids)
    rows = q.log().float().expand(2 * B, V)
    draft = None if p is None else p.log().float().expand(B, 1, V)
    fed = torch.stack([torch.zeros_like(ids), ids], 1).view(-1)
    slot, local = torch.arange(B).roll(1).int(), torch.arange(2).repeat(B)
    tokens, _ = verifier.v2(
        rows, draft, fed, torch.arange(0, 2 * B + 1, 2).int(), 100 + local, slot, slot.repeat_interleave(2), local,
        torch.ones(B), torch.arange(B), 1,
    )  # fmt: skip
    return tokens


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["draft", "one-hot draft"])
@pytest.mark.parametrize("delta", [0.0, 0.05, 1.0])
def test_100_000_tokens_follow_the_exact_law(delta, one_hot, runner):
    q, p = pair()
    B, verifier = 100_000, Verifier(Cactus(delta))
    torch.manual_seed(int(100 * delta) + one_hot)
    ids = torch.multinomial(p, B, replacement=True).int()
    if one_hot:
        ids.fill_(3)  # whatever proposes it
        p = torch.nn.functional.one_hot(torch.tensor(3), V).double()
    if runner == "V1":
        rows, draft = (x.float().expand(B, V).contiguous() for x in (q.log(), p))
        out = v1(verifier, rows, None if one_hot else draft, ids, [1] * B, torch.ones(B))
    else:
        out = v2(verifier, q, None if one_hot else p, ids)
    expected = law.emitted(p, q, Cactus(delta))
    np.testing.assert_allclose(expected, emitted(p.numpy(), q.numpy(), delta), atol=1e-12)
    counts = torch.bincount(out[:, 0], minlength=V).double()
    assert chi_square_p_value(counts.numpy(), expected.numpy()) > FALSE_ALARM


def both(rule, backend, dtype=torch.float32, temperatures=(1.0, 0.0, 0.7, 1.0, 0.0, 1.3), V_draft=V):
    """The same six requests to V1 and V2: what comes back from each, and the lengths. Positions start at 0, where V2's offsets
    are those of V1."""
    generator = torch.Generator().manual_seed(3)
    lengths, K, slots = [2, 3, 0, 4, 1, 4], 4, [5, 0, 7, 2, 1, 3]
    T, B = sum(lengths), len(lengths)
    temperature = torch.tensor(temperatures)
    target = (2 * torch.randn(T + B, V, generator=generator)).to(dtype)
    draft = (2 * torch.randn(8, K, V_draft, generator=generator)).to(dtype)
    ids = torch.randint(V_draft, (T,), generator=generator).int()
    ids[7] = -1  # the third of request 3: its draft ends there

    # V2's layout: the token fed at each row, the first of each request being one that was emitted before.
    cu_logits = torch.tensor([0, *lengths]).cumsum(0).int() + torch.arange(B + 1).int()
    request = torch.repeat_interleave(torch.arange(B), torch.tensor(lengths) + 1)
    local = torch.arange(T + B) - cu_logits[request]
    fed = torch.full((T + B,), 11, dtype=torch.int32)
    fed[local > 0] = ids
    idx_mapping = torch.tensor(slots).int()
    by_slot = torch.full((8,), 9.0).scatter(0, idx_mapping.long(), temperature)
    torch.manual_seed(5)
    seeds = new_seeds(lengths, {}, target.device)
    seed_by_slot = torch.full((8,), -1).scatter(0, idx_mapping.long(), seeds)
    # vLLM has applied the temperature to the target's rows, not to the draft's.
    scale = torch.where(temperature == 0, 1.0, temperature)
    processed = (target.float() / scale[request, None]).to(dtype)
    kept = [x.clone() for x in (processed, draft)]
    v2 = Verifier(rule, backend=backend).v2(
        processed, draft, fed, cu_logits, local.clone(), idx_mapping, idx_mapping[request], local.int(), by_slot,
        seed_by_slot, K,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(kept, (processed, draft), strict=True))

    probs = torch.zeros(T, V)
    of_draft = request[local > 0], local[local > 0] - 1
    rows = draft[idx_mapping[of_draft[0]].long(), of_draft[1]].float() / scale[of_draft[0], None]
    probs[:, :V_draft] = rows.softmax(-1)
    bonus_rows = processed[cu_logits[1:].long() - 1]
    torch.manual_seed(5)
    v1_tokens = v1(
        Verifier(rule, backend=backend), processed[local < torch.tensor(lengths)[request]].float(), probs, ids, lengths,
        temperature, bonus_rows.argmax(1, keepdim=True).int(),
    )  # fmt: skip
    return v1_tokens, *v2, torch.tensor(lengths), temperature


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", [SpS(), Cactus(0.05), Cactus(1.0)], ids=["SpS", "Cactus 0.05", "Cactus 1"])
def test_both_runners_emit_the_same_tokens(rule, dtype, backend):
    one, two, num_sampled, lengths, temperature = both(
        rule, backend, dtype, V_draft=V if dtype == torch.float32 else V - 3
    )
    assert two.dtype == torch.int64 and num_sampled.dtype == torch.int32 and one.dtype == torch.int32
    assert torch.equal(num_sampled, (two >= 0).sum(1).int()) and (two < V).all()
    # V1's bonus tokens come from vLLM's sampler, here from an arg max; the greedy ones are the same.
    j = torch.arange(one.shape[1])
    same = (j < lengths[:, None]) | (temperature == 0)[:, None]
    assert torch.equal(one.long()[same], two[same])
    assert (one[3, 3:] == -1).all() and (one[2, 1:] == -1).all()


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_greedy_requests_follow_the_arg_max(runner):
    one, two, _, lengths, _ = both(Cactus(1.0), "torch", temperatures=[0.0] * 6)
    tokens = {"V1": one.long(), "V2": two}[runner]
    again = both(SpS(), "torch", temperatures=[0.0] * 6)
    assert torch.equal(tokens, {"V1": again[0].long(), "V2": again[1]}[runner])
    generator = torch.Generator().manual_seed(3)
    largest = (2 * torch.randn(int(lengths.sum()) + 6, V, generator=generator)).argmax(1)
    start = 0
    for b, length in enumerate(lengths.tolist()):
        emitted_here = tokens[b][tokens[b] >= 0]
        assert torch.equal(emitted_here, largest[start : start + len(emitted_here)])
        start += length + 1


def test_delta_0_is_sps_token_for_token():
    for dtype in (torch.float32, torch.bfloat16):
        for a, b in zip(both(Cactus(0.0), "torch", dtype)[:3], both(SpS(), "torch", dtype)[:3], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_bad_logits_harm_nobody_else(runner, backend):
    """A request with NaN logits gets the arg max of the finite ones and is counted; its neighbours' tokens do not change."""
    B, K = 5, 3
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(B, K + 1, V, generator=generator)
    draft = torch.randn(B, K, V, generator=generator)
    ids = torch.randint(V, (B, K), generator=generator).int()
    bad = rows.clone()
    bad[2] = torch.nan
    bad[2, :, [4, 9]] = torch.tensor([1.0, 2.0])

    def run(rows):
        torch.manual_seed(1)
        verifier = Verifier(Cactus(0.05), interval=0.0, backend=backend)
        if runner == "V1":
            tokens = v1(
                verifier,
                rows[:, :K].reshape(-1, V),
                draft.softmax(-1).view(-1, V),
                ids.view(-1),
                [K] * B,
                torch.ones(B),
            )
        else:
            fed = torch.cat([torch.zeros(B, 1, dtype=torch.int32), ids], 1).view(-1)
            cu = (torch.arange(B + 1) * (K + 1)).int()
            local = torch.arange(K + 1).repeat(B)
            slot = torch.arange(B).int()
            tokens, num_sampled = verifier.v2(
                rows.view(-1, V), draft, fed, cu, local, slot, slot.repeat_interleave(K + 1), local, torch.ones(B),
                torch.arange(B), K,
            )  # fmt: skip
            assert torch.equal(num_sampled, (tokens >= 0).sum(1).int())
        return tokens, verifier

    tokens, verifier = run(bad)
    good, _ = run(rows)
    assert tokens[2].tolist() == [9, *[-1] * K]
    others = [b for b in range(B) if b != 2]
    assert torch.equal(tokens[others], good[others])
    assert verifier.status() == {"rule": "Cactus(delta=0.05, divergence='taylor')", "calls": 1, "invalid": 1}


def test_bad_requests_are_logged_once(caplog):
    count = plugin.InvalidCount(torch.device("cpu"), interval=0.0)
    with caplog.at_level("WARNING", logger="vllm.cactus_kernels"):
        for n in (0, 3, 0, 0, 2, 0):
            count.total += n
            count.log()
    assert [r.args for r in caplog.records] == [(3, 3), (5, 2)]
    count = plugin.InvalidCount(torch.device("cpu"), interval=1000.0)
    count.total += 1
    count.log()
    assert int(count.seen) == 0


def test_a_request_with_a_seed_does_not_depend_on_its_batch():
    """Runner V1: a request's own generator gives its stream, step after step; others get new seeds at each call."""
    q, p = pair()
    ids = torch.multinomial(p, 40, replacement=True, generator=torch.Generator().manual_seed(0)).int().view(20, 2)
    rows, draft = q.log().float().expand(2, V), p.float().expand(2, V)

    def texts(B, mine):
        verifier, generator, out = Verifier(SpS()), torch.Generator().manual_seed(42), []
        for step in range(20):
            tokens = v1(
                verifier, rows.repeat(B, 1), draft.repeat(B, 1), ids[step].repeat(B), [2] * B, torch.ones(B),
                generators={mine: generator},
            )  # fmt: skip
            out.append(tokens[mine].tolist())
        return out

    torch.manual_seed(0)
    alone = texts(1, 0)
    assert texts(3, 1) == alone
    assert len({tuple(x) for x in alone}) > 3
    seeds = torch.cat([new_seeds([1] * 1000, {}, torch.device("cpu")) for _ in range(10)])
    assert len(seeds.unique()) == 10_000
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    new_seeds([0, 1], {0: generator}, torch.device("cpu"))
    assert torch.equal(generator.get_state(), before)


def test_offsets_of_runner_v2_are_never_used_twice(monkeypatch):
    """A text of a request, whatever is accepted at each step: no row of its stream is used by two steps."""
    used, K = [], 5
    monkeypatch.setattr(
        plugin, "verify_from_logits", lambda *a, **k: used.append(k["offset"]) or verify_from_logits(*a, **k)
    )
    generator = torch.Generator().manual_seed(0)
    verifier, position, rows = Verifier(SpS()), 17, []
    for step in range(40):
        m = int(torch.randint(K + 1, (), generator=generator))  # adaptive draft lengths
        fed = torch.randint(V, (m + 1,), generator=generator).int()
        zero = torch.zeros(m + 1, dtype=torch.int32)
        _, num_sampled = verifier.v2(
            torch.randn(m + 1, V, generator=generator), torch.randn(1, K, V, generator=generator), fed,
            torch.tensor([0, m + 1]).int(), position + torch.arange(m + 1), zero[:1], zero, zero, torch.ones(1),
            torch.tensor([7]), K,
        )  # fmt: skip
        rows += range(int(used[step]), int(used[step]) + m + 1)
        position += int(num_sampled)
    assert len(rows) == len(set(rows)) > 100


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, "Cactus(delta=1.0, divergence='taylor')"),
        ({"rule": "sps"}, "SpS()"),
        ({"delta": 0.25}, "Cactus(delta=0.25, divergence='taylor')"),
        ({"rule": "cactus-kl", "delta": 0.1}, "Cactus(delta=0.1, divergence='kl')"),
        ({"rule": "capped", "cap": 3}, "Capped(cap=3)"),
        ({"rule": "lenience", "lenience": 0.5}, "Capped(cap=2.0)"),
        ({"rule": "interpolation", "weight": 0.25}, "Interpolation(weight=0.25)"),
    ],
)
def test_settings_name_a_rule(settings, expected):
    assert repr(parse_rule(settings)) == expected


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (1.0, TypeError, "must be an object such as .* got 1.0"),
        ({"rule": "typical"}, ValueError, "one of the rules sps, cactus, .* got 'typical'"),
        ({"rule": ["cactus"]}, ValueError, r"got \['cactus'\]"),
        ({"rule": "cactus", "strength": 1}, ValueError, "the rule cactus takes delta, got strength"),
        ({"rule": "sps", "delta": 1}, ValueError, "the rule sps takes no strength, got delta"),
        ({"delta": -1}, ValueError, "delta must be finite and at least 0"),
        ({"delta": "1"}, TypeError, "delta must be a number"),
        ({"delta": [1.0]}, TypeError, "delta must be a number"),
    ],
)
def test_bad_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        parse_rule(settings)


# What follows the leading parameters of `rejection_sample`, as releases of vLLM have it.
FLY = ["fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"]
V1_OPTIONS = ["synthetic_mode", "synthetic_conditional_rates", "use_fp64_gumbel"]
V2_OPTIONS = ["synthetic_conditional_rates", "use_fp64", "use_block_verification", "contexts", "watermarking"]
RELEASES = {
    "V1 of 0.28 to 0.32": (V1, V1_OPTIONS),
    "V1 of 0.33": (V1, V1_OPTIONS + FLY),
    "V2 of 0.28 and 0.29": (V2, V2_OPTIONS[:3]),
    "V2 of 0.30 and 0.31": (V2, [*V2_OPTIONS, "watermark_key"]),
    "V2 of 0.32": (V2, [*V2_OPTIONS, "watermarking_skip_mask", "watermark_key"]),
    "V2 of 0.33": (V2, [*V2_OPTIONS, "watermarking_skip_mask", "watermark_key", *FLY]),
}


@pytest.fixture
def vllm(monkeypatch):
    """A function that puts a module of vLLM's in place whose `rejection_sample` takes what it is told to."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.9"))
    monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace(VLLM_LOG_STATS_INTERVAL=10.0))

    def make(place, leading, options, calls="rejection_sample"):
        module = ModuleType(place.module)
        parameters = ", ".join([*leading, *(f"{name}=None" for name in options)])
        source = (
            f"def rejection_sample({parameters}): return 'stock'\nclass RejectionSampler:\n def forward(self): {calls}"
        )
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, place.module, module)
        return module

    return make


@pytest.mark.parametrize("place, options", RELEASES.values(), ids=RELEASES.keys())
def test_calls_reach_the_verifier_or_stock(vllm, place, options):
    """Every known release: standard verification is ours, however it is called; block, fly and the like are vLLM's."""
    module = vllm(place, place.reads, options)
    ours = SimpleNamespace(v1=lambda *args: args, v2=lambda *args: args)
    replace(place, ours)
    values = tuple(range(len(place.reads)))
    call = module.rejection_sample
    assert call(*values) == values == call(**dict(zip(place.reads, values, strict=True)))
    assert call(*values, **dict.fromkeys(options)) == values
    for name in options:
        for value in (True, 5, torch.zeros(2)):
            assert call(*values, **{name: value}) == ("stock" if name in place.handed else values)
        assert call(*values, **{name: False}) == call(*values, **{name: 0}) == values


@pytest.mark.parametrize("place", [V1, V2], ids=["V1", "V2"])
def test_a_signature_that_is_not_known_is_refused(vllm, place):
    ours = SimpleNamespace(v1=None, v2=None)
    for leading, options in (
        (place.reads, ["lookahead"]),
        ((place.reads[1], place.reads[0], *place.reads[2:]), []),
        (place.reads[:-1], []),
    ):
        module = vllm(place, leading, options)
        stock = module.rejection_sample
        with pytest.raises(RuntimeError, match=r"rejection_sample of vLLM 0\.32\.9 takes .*; cactus_kernels knows"):
            replace(place, ours)
        assert module.rejection_sample is stock
    vllm(place, place.reads, [], calls="another_function")
    with pytest.raises(RuntimeError, match=r"RejectionSampler of vLLM 0\.32\.9 does not call rejection_sample"):
        replace(place, ours)


@pytest.mark.parametrize("place", [V1, V2], ids=["V1", "V2"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_log_says_what_verifies(vllm, caplog, place, method):
    module = vllm(place, place.reads, [])
    stock = module.rejection_sample
    spec = SimpleNamespace(num_speculative_tokens=4, rejection_sample_method=method)
    config = SimpleNamespace(
        additional_config={"cactus": {"delta": 0.5}}, speculative_config=spec, use_v2_model_runner=place is V2
    )
    with caplog.at_level("INFO", logger="vllm.cactus_kernels"):
        assert repr(activate(config).rule) in activate(config).status()["rule"]
    assert module.rejection_sample.__wrapped__ is stock  # once, though activated twice
    said = {r.getMessage() for r in caplog.records}
    assert said == {
        f"cactus_kernels: model runner {place.runner} verifies by Cactus(delta=0.5, divergence='taylor')"
        if method == "standard"
        else "cactus_kernels: watermarks and rejection_sample_method 'block' are left to vLLM's own verification"
    }
    config.additional_config = {}
    assert activate(config) is None and module.rejection_sample is stock


@pytest.mark.parametrize(
    "version, known", [("0.27.1", 0), ("0.28.0", 1), ("0.33.2.dev1", 1), ("0.34.0", 0), ("dev", 0)]
)
def test_releases_that_were_not_read_are_refused(vllm, monkeypatch, version, known):
    """A release may mean something else by the same names: before 0.28 the draft's logits of V2 had their temperature."""
    vllm(V1, V1.reads, [])
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    spec = SimpleNamespace(num_speculative_tokens=4, rejection_sample_method="standard")
    config = SimpleNamespace(additional_config={"cactus": {}}, speculative_config=spec, use_v2_model_runner=False)
    if known:
        assert activate(config) is not None
    else:
        with pytest.raises(RuntimeError, match=rf"knows vLLM 0\.28 to 0\.33, got vLLM {version}"):
            activate(config)
    config.additional_config = {}
    assert activate(config) is None
