"""`cactus-kernels check`: what it checks, and that it sees what is wrong."""

import importlib.util
import os
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("transformers")

import torch
from support.models import build

from cactus_kernels import philox
from cactus_kernels.decoding.cache import masks
from cactus_kernels.decoding.cache.kinds import EQUAL
from cactus_kernels.testing import selfcheck
from cactus_kernels.tools import model_check
from cactus_kernels.tools.pair import embedded_pair


def test_check_on_a_cpu_says_what_it_cannot_check(command, monkeypatch):
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr("cactus_kernels.kernels.race.INTERPRETED", False)
    code, out, err = command("check", "--minutes", "0.001", "--seed", "5")
    assert (code, err) == (0, "") and out.splitlines()[-1] == "ok"
    assert "fails less than once in a million checks" in out
    assert "Checking torch on cpu for 0.001 min, seed 5." in out and "TRITON_INTERPRET=1" in out
    for size in selfcheck.LAW_SIZES:
        for name in ("sps", "cactus 0.5", "draw"):
            assert f"law of {name}, V = {size} " in out


def test_check_finds_a_wrong_law(command, monkeypatch):
    """The deliberate error: acceptance uniforms that end at 1/2."""
    uniform = philox.uniform
    monkeypatch.setattr(philox, "uniform", lambda *words: 0.5 * uniform(*words))
    code, out, _ = command("check", "--minutes", "0.001", "--backend", "torch", "--seed", "5")
    assert code == 1 and "ok" not in out.split()
    assert "failed: law of sps, V = 7: " in out and "failed: law of cactus 0.5, V = 7: " in out
    assert out.count("again with --seed 5") >= 2 and "failed: law of draw" not in out


def test_check_finds_other_bits_and_names_the_seed_of_the_case(command, monkeypatch):
    pytest.importorskip("triton")
    seen = []
    monkeypatch.setattr("cactus_kernels.kernels.race.INTERPRETED", True)

    def difference(seed, *_):
        seen.append(seed)
        return "token_ids differ" if seed == 7 else None

    monkeypatch.setattr(selfcheck, "_difference", difference)
    code, out, _ = command("check", "--minutes", "0.01", "--seed", "5")
    assert code == 1 and seen == [5, 6, 7]
    assert "Checking triton on cpu" in out and "TRITON_INTERPRET" not in out
    assert out.splitlines()[-1] == "failed: parity: token_ids differ; again with --seed 7"


def test_check_in_the_interpreter():
    pytest.importorskip("triton")
    arguments = ["check", "--minutes", "0.01", "--device", "cpu", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-c", "from cactus_kernels.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "triton on cpu against torch on cpu" in done.stdout and "every bit equal" in done.stdout


# -- models against plain generate


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The embedded pair as checkpoints, and a model whose window is shorter than texts are."""
    root = tmp_path_factory.mktemp("models")
    target, draft, tokenizer = embedded_pair()
    windowed = build("mistral", dtype=torch.float32, vocab_size=2048, num_hidden_layers=2)
    for name, model in (("target", target), ("draft", draft), ("windowed", windowed)):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


SHORT = ("--max-new-tokens", 10)


def test_models_are_compared_with_plain_generate(command, models):
    code, out, err = command("check", "--model", models / "target", "--draft", models / "draft", *SHORT)
    assert (code, err) == (0, "") and out.splitlines()[-1] == "ok"
    lines = [line.split() for line in out.splitlines()[2:6]]
    assert [line[0].rpartition("/")[2] for line in lines] == ["target", "target", "draft", "draft"]
    assert [" ".join(line).count("40 of 40") for line in lines] == [1, 0, 1, 0] and "10 of 10" in " ".join(lines[1])
    assert "draft with prompt lookup" in out and "sliding window" not in out
    code, out, _ = command("check", "--model", models / "windowed", *SHORT)
    assert code == 0 and out.count("windowed with prompt lookup") == 2 and "sliding window" not in out


def test_a_model_that_goes_another_way_fails(command, models, monkeypatch):
    """The deliberate error: masks of several tokens that leave the first one out."""
    spans = masks.visible_spans

    def wrong(positions, window):
        first, last = spans(positions, window)
        return torch.minimum(first.clamp(min=2), last), last

    monkeypatch.setattr(masks, "visible_spans", wrong)
    code, out, _ = command("check", "--model", models / "target", *SHORT)
    last = out.splitlines()[-1]
    assert code == 1 and last.startswith("failed: ") and "of their spread apart, and rounding explains 0.001" in last


def test_how_far_apart_is_what_it_says():
    """One row equal, one whose second token is another one: what comes after it does not count."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 50, generator=generator)
    own = scores + 0.01 * torch.randn(2, 3, 50, generator=generator)
    plain = [([1, 2, 3], scores[0]), ([4, 5, 6], scores[1])]
    found = model_check._compare("x", plain, [([1, 2, 3], own[0]), ([4, 9, 9], own[1])], torch.float32)
    counted = [(own[0] - scores[0]), (own[1] - scores[1])[:2]]
    spread = [scores[0] - scores[0].mean(1, keepdim=True), (scores[1] - scores[1].mean(1, keepdim=True))[:2]]
    best = scores[1, 1].topk(2).values
    assert found.apart == pytest.approx((torch.cat(counted).norm() / torch.cat(spread).norm()).item(), rel=1e-5)
    assert found.largest == pytest.approx(torch.cat(counted).abs().max().item(), rel=1e-5)
    assert (found.equal, found.tokens) == (4, 6) and found.failure
    assert found.differs == (2, 2, pytest.approx((best[0] - best[1]).item()))
    forbidden = own[0].clone()
    forbidden[0, 7] = -torch.inf
    assert model_check._compare("x", plain[:1], [([1, 2, 3], forbidden)], torch.float32).failure


def test_the_check_of_a_kind_that_is_not_on_the_list_does_not_send_to_itself(command, models, monkeypatch):
    monkeypatch.setattr("cactus_kernels.decoding.cache.kinds.EQUAL", EQUAL - {"LlamaForCausalLM"})
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert command("check", "--model", models / "target", *SHORT)[::2] == (0, "")
        arguments = ("Hi", "--model", models / "target", "--draft", models / "draft", *SHORT)
        code, _, err = command("generate", *arguments)
    assert code == 0 and err.startswith("cactus-kernels: LlamaForCausalLM: not compared with") and err.count("\n") == 1
    assert err.endswith("cactus-kernels check --model ID [--draft ID]\n")


def test_a_window_that_no_text_reaches_is_named(command, models, monkeypatch):
    monkeypatch.setattr(model_check, "window_not_reached", lambda *_: 4096)
    _, out, _ = command("check", "--model", models / "target", *SHORT)
    assert "No text ran past the sliding window of 4096 tokens: --max-new-tokens 4096 would." in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--draft", "."], "--draft needs --model"),
        (["--model", ".", "--minutes", "1", "--seed", "2"], "leave out --minutes and --seed"),
        (["--model", ".", "--max-new-tokens", "0"], "max-new-tokens must be at least 1, got 0"),
        (["--model", "./nowhere"], "cannot load './nowhere': there is no such directory"),
    ],
)
def test_what_is_wrong_with_a_check_is_one_line(command, arguments, says):
    code, out, err = command("check", *arguments)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1
