"""Every row of the table of `generate`'s keywords in docs/generate.md."""

import copy
import functools
import inspect
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

pytest.importorskip("transformers")

import torch
from support.decoding import (
    EOS,
    PAD,
    PROCESSORS,
    Recorder,
    SumStops,
    chain,
    outputs,
    plain,
    random_prompts,
    run,
    uneven,
)
from support.models import TableModel, build, table_pair
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from cactus_kernels import custom_generate, speculative_generate
from cactus_kernels.decoding import models
from cactus_kernels.decoding.cache.handover import CACHE_NAME
from cactus_kernels.decoding.images import IMAGE_INPUTS
from cactus_kernels.decoding.keywords import GenerateKeywords

PAGE = (Path(__file__).parents[2] / "docs/generate.md").read_text(encoding="utf-8")
VERDICTS = {
    name: verdict
    for names, verdict in re.findall(r"^\| (`.+?`) \| (\w+) \|", PAGE, re.M)
    for name in re.findall(r"`(\w+)`", names)
}

# Settings whose greedy tokens differ from those without, and are those of plain `generate`.
GREEDY = {
    "max_new_tokens": {"max_new_tokens": 7},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [EOS, 5, 6]},
    "eos_token_id": {"eos_token_id": [6, 5]},
    "repetition_penalty": PROCESSORS["repetition_penalty"],
    "no_repeat_ngram_size": PROCESSORS["no_repeat_ngram_size"],
    "encoder_repetition_penalty": PROCESSORS["encoder_repetition_penalty"],
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": PROCESSORS["bad_words_ids"],
    "sequence_bias": PROCESSORS["sequence_bias"],
    "suppress_tokens": PROCESSORS["suppress_tokens"],
    "begin_suppress_tokens": PROCESSORS["begin_suppress_tokens"],
    "forced_bos_token_id": {"forced_bos_token_id": 7},  # after a prompt of one token alone
    "forced_eos_token_id": PROCESSORS["forced_eos_token_id"],
    "exponential_decay_length_penalty": PROCESSORS["exponential_decay"],
    "prefix_allowed_tokens_fn": PROCESSORS["prefix_allowed_tokens_fn"],
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([SumStops()])},
    "generation_config": {
        "generation_config": GenerationConfig(suppress_tokens=[5, 8, 10], max_new_tokens=25, pad_token_id=PAD)
    },
}
# Settings that shape what is sampled: the scores of every emitted token are those of `generate` after that text.
SAMPLED = {
    "do_sample": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.5},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.08},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "renormalize_logits": {"renormalize_logits": True, "temperature": 0.7},
    "output_scores": {"temperature": 1.4, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3},
}
NO_EFFECT = {
    "bos_token_id": 3, "decoder_start_token_id": 3, "early_stopping": True, "length_penalty": 2.0, "max_cache_len": 99,
    "cache_config": {}, "disable_compile": True, "compile_config": None, "continuous_batching_config": None,
    "trust_remote_code": True, "cache_implementation": "dynamic",
}  # fmt: skip
REFUSED = {
    "cache_implementation": "offloaded", "use_cache": False,
    "inputs_embeds": torch.zeros(2, 2, 4), "position_ids": torch.zeros(2, 2), "encoder_outputs": object(),
    "logits_to_keep": 1, "labels": torch.zeros(2, 2), "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5,
    "constraints": [object()], "force_words_ids": [[3]], "penalty_alpha": 0.6, "low_memory": True, "dola_layers": "high",
    "guidance_scale": 1.5, "watermarking_config": object(), "token_healing": True, "negative_prompt_ids": torch.zeros(2, 2),
    "negative_prompt_attention_mask": torch.zeros(2, 2), "output_attentions": True, "output_hidden_states": True,
    "synced_gpus": True, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.3, "assistant_lookbehind": 5, "target_lookbehind": 5, "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5, "use_mtp": True, "speculation_type": "dflash", "is_assistant": True,
    "custom_generate": "x/y",
}  # fmt: skip


def test_the_types_are_those_of_the_table():
    """Each keyword is a parameter of its own or stands in the TypedDict; what is refused has None or a value to leave it at."""
    own = set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", PAGE, re.M))
    assert own == {"rule", "budget", "seed", "draft_temperature", "backend"}
    parameters = inspect.signature(speculative_generate).parameters
    named = {name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD} - {"model"}
    keywords = get_type_hints(GenerateKeywords)
    assert named.isdisjoint(keywords)
    assert named | keywords.keys() == VERDICTS.keys() | own
    closed = {name for name, kind in keywords.items() if kind is type(None) or not _open(kind)}
    assert closed == {name for name, verdict in VERDICTS.items() if verdict == "refused"}


def _open(kind):
    """Whether a type has more than literals and None in it."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return not all(part is type(None) or get_origin(part) is Literal or part == Sequence[None] for part in parts)


def test_the_table_has_every_keyword_and_each_has_a_test():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    signature = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert fields | signature <= VERDICTS.keys()
    here = {name.removeprefix("test_keyword_") for name in globals() if name.startswith("test_keyword_")}
    here |= set(IMAGE_INPUTS)  # test_images.py tries pixel_values
    here = {name for words in here for name in words.split("_and_")}
    tested = {**GREEDY, **SAMPLED, **NO_EFFECT, **REFUSED}.keys() | here
    assert tested == VERDICTS.keys()
    assert {name for name, verdict in VERDICTS.items() if verdict == "refused"} == REFUSED.keys()
    assert set(VERDICTS.values()) == {"same", "better", "refused"}


@pytest.mark.parametrize("settings", GREEDY.values(), ids=GREEDY)
def test_greedy_tokens(settings):
    target, draft, prompts = uneven()
    settings = ({} if "generation_config" in settings else {"max_new_tokens": 25}) | settings
    out = run(target, draft, prompts, **settings)
    expected = plain(target, prompts, **settings)
    assert outputs(out, prompts) == expected
    assert expected != plain(target, prompts, max_new_tokens=25)


@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_scores_and_logits_of_emitted_tokens(settings):
    target, draft = table_pair(8, seed=1)
    prompts, end = [[3], [2, 5, 4]], StoppingCriteriaList([MaxLengthCriteria(9)])
    settings = {"do_sample": True, "top_k": 0} | settings
    asked = {"output_scores": True, "output_logits": True}
    settings |= {"stopping_criteria": end}
    out = run(target, draft, prompts, rule="sps", seed=8, max_new_tokens=12, **asked, **settings)
    assert out.stats.tokens == [8, 6] and len(out.scores) == len(out.logits) == 8
    for row, (prompt, tokens) in enumerate(zip(prompts, outputs(out, prompts), strict=True)):
        for t in range(len(tokens)):
            text = torch.tensor([prompt + tokens[:t]])
            one = target.generate(
                text, max_new_tokens=1, return_dict_in_generate=True, pad_token_id=PAD, **asked, **settings
            )
            torch.testing.assert_close(out.scores[t][row], one.scores[0][0], rtol=0, atol=1e-6)
            torch.testing.assert_close(out.logits[t][row], one.logits[0][0], rtol=0, atol=1e-6)
        for t in range(len(tokens), len(out.scores)):
            assert not out.scores[t][row].any() and not out.logits[t][row].any()
    silent = run(target, draft, prompts, rule="sps", seed=8, max_new_tokens=12, **settings)
    assert silent.scores is None and silent.logits is None and torch.equal(silent.sequences, out.sequences)


def test_keyword_output_logits():
    """Of a transformer, ragged and greedy, with transition scores as `generate` computes them."""
    target = build("llama")
    prompts = random_prompts((3, 9), target.config.vocab_size)
    settings = {"max_new_tokens": 12, "output_logits": True, "output_scores": True}
    out = run(target, build("gpt2"), prompts, **settings)
    scores = target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        one = target.generate(ids, pad_token_id=PAD, eos_token_id=None, return_dict_in_generate=True, **settings)
        for mine, theirs in zip((*out.logits, *out.scores), (*one.logits, *one.scores), strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine[row], theirs[0], rtol=0, atol=1e-4)
        expected = target.compute_transition_scores(one.sequences, one.scores, normalize_logits=True)
        torch.testing.assert_close(scores[row], expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), NO_EFFECT.items(), ids=NO_EFFECT)
def test_keywords_that_change_no_token(name, value):
    if name not in (*vars(GenerationConfig()), "trust_remote_code"):
        pytest.skip("not a setting of this transformers")
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 9}
    got = outputs(run(target, draft, prompts, **settings, **{name: value}), prompts)
    assert got == plain(target, prompts, **settings, **{name: value}) == plain(target, prompts, **settings)


@pytest.mark.parametrize(("name", "value"), REFUSED.items(), ids=REFUSED)
def test_keywords_that_are_refused(name, value):
    target, draft = table_pair(8)
    ids = torch.tensor([[3, 4], [5, 6]])
    with pytest.raises(ValueError, match=name):
        speculative_generate(target, ids, assistant_model=draft, max_new_tokens=4, **{name: value})
    config = GenerationConfig(max_new_tokens=4)
    if name in vars(config):
        setattr(config, name, value)
        with pytest.raises(ValueError, match=name):
            speculative_generate(target, ids, assistant_model=draft, generation_config=config)
    assert target.calls == draft.calls == 0


def test_keyword_inputs_and_input_ids():
    target, draft, _ = uneven()
    ids = torch.tensor([[3, 4]])
    expected = target.generate(ids, max_new_tokens=5)
    for given in ({"inputs": ids}, {"input_ids": ids}):
        assert torch.equal(speculative_generate(target, assistant_model=draft, max_new_tokens=5, **given), expected)
    with pytest.raises(ValueError, match="inputs and input_ids are both given: leave one out"):
        speculative_generate(target, ids, inputs=ids, assistant_model=draft)


def test_keyword_attention_mask():
    """Rows of many lengths give what they give alone, which `generate` gives too where a model can take the padding."""
    target, prompts = build("llama"), random_prompts((3, 9, 1), 61)
    out = run(target, build("gpt2"), prompts, max_new_tokens=9)
    assert outputs(out, prompts) == plain(target, prompts, max_new_tokens=9)
    with pytest.raises(ValueError, match="attention_mask has padding at the right"):
        speculative_generate(
            target, torch.ones(2, 3).long(), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]), assistant_model=target
        )


def test_keyword_max_length_and_min_length_and_pad_token_id():
    target, draft, _ = uneven()
    ids = torch.tensor([[3, 4, 7], [9, 2, 8]])
    for settings in ({"max_length": 11}, {"max_length": 30, "min_length": 25}, {"max_length": 30, "pad_token_id": 0}):
        settings["eos_token_id"] = [5, 6]
        got = speculative_generate(target, ids, assistant_model=draft, **settings)
        assert torch.equal(got, target.generate(ids, **settings))


def test_keyword_max_time_and_return_dict_in_generate():
    target, draft, prompts = uneven()
    out = run(target, draft, prompts, max_new_tokens=25, max_time=0.0)
    assert out.stats.tokens == [1] * 4
    got = speculative_generate(target, torch.tensor([[3]]), assistant_model=draft, max_new_tokens=3)
    assert torch.equal(got[0], run(target, draft, [[3]], max_new_tokens=3).sequences[0])


def test_keyword_remove_invalid_values():
    """Infinite scores are an error of the sampler, unless they are made finite."""
    target, draft = table_pair(8)
    target.table[3, 7] = torch.inf
    with pytest.raises(ValueError, match=r"requests \[0\]"):
        run(target, draft, [[3]], max_new_tokens=1, do_sample=True)
    out = run(target, draft, [[3]], max_new_tokens=1, do_sample=True, remove_invalid_values=True)
    assert out.sequences[0, 1] == 7


def test_keyword_num_return_sequences_and_assistant_model():
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 9, "num_return_sequences": 2, "do_sample": True, "temperature": 1e-3}
    out = run(target, draft, prompts, rule="sps", **settings)
    assert outputs(out, prompts * 2) == [t for t in plain(target, prompts, max_new_tokens=9) for _ in "ab"]


def test_keyword_stop_strings_and_tokenizer_and_assistant_tokenizer(bytes_tokenizer):
    a, b, c = (bytes_tokenizer.convert_tokens_to_ids(x) for x in "abc")
    model = chain(len(bytes_tokenizer), (a, b), (b, c), (c, a))
    tokenizers = {"tokenizer": bytes_tokenizer, "assistant_tokenizer": bytes_tokenizer}
    out = run(model, model, [[a], [b]], max_new_tokens=9, stop_strings="ca", **tokenizers)
    assert outputs(out, [[a], [b]]) == [[b, c, a], [c, a]]


def test_keyword_streamer():
    """A streamer for each row: the row's own prompt, its tokens, its end as soon as it has ended."""
    target, draft, prompts = uneven()
    streamers, log = [Recorder() for _ in prompts], []
    for row, each in enumerate(streamers):
        each.end = lambda row=row, end=each.end: (log.append(row), end())
    out = run(target, draft, prompts, max_new_tokens=20, eos_token_id=[6, 5], streamer=streamers)
    for prompt, tokens, each in zip(prompts, outputs(out, prompts), streamers, strict=True):
        assert each.ended == 1 and each.values[0].tolist() == [prompt]
        assert torch.cat(each.values[1:]).tolist() == tokens
    assert [out.stats.rounds[row] for row in log] == sorted(out.stats.rounds) and len(set(out.stats.rounds)) > 1


class Guide(LogitsProcessor):
    """Forces the tokens 2, 4, 6, ... after the prompt, whose length it remembers, as guides for structured text do."""

    def __init__(self):
        self.start = None

    def __call__(self, input_ids, scores):
        self.start = input_ids.shape[1] if self.start is None else self.start
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 2 * (input_ids.shape[1] - self.start) + 2] = 0
        return forced


def test_keyword_logits_processor():
    """State is the request's: rows of several lengths do not share it."""
    target, draft, prompts = uneven()
    for seed in (None, 1):
        settings = {
            "max_new_tokens": 6,
            "logits_processor": LogitsProcessorList([Guide()]),
            "do_sample": seed is not None,
        }
        out = run(target, draft, prompts, seed=seed, **settings)
        assert outputs(out, prompts) == [[2, 4, 6, 8, 10, 12]] * 4 and out.stats.target_forwards == 1


def test_keyword_num_assistant_tokens():
    target, _, prompts = uneven()
    for count, rounds in ((2, [4] * 4), ([0, 1, 2, 5], [12, 6, 4, 2])):
        assert run(target, target, prompts, max_new_tokens=12, num_assistant_tokens=count).stats.rounds == rounds


# What is set in the call, in generation_config=, in the draft's own config and in the model's -> what is gone by.
PLACES = {
    "nobody": ((None, None, None, None), 5),
    "model": ((None, None, None, 2), 2),
    "draft": ((None, None, 3, 2), 3),
    "config": ((None, 1, 3, 2), 1),
    "call": ((4, 1, 3, 2), 4),
}


@pytest.mark.parametrize(("places", "expected"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("form", ["speculative_generate", "custom_generate"])
def test_num_assistant_tokens_counts_wherever_it_stands(places, expected, form):
    call, config, draft_config, model_config = places
    target, ids = uneven()[0], torch.tensor([[3]])
    draft = copy.deepcopy(target)
    target.generation_config.num_assistant_tokens = model_config
    draft.generation_config.num_assistant_tokens = draft_config
    given = {} if call is None else {"num_assistant_tokens": call}
    given |= {} if config is None else {"generation_config": GenerationConfig(num_assistant_tokens=config)}
    given |= {"max_new_tokens": 12, "return_dict_in_generate": True, "eos_token_id": None}
    if form == "custom_generate":
        out = target.generate(ids, custom_generate=functools.partial(custom_generate, assistant_model=draft), **given)
    else:
        out = speculative_generate(target, ids, assistant_model=draft, **given)
    assert max(out.stats.accepted_lengths[0]) == expected


@pytest.mark.parametrize("where", ["call", "generation_config", "draft", "model"])
def test_settings_of_transformers_own_drafting(where):
    """What asks for nothing new is taken, wherever it stands; the rest is refused, and nearer places go before farther ones."""
    asks_nothing = {"num_assistant_tokens_schedule": ["constant"], "assistant_confidence_threshold": [0, 0.0]}
    asks = {
        "num_assistant_tokens_schedule": ["heuristic", "heuristic_transient"],
        "assistant_confidence_threshold": [0.1, 0.4, 1],
        "assistant_lookbehind": [10],
        "target_lookbehind": [5],
    }

    def call(name, value):
        target, draft, prompts = uneven()
        settings = {"max_new_tokens": 4}
        if where == "call":
            settings[name] = value
        elif where == "generation_config":
            settings["generation_config"] = GenerationConfig(**{name: value})
        else:
            setattr({"draft": draft, "model": target}[where].generation_config, name, value)
        calm = {name: asks_nothing.get(name, [None])[0]}
        if where != "call":
            assert outputs(run(target, draft, prompts, **settings, **calm), prompts)
        target.calls = draft.calls = 0
        try:
            assert outputs(run(target, draft, prompts, **settings), prompts) == plain(target, prompts, max_new_tokens=4)
        finally:
            calls.append(target.calls + draft.calls)

    calls = []
    for name, values in asks_nothing.items():
        for value in values:
            call(name, value)
    assert min(calls) > 0
    calls = []
    for name, values in asks.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name}={value!r} is not followed: .*leave it out"):
                call(name, value)
    assert max(calls) == 0


def test_keyword_prompt_lookup_num_tokens_and_max_matching_ngram_size():
    """The bigram's continuation is right, the last token's latest is not."""
    model = chain(9, (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8))
    prompt = [2, 3, 4, 5, 6, 7, 8, 3, 1, 2, 3]
    for size, accepted in ((2, 3), (1, 0)):
        settings = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": size, "max_new_tokens": 6}
        out = run(model, None, [prompt], **settings)
        assert outputs(out, [prompt]) == [[4, 5, 6, 7, 8, 8]]
        assert out.stats.accepted_lengths[0][0] == accepted


def test_weights_that_are_shared_out_among_processes(monkeypatch):
    """synced_gpus is what `generate` would choose there by itself."""
    target, draft, prompts = uneven()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    run(target, draft, prompts, max_new_tokens=2)
    monkeypatch.setattr(models, "is_fsdp_managed_module", lambda model: isinstance(model, TableModel))
    with pytest.raises(ValueError, match=r"shared out among processes .* gather them first"):
        run(target, draft, prompts, max_new_tokens=2)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_keyword_cache_and_past_key_values(name):
    """Also under the name that this transformers does not have; what is refused is in test_cache_handover.py."""
    target, prompts = build("llama"), random_prompts((9, 9), 61)
    first = run(target, target, prompts, max_new_tokens=5)
    texts = [[*row, 7, 8] for row in first.sequences.tolist()]
    out = run(target, target, texts, max_new_tokens=8, **{name: first[CACHE_NAME]})
    assert outputs(out, texts) == plain(target, texts, max_new_tokens=8)


def test_keyword_prefill_chunk_size():
    target, prompts = build("llama"), random_prompts((3, 17), 61)
    forward, widths = target.forward, []

    @functools.wraps(forward)
    def recorded(**kwargs):
        widths.append(kwargs["input_ids"].shape[1])
        return forward(**kwargs)

    target.forward = recorded
    for settings in ({"prefill_chunk_size": 4}, {"generation_config": GenerationConfig(prefill_chunk_size=4)}):
        out = run(target, build("llama"), prompts, max_new_tokens=8, num_assistant_tokens=3, **settings)
        assert max(widths) == 4
        assert outputs(out, prompts) == plain(build("llama"), prompts, max_new_tokens=8)
    for bad in (0, 2.5, True):
        with pytest.raises(ValueError, match="prefill_chunk_size must be a positive int, got"):
            run(target, target, prompts, prefill_chunk_size=bad)
