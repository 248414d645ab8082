"""The loop behind `model.generate(..., custom_generate=)`, as a function and as a folder: what `speculative_generate` gives."""

import copy
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.resources import files

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from support.decoding import (
    EOS,
    PAD,
    PROCESSORS,
    Increasing,
    Recorder,
    SumStops,
    chain,
    outputs,
    run,
    uneven,
)
from support.models import table_pair
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as hf

from cactus_kernels import Cactus, custom_generate, speculative_generate
from cactus_kernels.decoding.cache.handover import CACHE_NAME

HUB = str(files("cactus_kernels") / "hub")
IDS = torch.tensor([[3, 4], [5, 6]])


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """Where transformers copies a folder's code before it runs it."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))


def through_generate(form, target, draft, prompts, **kwargs):
    """Like `run`, but through `target.generate`."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    rule = {"rule": "cactus"} if kwargs.get("do_sample") else {}
    kwargs = {"pad_token_id": PAD, "eos_token_id": None, "return_dict_in_generate": True} | rule | kwargs
    if form == "folder":
        kwargs |= {"assistant_model": draft, "custom_generate": HUB, "trust_remote_code": True}
    else:
        bound = {k: kwargs.pop(k) for k in ("streamer", "tokenizer", "assistant_tokenizer") if k in kwargs}
        kwargs["custom_generate"] = partial(custom_generate, assistant_model=draft, **bound)
    return target.generate(ids, attention_mask=mask, **kwargs)


FORMS = pytest.mark.parametrize("form", ["function", "folder"])


@FORMS
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_same_tokens(form, do_sample):
    target, draft, prompts = uneven()
    settings = {
        "max_new_tokens": 20, "eos_token_id": [6], "do_sample": do_sample, "seed": [4, 3, 2, 1], "temperature": 0.8,
        "num_assistant_tokens": 3, "backend": "torch",
    }  # fmt: skip
    settings |= {"rule": Cactus(torch.tensor([0.0, 0.1, 0.5, 1.0]))} if do_sample else {}
    mine, theirs = (f(target, draft, prompts, **settings) for f in (partial(through_generate, form), run))
    assert torch.equal(mine.sequences, theirs.sequences) and mine.stats.accepted == theirs.stats.accepted
    assert sum(mine.stats.accepted) and max(mine.stats.drafted) <= 3 * mine.stats.target_forwards
    plain_prompts = [[3, 4], [9, 2]]
    mine = through_generate(
        form, target, draft, plain_prompts, max_new_tokens=9, num_return_sequences=2, do_sample=True, seed=1
    )
    theirs = run(target, draft, plain_prompts, max_new_tokens=9, num_return_sequences=2, do_sample=True, seed=1)
    assert torch.equal(mine.sequences, theirs.sequences)


@pytest.mark.parametrize("settings", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_that_depend_on_a_rows_length_are_made_for_the_row(settings):
    target, draft, prompts = uneven()
    settings = {
        "max_new_tokens": 25,
        "num_return_sequences": 2,
        "do_sample": True,
        "seed": 1,
        "temperature": 0.7,
    } | settings
    mine, theirs = (f(target, draft, prompts, **settings) for f in (partial(through_generate, "function"), run))
    assert torch.equal(mine.sequences, theirs.sequences)
    settings = {
        k: v
        for k, v in settings.items()
        if k in ("max_new_tokens", "num_return_sequences", "do_sample", "seed", "temperature")
    }
    assert not torch.equal(mine.sequences, run(target, draft, prompts, **settings).sequences)


@pytest.mark.parametrize("own", [hf.RepetitionPenaltyLogitsProcessor(3.0), hf.NoRepeatNGramLogitsProcessor(1)])
def test_processors_of_the_callers(own):
    """Also one of a type that the config asks for too, which goes before the config's."""
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 12, "repetition_penalty": 1.1, "logits_processor": LogitsProcessorList([own])}
    mine, theirs = (f(target, draft, prompts, **settings) for f in (partial(through_generate, "function"), run))
    assert torch.equal(mine.sequences, theirs.sequences)
    del settings["logits_processor"]
    assert not torch.equal(mine.sequences, run(target, draft, prompts, **settings).sequences)
    texts = Increasing(prompts, [15])
    settings = {"max_new_tokens": 12, "eos_token_id": 15, "logits_processor": LogitsProcessorList([texts])}
    assert outputs(through_generate("function", target, draft, prompts, **settings), prompts)
    assert len(texts.texts) > 12


@FORMS
def test_criteria_stop_strings_and_streamers(form, bytes_tokenizer):
    target, draft, prompts = uneven()
    target.table[:, 0] = draft.table[:, 0] = -1e4
    for own in (SumStops(), MaxLengthCriteria(9)):
        settings = {"max_new_tokens": 25, "stopping_criteria": StoppingCriteriaList([own])}
        mine, theirs = (f(target, draft, prompts, **settings) for f in (partial(through_generate, form), run))
        assert torch.equal(mine.sequences, theirs.sequences) and min(mine.stats.tokens) < 25
    a, b, c, d = (bytes_tokenizer.convert_tokens_to_ids(x) for x in "abcd")
    model = chain(len(bytes_tokenizer), (a, b), (b, c), (c, d), (d, a))
    settings = {"max_new_tokens": 12, "stop_strings": ["cda"], "tokenizer": bytes_tokenizer}
    assert outputs(through_generate(form, model, model, [[a], [b, b, c], [d]], **settings), [[0] * 3] * 3) == [
        [b, c, d, a], [d, a], [a, b, c, d, a],
    ]  # fmt: skip
    streamer = Recorder()
    out = through_generate(form, target, draft, prompts[1:2], max_new_tokens=8, streamer=streamer)
    assert (
        torch.cat([v.flatten() for v in streamer.values]).tolist() == out.sequences[0].tolist() and streamer.ended == 1
    )


@FORMS
def test_top_k_is_50_unless_told_otherwise(form):
    """As in `generate`: nothing beyond the 50 likeliest of 80 tokens comes out."""
    target, draft = table_pair(80, noise=0.1)
    target.table *= 0.01
    draft.table *= 0.01
    settings = {"rule": "sps", "do_sample": True, "max_new_tokens": 300, "seed": 1}
    out = through_generate(form, target, draft, [[3]], **settings).sequences[0]
    ranks = target.table.argsort(descending=True).argsort()
    assert ranks[out[:-1], out[1:]].max() == 49
    out = through_generate(form, target, draft, [[3]], top_k=0, **settings).sequences[0]
    assert ranks[out[:-1], out[1:]].max() > 60


def test_prompt_lookup_needs_no_binding():
    target = uneven()[0]
    ids = torch.tensor([[3, 4, 9, 3, 4], [2, 7, 2, 7, 2]])
    settings = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20, "pad_token_id": PAD, "eos_token_id": None}
    got = target.generate(ids, custom_generate=custom_generate, **settings)
    assert torch.equal(got, target.generate(ids, max_new_tokens=20, pad_token_id=PAD, eos_token_id=None))
    both = {"do_sample": True, "num_return_sequences": 3, "seed": 1, "max_matching_ngram_size": 1, "rule": "sps"}
    assert torch.equal(
        target.generate(ids, custom_generate=custom_generate, **settings, **both),
        speculative_generate(target, ids, **settings, **both),
    )


def bind(draft, **bound):
    return partial(custom_generate, assistant_model=draft, **bound)


def used_cache():
    cache = DynamicCache()
    cache.update(torch.zeros(3, 1, 1, 4), torch.zeros(3, 1, 1, 4), 0)
    return cache


# What `generate` is given, beside the bound draft, and what the error says.
LOST = {
    "assistant_model": (
        lambda d: {"custom_generate": custom_generate, "assistant_model": d}, "keeps its assistant_model from .* bind it"
    ),
    "another draft": (lambda d: {"assistant_model": d}, "keeps its assistant_model from custom_generate: bind it"),
    "streamer": (lambda d: {"streamer": Recorder()}, "keeps its streamer from custom_generate: bind it"),
    "no draft": (lambda d: {"custom_generate": custom_generate}, "assistant_model is None: pass the draft model"),
    "tokenizer": (
        lambda d: {"stop_strings": ["a"], "tokenizer": object()}, "stop_strings need the tokenizer: pass tokenizer="
    ),
    "stop strings in a config": (lambda d: {"generation_config": GenerationConfig(stop_strings=["a"])}, "locate a tokenizer"),
    "beams": (lambda d: {"num_beams": 2}, "num_beams=2: beam search does not sample"),
    "cache": (lambda d: {CACHE_NAME: used_cache()}, "the cache has 3 rows for 2 rows of the batch"),
    "positions": (lambda d: {"position_ids": torch.tensor([[1, 2], [1, 2]])}, "position_ids are not those of the mask"),
    "right-padded mask": (
        lambda d: {"attention_mask": torch.tensor([[1, 1], [1, 0]])}, "padding at the right of a row or inside it"
    ),
    "a padding id inside": (
        lambda d: {"pad_token_id": 4, "eos_token_id": 1}, "padding at the right of a row or inside it"
    ),
    "guidance": (lambda d: {"guidance_scale": 1.5}, "guidance_scale=1.5"),
    "rule": (lambda d: {"rule": "cacti"}, "unknown rule 'cacti'"),
    "two drafters": (lambda d: {"prompt_lookup_num_tokens": 3}, "are both given: leave one out"),
    "a typo": (lambda d: {"num_asistant_tokens": 3}, r"not used by the model: \['num_asistant_tokens'\]"),
    "strengths": (lambda d: {"rule": Cactus(torch.ones(3))}, "3 strengths for 2 rows"),
    "rows to end": (
        lambda d: {"stopping_criteria": [SumStops()]}, "rows that end at different lengths need padding: pass pad_token_id"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "says"), LOST.values(), ids=LOST)
def test_what_transformers_would_lose_is_refused(given, says):
    target, draft = table_pair(8)
    given = {"custom_generate": bind(draft), "max_new_tokens": 4} | given(draft)
    with pytest.raises(ValueError, match=says):
        target.generate(IDS, **given)
    assert target.calls == draft.calls == 0


def test_inputs_of_the_model_that_the_loop_has_no_use_for():
    """`generate` lets the forward's own keywords through; the loop says so, also through `speculative_generate`."""
    target, draft = table_pair(8)
    forward = target.forward
    target.forward = lambda input_ids, **kwargs: forward(input_ids)
    target.forward.__signature__ = inspect.signature(
        lambda input_ids, attention_mask=None, position_ids=None, cache=None, past_key_values=None, clicks=None: 0
    )
    for call in (
        partial(target.generate, IDS, custom_generate=bind(draft)),
        partial(speculative_generate, target, IDS, assistant_model=draft),
    ):
        with pytest.raises(ValueError, match=r"clicks is not taken by .*: leave it out"):
            call(clicks=torch.zeros(2), max_new_tokens=3)


SECTIONS = [
    "Description", "Base model", "Model compatibility", "Additional Arguments", "Output Type changes", "Example",
]  # fmt: skip


def test_the_folder_describes_itself():
    """The metadata and the sections that transformers asks of a `custom_generate` repository; its example runs from a copy."""
    readme = (files("cactus_kernels") / "hub" / "README.md").read_text(encoding="utf-8")
    _, metadata, text = readme.split("---\n", 2)
    assert "tags:\n- custom_generate\n" in metadata and "library_name: transformers\n" in metadata
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    arguments = text.partition("## Additional Arguments")[2].partition("## ")[0]
    named = re.findall(r"^- `(\w+)` ", arguments, re.M)
    parameters = inspect.signature(speculative_generate).parameters
    assert set(named) == {"rule", "seed", "budget", "draft_temperature", "backend"} <= set(parameters)


@pytest.mark.slow
def test_the_example_of_the_folder_runs_from_a_copy(tmp_path):
    shutil.copytree(HUB, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    (example,) = re.findall(r"```python\n(.*?)```", (tmp_path / "copy" / "README.md").read_text(encoding="utf-8"), re.S)
    assert '"FOLDER"' in example
    done = subprocess.run(
        [sys.executable, "-c", example.replace('"FOLDER"', repr(str(tmp_path / "copy")))],
        capture_output=True, text=True, env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Question:") >= 2 and re.search(
        r"^[1-6]\.\d\d tokens per forward pass$", done.stdout, re.M
    )


def test_the_folder_asks_for_the_package(monkeypatch):
    """By requirements.txt, which transformers reads before it runs the code's function."""
    version = importlib.metadata.version

    def without(name):
        if name == "cactus-kernels":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    target, draft, prompts = uneven()
    with pytest.raises(ImportError, match=r"Missing requirements(.|\n)*cactus-kernels>=0.* \(installed: None\)"):
        through_generate("folder", target, draft, prompts, max_new_tokens=3)


@FORMS
def test_the_callers_models_are_left_as_they_were(form):
    target, draft, prompts = uneven()
    before = [copy.deepcopy(c.to_dict()) for c in (target.config, target.generation_config, draft.generation_config)]
    through_generate(form, target, draft, prompts, max_new_tokens=5, num_assistant_tokens=2, eos_token_id=EOS)
    assert before == [c.to_dict() for c in (target.config, target.generation_config, draft.generation_config)]
