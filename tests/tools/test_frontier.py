"""The figures of the frontier against laws worked out anew."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from support import exact

pytest.importorskip("transformers")

import torch
from support.laws import assert_no_less_than_least

from cactus_kernels import law
from cactus_kernels.rules import (
    AdaptiveCactus,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Mentored,
    Optimal,
    SpS,
    TopK,
    Typical,
)
from cactus_kernels.tools import frontier
from cactus_kernels.tools.frontier import MeasurementSettings
from cactus_kernels.tools.pair import ModelPair, load_pair

WRITTEN = {
    rule.__name__: rule
    for rule in (AdaptiveCactus, Cactus, Capped, Coupled, Interpolation, Mentored, Optimal, SpS, TopK, Typical)
}

CURVES = {"sps": [SpS()], "cactus": [Cactus(0.01), Cactus(0.25)], "typical": [Typical(0.3)]}


@pytest.fixture(scope="module")
def pair():
    return load_pair(None, None, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def documents():
    return frontier.load_documents(None)


def rows(model, ids, temperature=1.0, top_k=None, min_p=0.0):
    """The model's distribution of every next token of one text, numpy float64 [L - 1, V]."""
    with torch.no_grad():
        scores = model(ids[None]).logits[0, :-1] / temperature
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k)[0][:, -1:], -torch.inf)
    scores = scores.masked_fill(scores.softmax(-1) < min_p * scores.softmax(-1).amax(-1, keepdim=True), -torch.inf)
    return scores.double().softmax(-1).numpy()


def windows(a, m):
    """Tokens a forward with m drafted, from the definition: a list of the acceptances of each document."""
    return 1 + sum(np.mean([np.prod(x[i : i + k]) for x in a for i in range(len(x) - k + 1)]) for k in range(1, m + 1))


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6, "top_k": 20}, {"min_p": 0.05}], ids=["plain", "truncated", "min-p"]
)
def test_figures_are_those_of_laws_worked_out_anew(pair, documents, sampling, monkeypatch):
    monkeypatch.setattr(frontier, "ELEMENTS", 8 * 2048)  # several chunks, the last one short
    texts = [pair.tokenizer.decode(pair.tokenizer(text).input_ids[60:79]) for text in documents[:2]]
    found = frontier.measure(pair, texts, MeasurementSettings(positions=25, **sampling), curves=CURVES)
    assert (found.positions, found.documents, found.complete) == (25, 2, True)
    p, q, tokens = [], [], []
    for text, count in zip(texts, (18, 7), strict=True):
        ids = pair.tokenizer(text, return_tensors="pt").input_ids[0]
        assert len(ids) == 19
        p.append(rows(pair.assistant_model, ids, **sampling)[:count])
        q.append(rows(pair.model, ids, **sampling)[:count])
        tokens.append(ids[1:][:count])
    p, q, tokens = np.concatenate(p), np.concatenate(q), torch.cat(tokens).numpy()
    at = np.arange(25)
    scored = (p[at, tokens] > 0) & (q[at, tokens] > 0)
    assert found.scored == scored.sum() and (sampling == {}) == scored.all()
    target_losses = -np.log(q[at, tokens][scored])
    assert found.target_nll == pytest.approx(target_losses.mean(), rel=1e-6)
    for point, of in zip(
        found.points,
        [
            exact.sps,
            *(lambda p, q, d=d: exact.cactus(p, q, d) for d in (0.01, 0.25)),
            lambda p, q: exact.typical(p, q, 0.3, math.sqrt(0.3)),
        ],
        strict=True,
    ):
        laws, accepted = [], []
        for p_, q_ in zip(p, q, strict=True):
            accept, recovery = of(p_, q_)
            accepted.append((p_ * accept).sum())
            laws.append(exact.emitted_by(p_, q_, accept, recovery))
        laws = np.array(laws)
        assert point.acceptance == pytest.approx(np.mean(accepted), rel=1e-5)
        assert point.kl == pytest.approx(np.mean([exact.kl(*x) for x in zip(laws, q, strict=True)]), rel=1e-4, abs=1e-9)
        assert point.acceptance_error == pytest.approx(np.std(accepted, ddof=1) / 5, rel=1e-4, abs=1e-9)
        kls = [exact.kl(*x) for x in zip(laws, q, strict=True)]
        assert point.kl_error == pytest.approx(np.std(kls, ddof=1) / 5, rel=1e-3, abs=1e-9)
        assert point.total_variation == pytest.approx(abs(laws - q).sum(1).mean() / 2, rel=1e-4, abs=1e-9)
        with np.errstate(divide="ignore"):
            losses = -np.log(laws[at, tokens])[scored]
        assert point.nll == pytest.approx(losses.mean(), rel=1e-5)
        if math.isfinite(point.nll):
            gains = target_losses - losses
            assert point.nll_gain == pytest.approx(gains.mean(), abs=1e-5)
            assert point.nll_gain_error == pytest.approx(gains.std(ddof=1) / math.sqrt(len(gains)), abs=1e-5)
        for m in (1, 4, 16):
            expected = windows(np.split(np.array(accepted), [18]), m)
            assert point.tokens_per_forward[m - 1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}], ids=["plain", "truncated"])
def test_at_positions_of_the_embedded_pair_nothing_beats_optimal(pair, documents, sampling):
    settings = MeasurementSettings(positions=100, **sampling)
    p, q = [], []
    for tokens, first in frontier._pieces(pair, documents[:1], settings):
        for rows, some in zip((p, q), frontier._rows(pair, tokens, first, settings), strict=True):
            rows.append(some.double().softmax(-1))
    p, q = torch.cat(p)[:100], torch.cat(q)[:100]
    assert len(p) == 100
    positions = law.Positions(p, q)
    points = []
    for rule in (rule for some in frontier.CURVES.values() for rule in some):
        P, accepted = positions.law(rule)
        P = positions.full(P)
        assert_no_less_than_least(p, q, P, accepted)
        points.append((rule, law.divergences(P, q).kl.mean().item(), accepted.mean().item()))
    assert_none_below_the_constant_prices(points)


def assert_none_below_the_constant_prices(points):
    """points: rule, mean KL, mean acceptance. See docs/law.md: at price k, KL - ln(k) acceptance is least."""
    prices = [(rule.price, kl, accepted) for rule, kl, accepted in points if getattr(rule, "price", None)]
    assert len(prices) > 10
    for price, best_kl, best_accepted in prices:
        for rule, kl, accepted in points:
            assert kl - np.log(price) * accepted >= best_kl - np.log(price) * best_accepted - 1e-7, rule


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("frontier-*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_stored_results_keep_what_is_proved(file):
    value = json.loads(file.read_text())
    assert value["complete"] and value["positions"] == 500
    points = [
        (eval(x["rule"], WRITTEN), math.inf if x["kl"] is None else x["kl"], x["acceptance"]) for x in value["points"]
    ]
    assert_none_below_the_constant_prices(points)


def test_no_document_is_long_enough_for_the_longest_drafts():
    a = [torch.tensor([0.5, 0.25, 1.0]), torch.tensor([0.5])]
    found = frontier._tokens_per_forward(a)
    assert (
        found[:3] == pytest.approx([windows([x.numpy() for x in a], m) for m in (1, 2, 3)]) and found[3:] == [None] * 13
    )


def test_the_mixture_with_the_same_kl_is_the_interpolation_itself(pair, documents):
    rule = Interpolation(0.6)
    (point,) = frontier.measure(pair, documents, MeasurementSettings(positions=60), curves={"": [rule]}).points
    assert point.nll_interpolation == pytest.approx(point.nll, abs=1e-4)


def test_positions_may_be_those_the_target_writes(pair, documents, monkeypatch):
    monkeypatch.setattr(frontier, "SELF_GENERATED_TOKENS", 13)
    settings = MeasurementSettings(positions=30, temperature=0.7, self_generated=True, seed=3)
    found = frontier.measure(pair, documents, settings, curves=CURVES)
    assert found.positions == 30 and found.documents >= 3
    assert found.to_dict() == frontier.measure(pair, documents, settings, curves=CURVES).to_dict()
    read = frontier.measure(pair, documents, MeasurementSettings(positions=30, temperature=0.7), curves=CURVES)
    assert found.target_nll < read.target_nll  # its own text surprises the target less


def test_a_long_text_is_measured_in_pieces(pair, monkeypatch):
    monkeypatch.setattr(frontier, "MAX_TOKENS", 10)
    found = frontier.measure(pair, ["one two three " * 10], MeasurementSettings(positions=20), curves=CURVES)
    assert (found.positions, found.documents) == (20, 3)


def test_a_draft_with_a_wider_vocabulary_is_rejected_beyond_the_target(pair, documents):
    class Wider(torch.nn.Module):
        config = pair.assistant_model.config

        def forward(self, *args, **kwargs):
            out = pair.assistant_model(*args, **kwargs)
            out.logits = torch.nn.functional.pad(out.logits, (0, 64), value=out.logits.max().item())
            return out

    wider = ModelPair(pair.model, Wider(), pair.tokenizer, "", "")
    (point,) = frontier.measure(wider, documents, MeasurementSettings(positions=30), curves={"": [SpS()]}).points
    assert point.acceptance < 0.2 and point.kl == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "written"),
    [
        (Cactus(0.5), "Cactus(delta=0.5)"),
        (Cactus(1.0, "kl"), "Cactus(delta=1.0, divergence='kl')"),
        (Optimal(price=2.0), "Optimal(price=2.0)"),
        (Capped(2.0), "Capped(cap=2.0)"),
        (SpS(), "SpS()"),
    ],
)
def test_rules_are_written_as_in_python(rule, written):
    assert frontier._written(rule) == written
    assert repr(eval(written, WRITTEN)) == repr(rule)
