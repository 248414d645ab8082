"""What `generate` has prepared when it calls the loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from .cache.handover import CACHE_NAME
from .cache.support import CACHE_KEYWORDS
from .images import IMAGE_INPUTS, image_inputs

# What `generate` prepares for a model's forward pass, and the loop makes itself.
PREPARED = ("position_ids", "cache_position", "logits_to_keep", "use_cache", *CACHE_KEYWORDS)


class Callers(NamedTuple):
    """Of the processors that `generate` has prepared, what the caller gave it; None: nothing."""

    processors: Sequence[Any] | None
    prefix_allowed_tokens_fn: Callable[..., Any] | None


@dataclass(frozen=True)
class Prepared:
    """What `generate` gives to a decoding loop.

    Attributes:
        model: whose `generate` it is; the one inside a model of PEFT's.
        input_ids: int64 [B, P], `num_return_sequences` rows for each prompt. attention_mask: [B, P]; None: no padding.
        logits_processor, stopping_criteria: lists, with those of the config and the caller's.
        model_kwargs: what the model's forward pass is to get besides.
    """

    model: Any
    input_ids: torch.Tensor
    callers: Callers
    logits_processor: Sequence[Any]
    stopping_criteria: Sequence[Any]
    generation_config: GenerationConfig
    attention_mask: torch.Tensor | None
    model_kwargs: dict[str, Any]

    @classmethod
    def of(
        cls, callers, model, input_ids, *, logits_processor, stopping_criteria, generation_config, attention_mask=None,
        **model_kwargs,
    ) -> "Prepared":  # fmt: skip
        """From the arguments of a loop that `generate` calls."""
        return cls(
            model, input_ids, callers, logits_processor, stopping_criteria, generation_config, attention_mask, model_kwargs
        )  # fmt: skip

    def check(self) -> None:
        """Raises ValueError for inputs of the model that the loop would have to ignore."""
        for name, value in self.model_kwargs.items():
            if value is not None and name not in (*PREPARED, *IMAGE_INPUTS):
                raise ValueError(f"{name} is not taken by the decoding loop: leave it out")
        positions = self.model_kwargs.get("position_ids")
        if positions is not None:
            mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
            # Models that number images in directions of their own have as many sheets [S, B, P], all alike for text.
            if positions.shape[-2:] != mask.shape or ((positions != mask.cumsum(1) - 1) & (mask != 0)).any():
                raise ValueError("position_ids are not those of the mask, and are not taken: leave them out")

    @property
    def new_tokens(self) -> int:
        """Most tokens a row may get."""
        return self.generation_config.max_length - self.input_ids.shape[1]

    @property
    def cache(self) -> Any:
        """The cache that `generate` made, or the caller brought; None: neither."""
        return self.model_kwargs.get(CACHE_NAME)

    @property
    def images(self) -> dict[str, Any]:
        """Inputs of the model's pass over the prompt that hold images."""
        return image_inputs(self.model_kwargs)


def eos_ids(generation_config) -> list[int]:
    """The ids that end a row."""
    ids = generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else [int(i) for i in ids]


def pad_id(generation_config) -> int | None:
    """The id after a row's end: pad_token_id, or as in `generate` the first EOS. None if there is neither."""
    first_eos = next(iter(eos_ids(generation_config)), None)
    return first_eos if generation_config.pad_token_id is None else generation_config.pad_token_id
