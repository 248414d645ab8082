"""What an error advises can be done, and then there is no error."""

import pytest
import torch
from support.decoding import random_prompts, run
from support.images import IMAGE, llava, made, pixels, qwen2_vl
from support.models import build, table_pair
from support.refused import SMALL_NEO, flex_on_two_devices, model_of, with_attention

from cactus_kernels import Cactus, speculative_generate
from cactus_kernels.decoding.cache.support import check_rollback
from cactus_kernels.decoding.keywords import REFUSED

IDS = torch.tensor([[3, 4], [5, 6]])
LEFT_OUT = None  # in place of a value
LEAVE_IT_OUT = {
    "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": [1], "force_words_ids": [[3]], "low_memory": True,
    "penalty_alpha": 0.6, "dola_layers": "high", "use_mtp": True, "speculation_type": "mtp", "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5, "is_assistant": True, "guidance_scale": 2.0, "watermarking_config": {"bias": 1.0},
    "output_attentions": True, "output_hidden_states": True, "use_cache": False, "token_healing": True,
    "cache_implementation": "quantized",
}  # fmt: skip
# What is passed, what the error advises, and what is passed in its place.
ADVICE = {
    **{name: ({name: value}, "leave .*out", {name: LEFT_OUT}) for name, value in LEAVE_IT_OUT.items()},
    "num_beams": ({"num_beams": 2}, "use num_beams=1", {"num_beams": 1}),
    "no draft": ({"assistant_model": None}, "prompt_lookup_num_tokens", {"assistant_model": None, "prompt_lookup_num_tokens": 3}),
    "two drafters": (
        {"prompt_lookup_num_tokens": 3}, "leave one out", {"assistant_model": None, "prompt_lookup_num_tokens": 3}
    ),
    "padding": ({"max_time": 9.0}, "pass pad_token_id", {"max_time": 9.0, "pad_token_id": 0}),
    "mask": ({"pad_token_id": 5}, "pass attention_mask", {"pad_token_id": 5, "attention_mask": torch.ones_like(IDS)}),
    "draft_temperature": (
        {"draft_temperature": 0.5}, "pass do_sample=True", {"draft_temperature": 0.5, "do_sample": True, "rule": "sps"}
    ),
    "strengths": ({"rule": Cactus(torch.ones(3))}, "give one a row", {"rule": Cactus(torch.ones(2)), "do_sample": True}),
    "seeds": ({"seed": [1]}, "give one a row", {"seed": [1, 2]}),
    "inputs_embeds": ({"inputs_embeds": torch.zeros(2, 2, 4)}, "as input_ids", {"inputs_embeds": LEFT_OUT}),
    "cache": ({"past_key_values": object()}, "leave it out", {"past_key_values": LEFT_OUT}),
}  # fmt: skip


def test_every_refused_setting_is_tried():
    assert REFUSED.keys() == LEAVE_IT_OUT.keys() | {"num_beams"}


@pytest.mark.parametrize("given, advice, instead", ADVICE.values(), ids=ADVICE)
def test_a_call_that_does_as_it_is_told_runs(given, advice, instead):
    target, draft = table_pair(8)
    settings = {"assistant_model": draft, "max_new_tokens": 4}
    with pytest.raises((TypeError, ValueError), match=advice):
        speculative_generate(target, IDS, **settings | given)
    advised = {name: value for name, value in (settings | instead).items() if value is not LEFT_OUT}
    assert speculative_generate(target, IDS, **advised).shape == (2, 6)


@pytest.mark.parametrize("make", [lambda: with_attention("paged|sdpa"), flex_on_two_devices], ids=["paged", "flex"])
def test_attention_is_set_as_the_error_says(make):
    model = make()
    assert refusal(model).endswith('call model.set_attn_implementation("sdpa")')
    model.set_attn_implementation("sdpa")
    assert refusal(model) is None


def test_attention_that_cannot_be_set_is_not_to_be_set():
    """transformers ignores `set_attn_implementation` for GPT-Neo, which has no sdpa."""
    model = model_of("GPTNeoForCausalLM", **SMALL_NEO)
    assert refusal(model).endswith("its class has no other attention, use another model")
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "eager"


def test_attention_of_the_old_kind_is_chosen_at_loading(monkeypatch):
    model = with_attention("paged|sdpa")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    assert refusal(model).endswith('load the model with attn_implementation="sdpa"')
    assert refusal(build("llama", "sdpa")) is None


def refusal(model):
    """What the loop says against a model."""
    try:
        check_rollback(model)
    except ValueError as error:
        return str(error)
    return None


IMAGES = {"pixel_values": pixels(1)}


@pytest.mark.parametrize(
    "kind, given, says",
    [
        (qwen2_vl, IMAGES | {"image_grid_thw": torch.ones(1, 3)}, "pixel_values, image_grid_thw: .*give it text alone"),
        (qwen2_vl, {"image_grid_thw": torch.ones(1, 3)}, "image_grid_thw is not .*leave it out"),
        (llava, IMAGES | {"prefill_chunk_size": 4}, "leave one out"),
    ],
    ids=["images", "a grid alone", "chunks"],
)
def test_images_are_left_out_with_all_that_goes_with_them(kind, given, says):
    target, draft, settings = made(kind), build("llama"), {"max_new_tokens": 4, "suppress_tokens": [57, 58, 59, IMAGE]}
    with pytest.raises(ValueError, match=says):
        run(target, draft, [[5, IMAGE, IMAGE, IMAGE, IMAGE, 7]], **settings | given)
    assert run(target, draft, random_prompts((5, 3), 50), **settings).stats.tokens == [4, 4]


def test_videos_are_left_out_as_a_whole():
    given = {"pixel_values_videos": pixels(1), "video_grid_thw": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=r"pixel_values_videos, video_grid_thw are not taken by .*: leave them out"):
        run(made(qwen2_vl), build("llama"), [[5, 7]], max_new_tokens=4, **given)
