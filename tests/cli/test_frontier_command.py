"""`cactus-kernels frontier`: its table, its files, and what it refuses."""

import json

import pytest

pytest.importorskip("transformers")

import torch

from cactus_kernels.cli.commands import frontier as frontier_command
from cactus_kernels.rules import Cactus, SpS, Typical
from cactus_kernels.tools import frontier
from cactus_kernels.tools.pair import load_pair

CURVES = {"sps": [SpS()], "cactus": [Cactus(0.01), Cactus(0.25)], "typical": [Typical(0.3)]}


@pytest.fixture(scope="module")
def pair():
    return load_pair(None, None, torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def few(monkeypatch, pair):
    """A few rules, and the pair loaded once."""
    monkeypatch.setattr(frontier, "CURVES", CURVES)
    monkeypatch.setattr(frontier_command, "load_pair", lambda *_: pair)


@pytest.fixture
def measure(command):
    """Runs `frontier`: its exit code, stdout and stderr."""
    return lambda *arguments: command("frontier", *arguments)


def test_table_files_and_recommendation(measure, tmp_path):
    code, out, _ = measure("--positions", 60, "--json", tmp_path / "f.json", "--max-kl", 0.2)
    assert code == 0
    value = json.loads((tmp_path / "f.json").read_text())
    assert [p["rule"] for p in value["points"]] == [
        "SpS()",
        "Cactus(delta=0.01)",
        "Cactus(delta=0.25)",
        "Typical(epsilon=0.3)",
    ]
    assert value["positions"] == value["settings"]["positions"] == 60 and value["complete"]
    assert value["points"][3]["nll"] is None  # it never emits some tokens of the text
    cactus = value["points"][1]
    assert f"{cactus['acceptance']:.3f}" in out and f"{cactus['kl']:.3f}" in out
    within = max((p for p in value["points"] if p["kl"] <= 0.2), key=lambda p: p["acceptance"])
    answer, caveat = out.splitlines()[-2:]
    assert answer.startswith("For a mean KL of at most 0.2: " + within["rule"])
    assert caveat.startswith("Uncertain, from 60 positions: ")
    assert f"{within['acceptance_error']:.3f} of the acceptance and {within['kl_error']:.4f} of the KL" in caveat
    assert answer.endswith(f"in generate: --rule {within['name']} --strength {within['strength']}")
    assert [x.name for x in tmp_path.iterdir()] == ["f.json"]


def test_the_table_on_a_narrow_terminal(measure, narrow):
    lines = measure("--positions", 20)[1].splitlines()
    assert max(map(len, lines[:40])) <= 40
    at = lines.index("cactus 0.25")
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["accept", "KL", "m"]


@pytest.mark.parametrize("name", ["f.svg", "f.PNG"])
def test_plot(measure, tmp_path, name):
    pytest.importorskip("matplotlib")
    code, _, _ = measure("--positions", 20, "--plot", tmp_path / name)
    assert code == 0
    head = (tmp_path / name).read_bytes()
    assert head.startswith(b"\x89PNG") if name.endswith("PNG") else b"<svg" in head and b">cactus<" in head


def test_an_interrupt_leaves_what_was_measured(measure, tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "ELEMENTS", 40 * 2048)
    figures, calls = frontier._figures, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return figures(*args)

    monkeypatch.setattr(frontier, "_figures", interrupted)
    code, out, _ = measure("--positions", 200, "--json", tmp_path / "f.json")
    value = json.loads((tmp_path / "f.json").read_text())
    assert code == 130 and "interrupted" in out
    assert (value["positions"], value["complete"]) == (80, False)


def test_an_interrupt_before_any_position_writes_nothing(measure, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(frontier, "_figures", interrupted)
    code, _, _ = measure("--json", tmp_path / "f.json")
    assert code == 130 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--positions", 0], "positions must be at least 1"),
        (["--temperature", 0], "temperature must be above 0"),
        (["--top-p", 1.5], "top-p"),
        (["--min-p", 1.5], "min-p must be in [0, 1]"),
        (["--max-kl", 0.1, "--min-accept", 0.5], "give one"),
        (["--max-kl", -1], "max-kl"),
        (["--min-accept", 2], "min-accept"),
        (["--plot", "f.pdf"], ".png or .svg"),
        (["--json", "nowhere/f.json"], "nowhere/f.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(measure, arguments, says):
    code, out, err = measure(*arguments)
    assert code == 2 and says in err and len(err.splitlines()) == 1 and not out


def test_a_text_without_positions_is_refused(measure, tmp_path):
    for content, says in (("\n \n", "holds no text"), ("a", "no position")):
        (tmp_path / "t.txt").write_text(content)
        code, _, err = measure("--text", tmp_path / "t.txt")
        assert code in (1, 2) and says in err
