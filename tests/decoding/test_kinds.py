"""Every causal kind of the installed transformers against its own plain `generate`: the package's lists say what is found."""

import inspect
import warnings

import pytest
import torch
import transformers
from support import kinds
from support.decoding import noisy, outputs, plain, random_prompts, run
from support.models import TableModel, build, table_pair
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cactus_kernels import speculative_generate
from cactus_kernels.decoding.cache import support
from cactus_kernels.decoding.cache.kinds import DECODERS, DIFFERENT, EQUAL, is_tried
from cactus_kernels.decoding.cache.support import check_rollback

OF_IMAGES = {"LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"}  # test_images.py
TOLERANCE = 1e-5  # of logits, of the largest: routers and masks may be fp32 inside
BUILT = [kind for kind in kinds.KINDS if kind not in kinds.NOT_BUILT]


def says(model):
    """What the loop says against a model; None: nothing."""
    try:
        check_rollback(model)
    except ValueError as error:
        return str(error)
    return None


def difference(model):
    """What differs between the loop and plain `generate` on ragged rows and on one, in words; None: nothing."""
    prompts = random_prompts((3, 17, 9, 1), kinds.V)
    settings = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = [model.generate(torch.tensor([p]), pad_token_id=0, eos_token_id=None, **settings) for p in prompts]
    texts = [out.sequences[0, len(p) :].tolist() for out, p in zip(expected, prompts, strict=True)]
    assert len({token for text in texts for token in text}) > 3
    del settings["return_dict_in_generate"]
    for rows in (range(4), [1]):
        chosen = [prompts[i] for i in rows]
        out = run(model, noisy(model, 0.1), chosen, **settings)
        if outputs(out, chosen) != [texts[i] for i in rows]:
            return f"tokens of {len(chosen)} rows"
        for i, logits in zip(rows, torch.stack(out.logits, 1), strict=True):
            right = torch.stack(expected[i].logits, 1)[0]
            if not (logits - right).abs().max() <= TOLERANCE * right.abs().max():
                return f"logits of {len(chosen)} rows"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILT)
def test_every_kind_is_where_it_belongs(kind, monkeypatch):
    """Equal and on the list, or refused by name; of the list of different kinds each does differ."""
    model = kinds.build(kind)
    name = type(model).__name__
    if name in EQUAL:
        assert says(model) is None and difference(model) is None
        return
    assert name in says(model)
    if name in DIFFERENT:
        monkeypatch.setattr(support, "check_alike", lambda model: None)
        try:
            found = difference(model)
        except (AssertionError, RuntimeError) as error:
            found = f"it runs on {type(error).__name__}"
        assert says(model) is None and found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in BUILT if "is_decoder" in inspect.signature(CONFIG_MAPPING[k]).parameters])
def test_kinds_that_look_ahead_unless_told_not_to(kind, monkeypatch):
    model = kinds.build(kind, is_decoder=kind == "reformer")  # which refuses to be built otherwise
    name = type(model).__name__
    if name in DECODERS:
        assert "load it with is_decoder=True" in says(model)
        monkeypatch.setattr(support, "check_alike", lambda model: None)
        assert says(model) is None and difference(model)
    elif name in EQUAL:
        assert says(model) is None and difference(model) is None
    else:
        assert name in says(model)


def test_the_lists_name_classes_that_there_are():
    """Of the release that was swept; an older one lacks some."""
    assert DECODERS < EQUAL and not EQUAL & DIFFERENT.keys()
    mapped = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    classes = {name for names in mapped for name in ([names] if isinstance(names, str) else names)}
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24):
        assert EQUAL | DIFFERENT.keys() <= classes | OF_IMAGES


BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": kinds.V,
}


def test_a_model_that_looks_ahead_is_refused_and_its_decoder_runs():
    """BERT without is_decoder=True gave other tokens without a word; the advice is what to do."""
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**BERT)).eval()
    assert says(bert) == "BertLMHeadModel attends to later tokens, too: load it with is_decoder=True"
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**BERT, is_decoder=True)).double().eval()
    prompts = random_prompts((3, 9), kinds.V)
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert outputs(run(decoder, decoder, prompts, **settings), prompts) == plain(decoder, prompts, **settings)
    gemma = build("gemma3", use_bidirectional_attention=True)
    assert "Gemma3ForCausalLM attends to later tokens, too (use_bidirectional_attention)" in says(gemma)


@pytest.mark.parametrize("kind", ["moshi", "xlm"])
def test_kinds_that_differ_are_refused_by_name(kind):
    model = kinds.build(kind)
    assert says(model).startswith(type(model).__name__) and says(model).endswith(": use another model")


def test_a_kind_that_is_not_on_the_list_runs_with_one_warning():
    """However many models and calls; and it points to the caller's line."""
    target, draft = table_pair(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            speculative_generate(target, torch.tensor([[3, 4]]), assistant_model=draft, max_new_tokens=4)
    (warning,) = [w for w in caught if "not compared with plain `generate`" in str(w.message)]
    assert str(warning.message).startswith("TableModel: ") and warning.filename == __file__
    assert str(warning.message).endswith("cactus-kernels check --model ID [--draft ID]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build("llama")
        speculative_generate(model, torch.tensor([[3, 4]]), assistant_model=model, max_new_tokens=4)


def test_a_class_of_ones_own_is_of_no_kind_whatever_its_name():
    class LlamaForCausalLM(TableModel):
        pass

    own = LlamaForCausalLM(torch.zeros(4, 4))
    assert not is_tried(own) and is_tried(build("llama")) and type(own).__name__ in EQUAL
