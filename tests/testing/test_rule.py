"""The check of a rule of one's own: what it lets pass, and what it finds."""

import pytest
import torch

from cactus_kernels.rules import AdaptiveCactus, Cactus, Capped, Interpolation, Optimal, Rule, SpS, TopK, Typical, m
from cactus_kernels.testing import fuzz
from cactus_kernels.testing import rule as rule_check
from cactus_kernels.testing.rule import check_rule


def too_much(q_n, p_n, stat):
    return m.minimum(2.0 * q_n, 1.0)


def negative(q_n, p_n, stat):
    return q_n - 0.01


class Own(Rule):
    name = "own"

    def __init__(self, accept=SpS.accept, recover=SpS.recover):
        self.accept, self.recover = accept, recover


def test_check_rule(monkeypatch):
    # Batches of few tokens, with drafts: the interpreter is slow.
    monkeypatch.setattr(rule_check, "fuzz_case", lambda number: fuzz.fuzz_case((7, 1)[number]))
    check_rule(Cactus(0.3), cases=2)
    for rule in (SpS(), Cactus(0.3, "kl"), AdaptiveCactus(0.3)):
        check_rule(rule, cases=1)
    for rule in (Capped(2.0), Interpolation(0.3), Typical(0.2), TopK(3), Optimal(cap=1.5)):
        check_rule(rule, distribution=False, cases=1)
    check_rule(Own(too_much), distribution=False, cases=0)
    with pytest.raises(ValueError, match="must sum to 1"):
        check_rule(Own(too_much))
    with pytest.raises(ValueError, match="h_n must be in"):
        check_rule(Own(negative))
    with pytest.raises(TypeError, match="floats"):
        check_rule(Cactus(torch.ones(2)))
    with pytest.raises(TypeError, match="must be a Rule"):
        check_rule("sps")
    for own, says in (
        (Own(accept=lambda *x: x[0]), "own.accept must be .* by def"),
        (Own(recover=None), "own.recover must be .* by def"),
        (Own(accept=Cactus(0.3).accept), "3 arguments with its 0 strengths"),
        (Own(recover=Cactus(0.3).recover), "4 arguments with its 0 strengths"),
    ):
        with pytest.raises(TypeError, match=says):
            check_rule(own)
    nameless = Own(negative)
    nameless.name = None
    with pytest.raises(TypeError, match="name"):
        check_rule(nameless)


def test_check_rule_tells_whether_it_compared(monkeypatch):
    assert check_rule(SpS(), cases=1)
    monkeypatch.setattr(rule_check, "best_backend", lambda device: "torch")
    assert not check_rule(SpS(), cases=1)


def test_check_rule_sees_backends_that_differ(monkeypatch):
    monkeypatch.setattr(rule_check, "difference", lambda case, second: "tokens")
    with pytest.raises(ValueError, match=r"differ on fuzz_case\(0\)"):
        check_rule(SpS(), second=("torch", "cpu"))
