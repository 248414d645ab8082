"""`cactus-kernels generate` as a person meets it: text, tables, JSON, and one clear line for everything that is wrong."""

import json
import sys

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cactus_kernels import speculative_generate
from cactus_kernels.cli import terminal
from cactus_kernels.decoding.stats import GenerationStats
from cactus_kernels.rules import RULES
from cactus_kernels.tools import runs
from cactus_kernels.tools.pair import embedded_pair
from cactus_kernels.tools.settings import RunSettings, make_rule, name_rule

SHORT = ["--max-new-tokens", "24", "--seed", "1"]
PROMPT = "Question: A farmer has 7 hens."


@pytest.fixture(scope="module")
def pair():
    return embedded_pair()


@pytest.fixture(scope="module")
def directories(pair, tmp_path_factory):
    """The embedded pair as two checkpoints, whose own settings would truncate; and a draft with another tokenizer."""
    root = tmp_path_factory.mktemp("checkpoints")
    model, assistant_model, tokenizer = pair
    for name, m in (("target", model), ("draft", assistant_model)):
        m.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        settings = json.loads((root / name / "generation_config.json").read_text())
        settings |= {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0}
        (root / name / "generation_config.json").write_text(json.dumps(settings))
    (root / "other").mkdir()
    for file in (root / "draft").iterdir():
        (root / "other" / file.name).write_bytes(file.read_bytes())
    other = json.loads((root / "other" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (root / "other" / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    return root


@pytest.fixture
def generate(command):
    """Runs `generate`, which must succeed: what it printed, from JSON where it was asked for."""

    def run(*arguments):
        code, out, err = command("generate", *arguments)
        assert (code, err) == (0, "")
        return json.loads(out) if "--json" in arguments else out

    return run


# -- generate


def test_text_then_a_table(generate):
    out = generate(PROMPT, *SHORT)
    result = generate(PROMPT, *SHORT, "--json")
    text, table = out.split("\n\ndecoding")
    assert text == PROMPT + result["text"].translate(terminal.CONTROLS)
    for row in (
        "cactus, delta 1",
        f"{result['tokens']} in ",
        "target forwards",
        "acceptance rate",
        "draft ",
        "verify ",
        "memory",
        "seed",
    ):
        assert row in table
    assert out.splitlines()[-1].split() == ["seed", "1"]


def test_json_holds_the_run(generate, pair):
    *_, tokenizer = pair
    result = generate(PROMPT, *SHORT, "--json", "--delta", "0.25", "--num-assistant-tokens", "3")
    stats, settings = result["stats"], result["settings"]
    assert result["prompt"] == PROMPT
    assert result["tokens"] == len(result["token_ids"]) == stats["tokens"][0] <= 24
    assert result["text"] == tokenizer.decode(result["token_ids"], skip_special_tokens=True)
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])
    assert stats["target_forwards"] == len(stats["accepted_lengths"][0]) and max(stats["accepted_lengths"][0]) <= 3
    assert (settings["rule"], settings["delta"], settings["num_assistant_tokens"]) == ("cactus", 0.25, 3)
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (0.6, 20, 0.95)
    assert (settings["device"], settings["dtype"], settings["seed"]) == ("cpu", "float32", 1)


def test_the_strength_of_a_rule(generate):
    """By either name the same run; the table and JSON tell it."""
    quick = (PROMPT, "--max-new-tokens", "12", "--seed", "1")
    by_delta, by_strength = (generate(*quick, "--json", option, 0.1) for option in ("--delta", "--strength"))
    assert by_delta["token_ids"] == by_strength["token_ids"] and by_delta["settings"] == by_strength["settings"]
    assert (by_delta["settings"]["delta"], by_delta["settings"]["strength"]) == (0.1, 0.1)
    lossless = generate(*quick, "--json", "--rule", "sps")
    assert lossless["settings"]["strength"] is None and lossless["settings"]["delta"] is None
    for rule in ("capped", "lenience", "optimal-cap"):
        run = generate(*quick, "--json", "--rule", rule, "--strength", 1)
        assert [run["settings"][k] for k in ("rule", "strength", "delta")] == [rule, 1, None]
        assert run["token_ids"] == lossless["token_ids"]
    assert "capped, strength 1.5" in generate(*quick, "--rule", "capped", "--strength", 1.5)


def test_a_rule_is_reported_as_it_was_given(generate):
    """Lenience is `Capped(1 / lenience)`."""
    quick = (PROMPT, "--max-new-tokens", "12", "--seed", "1", "--rule")
    capped = generate(*quick, "capped", "--strength", 4, "--json")
    run = generate(*quick, "lenience", "--strength", 0.25, "--json")
    assert run["token_ids"] == capped["token_ids"]
    assert [run["settings"][k] for k in ("rule", "strength", "delta")] == ["lenience", 0.25, None]
    assert (run["decoding"], run["stats"]["rule"], run["stats"]["strengths"]) == ("lenience", "lenience", [0.25])
    assert "lenience, strength 0.5\n" in generate(*quick, "lenience")
    assert "cactus-kl, delta 0.5\n" in generate(*quick, "cactus-kl", "--delta", 0.5)
    for name in set(RULES) - {"sps", "coupled"}:
        rule = make_rule(name)
        reported = name_rule(name, None) or (rule.name, RunSettings(rule, 1).to_dict()["strength"])
        assert reported == (name, RULES[name].default_strength)


def test_a_budget(generate):
    run = generate(PROMPT, *SHORT, "--json", "--budget", 0.5)
    assert run["settings"]["budget"] == run["stats"]["budget"][0] == 0.5 and 0 < run["stats"]["spent"][0] <= 0.5
    assert f"budget           {run['stats']['spent'][0]:.2f} of 0.5 nats\n" in generate(PROMPT, *SHORT, "--budget", 0.5)
    sps = generate(PROMPT, *SHORT, "--json", "--rule", "sps")
    assert generate(PROMPT, *SHORT, "--json", "--budget", 0)["token_ids"] == sps["token_ids"] != run["token_ids"]
    assert "budget" not in generate(PROMPT, "--max-new-tokens", "2")


def test_texts_to_stop_at(generate):
    whole = generate(PROMPT, "--greedy", "--max-new-tokens", "24", "--json")
    ends = sorted(whole["text"].split()[3:5], key=whole["text"].index)
    for stop in (ends[:1], ends[::-1]):
        given = [x for text in stop for x in ("--stop", text)]
        run = generate(PROMPT, "--greedy", "--max-new-tokens", "24", "--json", *given)
        n = run["tokens"]
        assert run["token_ids"] == whole["token_ids"][:n] and ends[0] in run["text"] and run["settings"]["stop"] == stop
        assert run["text"].index(ends[0]) == whole["text"].index(ends[0]) and len(run["text"]) < len(whole["text"]) / 2


def test_the_drafts_temperature(generate):
    quick = (PROMPT, *SHORT, "--json", "--rule", "sps", "--temperature", 1)
    results = [generate(*quick, *given) for given in ([], ["--draft-temperature", 1], ["--draft-temperature", 0.2])]
    assert results[0]["token_ids"] == results[1]["token_ids"] != results[2]["token_ids"]
    assert results[2]["settings"]["draft_temperature"] == 0.2


def test_one_token_drafts_nothing(generate):
    result = generate(PROMPT, "--max-new-tokens", "1", "--json")
    assert result["tokens"] == 1 and result["acceptance_rate"] is None


def test_the_seed_that_is_printed_repeats_the_run(generate):
    first = generate(PROMPT, "--max-new-tokens", "24", "--json")
    seed = first["settings"]["seed"]
    assert generate(PROMPT, "--max-new-tokens", "24", "--json", "--seed", seed)["token_ids"] == first["token_ids"]
    assert generate(PROMPT, "--max-new-tokens", "24", "--json", "--seed", seed + 1)["token_ids"] != first["token_ids"]


def test_greedy_is_plain_greedy(generate, pair):
    model, _, tokenizer = pair
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)[
        0, ids.shape[1] :
    ]
    result = generate(PROMPT, "--greedy", "--max-new-tokens", "24", "--json")
    assert result["token_ids"] == plain.tolist()
    assert result["settings"]["seed"] is None and result["settings"]["rule"] is None
    assert "seed" not in generate(PROMPT, "--greedy", "--max-new-tokens", "4")


def test_a_prompt_from_stdin(command, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text(PROMPT + "\n", encoding="utf-8")
    with open(tmp_path / "prompt", encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, out, _ = command("generate", "-", *SHORT, "--json")
    assert code == 0 and json.loads(out)["prompt"] == PROMPT


def test_without_a_prompt_there_is_one(generate):
    assert generate(*SHORT).startswith(runs.DEFAULT_PROMPT)


def test_sampling_is_the_models_own_as_in_generate(generate, directories, pair):
    """The embedded pair's that of the paper; the directories hold it with top_k = 1 (and a penalty, which does not count)."""
    model, assistant_model, tokenizer = pair
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = speculative_generate(
        model, ids, assistant_model=assistant_model, rule="cactus", seed=1, do_sample=True, max_new_tokens=24
    )
    mine = generate(PROMPT, *SHORT, "--json")
    assert mine["token_ids"] == out[0, ids.shape[1] :].tolist()
    whole = generate(PROMPT, *SHORT, "--json", "--temperature", 1, "--top-k", 0, "--top-p", 1)
    assert whole["token_ids"] != mine["token_ids"]
    models = ("--model", directories / "target", "--draft", directories / "draft")
    theirs = generate(PROMPT, *SHORT, "--json", *models)
    assert [theirs["settings"][k] for k in ("temperature", "top_k", "top_p", "min_p")] == [0.6, 1, 0.95, 0]
    assert theirs["token_ids"] == generate(PROMPT, "--greedy", "--max-new-tokens", "24", "--json")["token_ids"]
    assert theirs["settings"]["model"] == str(directories / "target")
    assert generate(PROMPT, *SHORT, "--json", *models, "--top-k", 20)["token_ids"] == mine["token_ids"]
    partly = generate(PROMPT, *SHORT, "--json", "--top-k", 5)["settings"]
    assert (partly["temperature"], partly["top_k"], partly["top_p"]) == (0.6, 5, 0.95)


def test_a_model_that_says_nothing_is_sampled_from_as_generate_does(generate, directories, tmp_path):
    """transformers keeps 50 tokens then."""
    for file in (directories / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 1}))
    run = generate(PROMPT, *SHORT, "--json", "--rule", "sps", "--model", tmp_path, "--draft", tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    settings = {"assistant_model": model, "rule": "sps", "seed": 1, "do_sample": True, "max_new_tokens": 24}
    own = speculative_generate(model, ids, **settings)[0, ids.shape[1] :].tolist()
    assert run["token_ids"] == own and run["settings"]["top_k"] == 50
    assert speculative_generate(model, ids, top_k=0, **settings)[0, ids.shape[1] :].tolist() != own


def test_truncation_when_asked_for(generate):
    """With one token left, sampling is greedy."""
    greedy = generate(PROMPT, "--greedy", "--max-new-tokens", "24", "--json")["token_ids"]
    assert generate(PROMPT, *SHORT, "--json", "--top-k", "1")["token_ids"] == greedy
    assert generate(PROMPT, *SHORT, "--json", "--top-p", "1e-6")["token_ids"] == greedy
    assert generate(PROMPT, *SHORT, "--json", "--min-p", "1")["token_ids"] == greedy
    assert generate(PROMPT, *SHORT, "--json", "--temperature", "1e-4")["token_ids"] == greedy


# -- compare


def test_compare_has_three_rows(generate):
    out = generate(PROMPT, *SHORT, "--compare", "--delta", "0.5")
    rows = [line.split("  ")[0] for line in out.splitlines()[:4]]
    assert rows == ["decoding", "plain", "sps", "cactus, delta 0.5"]
    assert "seed 1." in out and "cactus is lossy" in out
    assert "lossy" not in generate(PROMPT, *SHORT, "--compare", "--delta", "0")


def test_compare_on_a_narrow_terminal(generate, monkeypatch, narrow):
    """Run by run, a figure a line: a table would have its words cut into syllables."""
    plain = runs.Run("plain", "", [0] * 10, 1.0)
    stats = GenerationStats("sps", [], None, None, 4, [4], [20], [6], [10], [[2] * 3 + [0]], 1.2, 0.6, 0.1)
    ours = [runs.SpeculativeRun(rule, "", [0] * 10, 0.5, stats) for rule in ("sps", "cactus")]
    monkeypatch.setattr(runs, "compare", lambda *_: (plain, ours))
    lines = generate(PROMPT, *SHORT, "--compare").splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines if line and not line.startswith(" ")][:3] == [
        ["plain"], ["sps"], ["cactus,", "delta", "1"],
    ]  # fmt: skip
    assert [line.split() for line in lines[7:14]] == [
        ["sps"], ["tokens", "10"], ["seconds", "0.50"], ["tokens/s", "20.0"], ["tokens/forward", "2.50"],
        ["accepted", "30", "%"], ["speed", "2.00x"],
    ]  # fmt: skip


def test_compare_in_json(generate):
    result = generate(PROMPT, *SHORT, "--compare", "--json")
    plain, sps, cactus = result["runs"]
    assert [r["decoding"] for r in result["runs"]] == ["plain", "sps", "cactus"]
    assert plain["speed"] == 1 and plain["stats"] is None
    for run in (sps, cactus):
        assert run["speed"] == pytest.approx(run["tokens_per_second"] / plain["tokens_per_second"])
        assert run["tokens"] == plain["tokens"] == 24
    # Alone, they may end before.
    for run, rule in ((sps, "sps"), (cactus, "cactus")):
        alone = generate(PROMPT, *SHORT, "--rule", rule, "--json")["token_ids"]
        assert run["token_ids"][: len(alone)] == alone


def test_compare_goes_on_past_the_end_of_the_text(generate, monkeypatch):
    def every_other_token_ends(**kwargs):
        model, *others = embedded_pair(**kwargs)
        model.generation_config.eos_token_id = list(range(0, 2048, 2))
        return model, *others

    monkeypatch.setattr("cactus_kernels.tools.pair.embedded_pair", every_other_token_ends)
    assert generate(PROMPT, *SHORT, "--json")["tokens"] < 24
    assert [r["tokens"] for r in generate(PROMPT, *SHORT, "--compare", "--json")["runs"]] == [24] * 3


def test_compare_greedy_gives_one_text(generate):
    plain, speculative = generate(PROMPT, "--greedy", "--max-new-tokens", "24", "--compare", "--json")["runs"]
    assert plain["token_ids"] == speculative["token_ids"]


def test_a_slower_run_says_so(generate, monkeypatch):
    """Time stands still but for the clock's own ticks, so that speculative runs take as long and give fewer tokens."""
    plain = runs.Run("plain", "", [0] * 10, 1.0)
    stats = GenerationStats("sps", [], None, None, 4, [4], [20], [6], [10], [[2] * 3 + [0]], 1.2, 0.6, 0.1)
    slow, fast = (runs.SpeculativeRun(rule, "", [0] * 10, x, stats) for rule, x in (("sps", 2.0), ("cactus", 0.9)))
    monkeypatch.setattr(runs, "compare", lambda *_: (plain, [slow, fast]))
    out = " ".join(generate(PROMPT, *SHORT, "--compare").split())
    assert "Slower than plain decoding here: sps." in out
    assert "a round takes 500.0 ms (300.0 ms of it drafting, 150.0 ms in the target) and gives 2.5 tokens" in out
    assert "a plain token takes 100.0 ms" in out
    monkeypatch.setattr(runs, "compare", lambda *_: (plain, [fast]))
    assert "lower" not in generate(PROMPT, *SHORT, "--compare")


def test_text_in_brackets_is_text(command, monkeypatch):
    """rich would take [bold] for markup and :cactus: for a picture, a terminal an escape for a command."""
    text = "[bold] :cactus: [/]\t\x1b[31m"
    monkeypatch.setattr(runs, "run_speculative", lambda *_, write: write(text) or fake_run())
    _, out, _ = command("generate", "[red]:warning:", *SHORT)
    assert out.startswith("[red]:warning:[bold] :cactus: [/]\t\ufffd[31m\n")


def fake_run():
    stats = GenerationStats("cactus", [1.0], None, None, 1, [1], [0], [0], [1], [[0]])
    return runs.SpeculativeRun("cactus", "", [0], 1.0, stats)


# -- what is wrong


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--delta", "-1"], "delta must be finite and at least 0 (0 is SpS), got -1.0"),
        (["--delta", "nan"], "delta must be finite"),
        (["--delta", "inf"], "delta must be finite"),
        (["--delta", "lots"], "Invalid value for '--delta'"),
        (["--rule", "best"], "unknown rule 'best'"),
        (["--rule", ""], "unknown rule ''"),
        (["--rule", "sps", "--delta", "1"], "rule sps has no strength: leave out --delta"),
        (["--rule", "coupled", "--strength", "1"], "rule coupled has no strength: leave out --strength"),
        (["--rule", "capped", "--delta", "1"], "rule capped has no delta, its strength is cap: use --strength"),
        (["--strength", "1", "--delta", "1"], "--strength and --delta are both given: leave one out"),
        (["--rule", "capped", "--strength", "0.5"], "cap must be finite and at least 1 (1 is SpS), got 0.5"),
        (["--rule", "interpolation", "--strength", "nan"], "weight must be in [0, 1], got nan"),
        (["--rule", "top-k", "--strength", "2.5"], "k must be an int, got 2.5"),
        (["--greedy", "--strength", "1"], "--greedy does not sample: leave out --strength"),
        (["--num-assistant-tokens", "0"], "num-assistant-tokens must be in 1 .. 64, got 0"),
        (["--num-assistant-tokens", "65"], "num-assistant-tokens must be in 1 .. 64, got 65"),
        (["--max-new-tokens", "0"], "max-new-tokens must be at least 1, got 0"),
        (["--temperature", "0"], "use --greedy"),
        (["--temperature", "-0.5"], "temperature must be above 0"),
        (["--temperature", "nan"], "temperature must be above 0"),
        (["--temperature", "inf"], "temperature must be above 0"),
        (["--top-k", "-1"], "top-k must be at least 0"),
        (["--top-p", "0"], "top-p must be above 0"),
        (["--top-p", "1.5"], "top-p must be above 0 and at most 1"),
        (["--top-p", "nan"], "top-p must be above 0"),
        (["--min-p", "-0.1"], "min-p must be in [0, 1] (0 keeps every token), got -0.1"),
        (["--min-p", "nan"], "min-p must be in [0, 1]"),
        (["--draft-temperature", "-1"], "draft-temperature must be finite and at least 0 (0: greedy drafts), got -1.0"),
        (["--draft-temperature", "1", "--prompt-lookup-num-tokens", "3"], "prompt lookup has none: leave it out"),
        (["--budget", "-1"], "budget must be finite and at least 0 nats (0 is lossless), got -1.0"),
        (["--budget", "inf"], "budget must be finite"),
        (
            ["--budget", "1", "--rule", "typical"],
            "a budget needs a rule that keeps the target's proportions, got typical",
        ),
        (["--stop", ""], "--stop is empty: give a text to stop at"),
        (["--stop", "x", "--compare"], "--compare goes on past the end of a text: leave out --stop"),
        (["--greedy", "--budget", "1", "--draft-temperature", "1"], "leave out --draft-temperature and --budget"),
        (["--greedy", "--min-p", "0.1"], "--greedy does not sample: leave out --min-p"),
        (["--seed", str(2**63)], "seed must fit in 64 bits"),
        (["--greedy", "--temperature", "0.5"], "--greedy does not sample: leave out --temperature"),
        (["--greedy", "--rule", "sps", "--top-k", "5"], "leave out --top-k and --rule"),
        (["--compare", "--rule", "sps"], "--compare runs both rules"),
        (["--backend", "cuda"], "backend must be 'triton', 'torch' or None, got 'cuda'"),
        (["--device", "tpu"], "device must be cpu, cuda"),
        (["--device", "mps"], "device mps is not supported: use --device cpu"),
        (["--device", "mps:0"], "device mps:0 is not supported: use --device cpu"),
        (["--device", "cuda:99"], "device cuda:99 is not there"),
        (["--dtype", "int8"], "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        (["--model", "."], "--model needs --draft"),
        (["--draft", "."], "--draft needs --model"),
        (["--model", "./nowhere", "--draft", "."], "cannot load './nowhere': there is no such directory"),
        (["--model", ".", "--draft", "."], "cannot load '.': "),
        (["--frobnicate"], "--frobnicate"),
        (["", ""], "unexpected extra argument"),
        (["", "--seed", "1"], "the prompt is empty"),
        ([" \n", "--seed", "1"], "the prompt is empty"),
        (["\udcff"], "the prompt is not UTF-8"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_arguments_end_in_one_line(command, arguments, says):
    code, out, err = command("generate", *arguments)
    assert (code, out) == (2, "")
    assert says in err and err.startswith("cactus-kernels: ") and err.count("\n") == 1 and err.endswith("\n")


def test_another_tokenizer_is_refused(command, directories):
    code, _, err = command("generate", "--model", directories / "target", "--draft", directories / "other")
    assert code == 2 and err.count("\n") == 1 and "the draft has another tokenizer: 2 tokens differ" in err


def test_a_directory_without_a_tokenizer(command, directories, tmp_path):
    """What transformers says of it has several lines and speaks of sentencepiece; that of a damaged one is said as a whole."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((directories / "target" / name).read_bytes())
    code, _, err = command("generate", "--model", tmp_path, "--draft", directories / "draft")
    assert code == 2 and err.count("\n") == 1
    assert err.endswith("the directory holds no tokenizer: save it there, tokenizer.save_pretrained(directory)\n")
    (tmp_path / "tokenizer.model").write_text("none")
    code, _, err = command("generate", "--model", tmp_path, "--draft", directories / "draft")
    assert code == 2 and err.count("\n") == 1 and len(err.split(": ", 2)[2].split()) > 12
    AutoTokenizer.from_pretrained(directories / "target").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    assert command("generate", *SHORT, "--model", tmp_path, "--draft", directories / "draft")[0] == 0


def test_a_model_that_cannot_roll_back_is_refused(command, directories, monkeypatch):
    monkeypatch.setattr("transformers.LlamaForCausalLM._is_stateful", True)
    code, _, err = command("generate")
    assert code == 2 and err.count("\n") == 1 and "cannot roll back" in err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(command):
    code, out, _ = command("generate", PROMPT, *SHORT, "--device", "cuda", "--json")
    result = json.loads(out)
    assert code == 0 and 0 < result["tokens"] <= 24
    assert (result["settings"]["device"], result["settings"]["dtype"]) == ("cuda:0", "bfloat16")
    code, out, _ = command("generate", PROMPT, *SHORT, "--device", "cuda", "--compare", "--json")
    assert code == 0 and [run["tokens"] for run in json.loads(out)["runs"]] == [24] * 3
    code, out, _ = command("check", "--minutes", "0.2", "--device", "cuda")
    assert code == 0 and "triton on cuda against torch on cpu" in out
