"""What the frontier recommends."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from cactus_kernels.rules import given
from cactus_kernels.tools.frontier import CURVES, Frontier, Point
from cactus_kernels.tools.frontier_report import Goal
from cactus_kernels.tools.settings import make_rule


def point(rule, acceptance, kl):
    return Point("", rule, "sps", None, acceptance, 0.04, kl, 0.0125, 0, 0, 0, [], 0, 0, 0, None)


def test_what_is_recommended():
    points = [point("a", 0.5, 1e-17), point("b", 0.7, 0.1), point("c", 0.8, 0.3), point("d", 0.75, math.inf)]
    found = Frontier(points, 1, 1, 1, True, 0.0, 0.0, 0.0)

    def best(*goal):
        return getattr(Goal(*goal).best(found), "rule", None)

    assert [best(x) for x in (0, 0.05, 0.1, 9)] == ["a", "a", "b", "c"]
    assert [best(None, x) for x in (0, 0.6, 0.75, 0.9)] == ["a", "b", "c", None]
    assert best() == "b"
    assert "none" in Goal(None, 0.9).answer(found)


@pytest.mark.parametrize("positions", [1, 9, 199, 200])
def test_advice_from_few_positions_says_how_uncertain_it_is(positions):
    errors = {"acceptance_error": math.nan, "kl_error": math.nan} if positions == 1 else {}
    found = Frontier([replace(point("a", 0.5, 0.05), **errors)], positions, 1, 1, True, 0.0, 0.0, 0.0)
    for goal in (Goal(), Goal(None, 0.9)):
        caveat = goal.answer(found).partition("\nUncertain, from ")[2]
        assert bool(caveat) == (positions < 200)
        if caveat:
            assert caveat.startswith("1 position: " if positions == 1 else f"{positions} positions: ")
            measured = positions > 1 and goal.min_acceptance is None
            assert ("0.040 of the acceptance and 0.0125 of the KL" in caveat) == measured
            assert ("is not known" in caveat) != measured and "nan" not in caveat


def test_what_frontier_recommends_can_be_given():
    """The options at the end of its answer make the very rule, whichever it is."""
    for rule in (rule for curve in CURVES.values() for rule in curve):
        strength = next(iter(given(rule).values()), None)
        point = Point("", "", rule.name, strength, 0.5, 0, 0, 0, 0, 0, 0, [], 0, 0, 0, None)
        answer = Goal().answer(Frontier([point], 200, 1, 1, True, 0.0, 0.0, 0.0))
        options = answer.partition("in generate: ")[2].split()
        assert options[::2] == ["--rule", "--strength"][: len(options) // 2]
        assert repr(make_rule(options[1], *map(float, options[3:]))) == repr(rule)
