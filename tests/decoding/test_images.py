"""Vision-language targets with a text draft: images in the prompt, text alone, and what is refused."""

import functools

import pytest
import torch
from support.decoding import outputs, plain, random_prompts, run
from support.images import IMAGE, WORDS, gemma3, llava, made, pixels, qwen2_vl
from support.models import build

from cactus_kernels import custom_generate


def test_images_in_a_ragged_batch():
    target, draft = made(llava), build("llama")
    prompts = [[5, *[IMAGE] * 4, 7, 8], [9, 3, 11, *[IMAGE] * 4, 4, 20, 21], [*[IMAGE] * 8, 7]]
    images = pixels(4).split([1, 1, 2])
    settings = {"max_new_tokens": 20}
    out = run(target, draft, prompts, pixel_values=torch.cat(images), **settings)
    expected = [
        plain(target, [prompt], pixel_values=image, **settings)[0]
        for prompt, image in zip(prompts, images, strict=True)
    ]
    assert outputs(out, prompts) == expected
    assert expected[0] != plain(target, prompts[:1], pixel_values=pixels(2)[1:], **settings)[0]
    assert outputs(run(target, target, prompts, pixel_values=torch.cat(images), **settings), prompts) == expected
    loop = functools.partial(custom_generate, assistant_model=draft)
    through = plain(target, prompts[:1], pixel_values=images[0], custom_generate=loop, **settings)
    assert through == expected[:1]


def test_drafts_that_stand_for_images_are_text():
    """A draft that proposes nothing else cannot upset the count of images in the prompt."""
    target, draft = made(llava), build("llama")
    with torch.no_grad():
        draft.lm_head.weight.zero_()
        draft.lm_head.bias = torch.nn.Parameter(100.0 * torch.eye(61, dtype=torch.float64)[IMAGE])
    prompts = [[5, *[IMAGE] * 4, 7, 8]]
    out = run(target, draft, prompts, pixel_values=pixels(1), max_new_tokens=10)
    assert outputs(out, prompts) == plain(target, prompts, pixel_values=pixels(1), max_new_tokens=10)
    assert out.stats.target_forwards == max(out.stats.rounds) + 1


@pytest.mark.parametrize("kind", [llava, gemma3, qwen2_vl])
def test_text_alone(kind):
    target = made(kind)
    prompts = random_prompts((3, 17, 9, 1), WORDS)
    settings = {"max_new_tokens": 20, "suppress_tokens": list(range(WORDS, 61))}
    expected = plain(target, prompts, **settings)
    for draft in (build("llama"), target):
        out = run(target, draft, prompts, **settings)
        assert outputs(out, prompts) == expected


ONE = [[5, IMAGE, IMAGE, IMAGE, IMAGE, 7]]
REFUSED = {
    "both ways": (
        gemma3,
        ONE,
        {},
        "pixel_values: Gemma3ForConditionalGeneration has attention or positions of its own",
    ),
    "positions": (qwen2_vl, ONE, {}, "pixel_values: Qwen2VLForConditionalGeneration has attention or positions of its"),
    "grid": (qwen2_vl, ONE, {"image_grid_thw": torch.ones(1, 3)}, "pixel_values, image_grid_thw: .*give it text"),
    "token types": (gemma3, ONE, {"token_type_ids": torch.zeros(1, 6)}, "pixel_values, token_type_ids: .*give it"),
    "chunks": (llava, ONE, {"prefill_chunk_size": 4}, "pixel_values and prefill_chunk_size: .*leave one out"),
    "at the end": (llava, [ONE[0][:-1]], {}, "a prompt ends with an image: let text follow it"),
}


@pytest.mark.parametrize("kind, prompts, settings, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(kind, prompts, settings, message):
    target = made(kind)
    with pytest.raises(ValueError, match=message):
        run(target, build("llama"), prompts, pixel_values=pixels(1), max_new_tokens=5, **settings)
