"""The scripts in `examples/` run, stay short, and show what they say they show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}


def output(name):
    done = subprocess.run([sys.executable, str(EXAMPLES[name])], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(line):
    return [float(x) for x in re.findall(r"\d+(?:\.\d+)?", line)]


def test_every_example_has_a_test():
    assert set(EXAMPLES) == {"generate_batch", "engine_loop", "own_rule"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_at_most_40_lines(name):
    assert len(EXAMPLES[name].read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.slow
def test_rows_of_a_batch_accept_their_own_number_of_tokens():
    text = output("generate_batch")
    rows = [numbers(line) for line in re.findall(r"-> .* accepted$", text, re.M)]
    assert len(rows) == 3 and all(tokens == 50 and accepted <= drafted for tokens, _, accepted, drafted in rows)
    assert len({accepted for _, _, accepted, _ in rows}) > 1
    per_forward, rate = numbers(text.splitlines()[-1])
    assert per_forward == pytest.approx(150 / sum(rounds for _, rounds, _, _ in rows), abs=0.005)
    assert rate == round(100 * sum(accepted for *_, accepted, _ in rows) / sum(drafted for *_, drafted in rows))


@pytest.mark.slow
def test_a_request_of_the_engine_says_the_same_in_every_batch(tmp_path):
    """Requests leave in the order in which they are done, and each one's text is the same where it runs alone."""
    lines = output("engine_loop").splitlines()
    assert [len(line.split()) - 2 for line in lines] == [12, 20, 30]
    code = EXAMPLES["engine_loop"].read_text(encoding="utf-8")
    alone = code.replace("if waiting else []", "if waiting and not running else []")
    assert alone != code
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, cwd=ROOT)
    assert sorted(done.stdout.splitlines()) == sorted(lines), done.stderr


def test_a_rule_of_ones_own_follows_its_law():
    sps, own, cactus, law, sampled = output("own_rule").splitlines()
    assert numbers(sps) == [0.7, 0.0]  # the sum of min(p, q); lossless
    assert sps.split()[0] == "sps" and own.split()[0] == "boosted" and cactus.split()[0] == "cactus"
    assert 0.7 < numbers(own)[0] < 1 and 0 < numbers(own)[1] < 0.3  # 0.3: between draft and target
    assert numbers(sampled) == pytest.approx(numbers(law), abs=0.01) and sum(numbers(law)) == pytest.approx(
        1, abs=0.003
    )
