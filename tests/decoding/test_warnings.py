"""Calls that are right and may surprise: a warning that says what to do."""

import warnings
from functools import partial

import pytest

pytest.importorskip("transformers")

import torch
from support.decoding import uneven
from transformers import GenerationConfig

from cactus_kernels import Cactus, Coupled, SpS, custom_generate, speculative_generate
from cactus_kernels.tools.pair import load_pair
from cactus_kernels.tools.runs import RunSettings, encode, run_speculative

IDS = torch.tensor([[3, 4]])


def warned(call):
    """What a call warns of, messages of `UserWarning`s and the files that they point to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*not compared with plain `generate`")  # the tests' own models
        call()
    return [(str(w.message), w.filename) for w in caught if w.category is UserWarning]


def call(form="speculative_generate", **given):
    target, draft, _ = uneven()
    given = {"max_new_tokens": 2, "seed": 1, "eos_token_id": None} | given
    if form == "speculative_generate":
        return partial(speculative_generate, target, IDS, assistant_model=draft, **given)
    return partial(target.generate, IDS, custom_generate=partial(custom_generate, assistant_model=draft), **given)


FORMS = pytest.mark.parametrize("form", ["speculative_generate", "custom_generate"])


@FORMS
@pytest.mark.parametrize(
    "sampled", [{"do_sample": True}, {"generation_config": GenerationConfig(do_sample=True, max_new_tokens=2)}], ids=str
)
def test_sampling_by_a_lossy_rule_that_nobody_named(sampled, form):
    ((message, filename),) = warned(call(form, **sampled))
    assert message.startswith("no rule was given, and sampling goes by Cactus(1.0), which is lossy")
    assert 'rule="sps" is lossless' in message and 'rule="cactus"' in message
    if form == "speculative_generate":
        assert filename == __file__


def test_sampling_that_only_the_models_config_asks_for():
    target, draft, _ = uneven()
    target.generation_config.do_sample = True
    messages = warned(partial(speculative_generate, target, IDS, assistant_model=draft, max_new_tokens=2))
    assert ["no rule was given" in message for message, _ in messages] == [True]


@FORMS
@pytest.mark.parametrize("rule", ["cactus", Cactus(0.5), "sps", "mentored"], ids=str)
def test_naming_a_rule_silences_it(rule, form):
    assert warned(call(form, do_sample=True, rule=rule)) == []


@FORMS
@pytest.mark.parametrize("rule", ["cactus", Cactus(0.5), "mentored"], ids=str)
def test_a_lossy_rule_without_sampling(rule, form):
    ((message, filename),) = warned(call(form, do_sample=False, rule=rule))
    name = rule if isinstance(rule, str) else "cactus"
    assert message.startswith(
        f"the rule {name} was given and do_sample is not set: tokens are the target's own greedy ones"
    )
    if form == "speculative_generate":
        assert filename == __file__


@FORMS
def test_nothing_to_say_without_sampling(form):
    """A lossless rule changes nothing either way, nor does a seed; and Cactus is the default that nobody named."""
    for given in ({}, {"rule": "sps"}, {"rule": SpS()}, {"rule": Coupled()}):
        assert warned(call(form, **given)) == []


def test_no_warning_before_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="seed has 3 entries"):
            call(do_sample=True, seed=[1, 2, 3])()


@pytest.mark.parametrize("greedy", [False, True])
def test_the_command_names_its_rule(greedy):
    pair = load_pair(None, None, torch.float32, torch.device("cpu"))
    settings = RunSettings(rule=Cactus(1.0), seed=1, greedy=greedy, max_new_tokens=3)
    assert warned(lambda: run_speculative(pair, encode(pair, "She", settings), settings)) == []
