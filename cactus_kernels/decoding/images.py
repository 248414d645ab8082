"""Images for a vision-language target: what goes to its pass over the prompt, and what cannot.

The draft reads the text alone, with the tokens that stand for images in it.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from .cache.support import CACHE_KEYWORDS, without_wrapper

# What a forward pass may take beside the text. `generate` encodes pixels before decoding where the model can.
IMAGE_INPUTS = ("pixel_values", "image_sizes", "pixel_mask", "pixel_attention_mask", "mm_encoder_outputs")
# What the loop gives a forward pass itself, or `generate` takes for a setting of its own.
OWN = ("attention_mask", "use_cache", "output_attentions", "output_hidden_states", "return_dict", *CACHE_KEYWORDS)
# A forward pass that takes these looks at images both ways, or numbers their positions in its own way.
UNLIKE_TEXT = ("token_type_ids", "mm_token_type_ids", "image_grid_thw")


def check_images(model, input_ids: torch.Tensor, given: Mapping[str, Any], prefill_chunk_size: int | None) -> None:
    """Raises ValueError if inputs of the model beside its text were given that the loop cannot pass on.

    input_ids: int64 [B, P]. given: keywords of `generate`.
    """
    parameters = inspect.signature(without_wrapper(model).forward).parameters
    names = [name for name in IMAGE_INPUTS if given.get(name) is not None]
    others = [name for name in parameters if given.get(name) is not None and name not in (*names, *OWN)]
    # All at once, since the model would not do with some of them.
    if names and any(name in parameters for name in UNLIKE_TEXT):
        raise ValueError(
            f"{', '.join([*names, *others])}: {type(without_wrapper(model)).__name__} has attention or positions of its own "
            "for images, which are not offered: give it text alone"
        )
    if others:
        be, them = ("is", "it") if len(others) == 1 else ("are", "them")
        raise ValueError(f"{', '.join(others)} {be} not taken by speculative_generate: leave {them} out")
    if not names:
        return
    if prefill_chunk_size is not None:
        raise ValueError(f"{names[0]} and prefill_chunk_size: a prompt with images is read at once, leave one out")
    if (input_ids[:, -1] == getattr(model.config, "image_token_id", -1)).any():
        raise ValueError("a prompt ends with an image: let text follow it")


def image_inputs(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """Of the keywords that `generate` prepared for the model, those that hold images."""
    given = {name: prepared.get(name) for name in IMAGE_INPUTS}
    return {name: value for name, value in given.items() if value is not None and len(value)}
