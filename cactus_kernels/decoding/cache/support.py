"""Which models can roll back row by row, and how far they go."""

import inspect

from .kinds import check_alike
from .masks import MASKS, is_flash

# The keyword that takes the cache, newest name first: transformers 5.24 writes `cache` for `past_key_values`.
CACHE_KEYWORDS = ("cache", "past_key_values")
LAYER_TYPES = ("full_attention", "sliding_attention")


def max_positions(model) -> int | None:
    """Positions the model was made for, None if its config names no limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            # Beyond this one the frequencies change: for all rows of a call at once, and not for keys already cached.
            limit = min(limit, part["original_max_position_embeddings"])
    return limit


def check_rollback(model, max_length: int | None = None) -> None:
    """Raises ValueError, naming what came and what to do, if `RollbackModel` cannot run the model to max_length."""
    model = without_wrapper(model)
    _check_kind(model)
    _check_layers(model)
    _check_attention(model)
    _check_forward(model)
    _check_masks(model)
    _check_positions(model)
    _check_own_cache(model)
    check_alike(model)
    limit = max_positions(model)
    if max_length is not None and limit is not None and max_length > limit:
        name = type(model).__name__
        raise ValueError(
            f"max_length is {max_length}, but {name} has {limit} positions: use a shorter prompt or fewer new tokens"
        )


def without_wrapper(model):
    """The transformers model inside a model of PEFT's with adapters in its layers, such as LoRA; others as they are."""
    if not hasattr(model, "active_peft_config"):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"{config.peft_type} adapters put tokens of their own before the prompt: merge or leave them out"
        )
    return model.get_base_model()


def cache_keyword(model) -> str | None:
    """The keyword of a model's forward pass that takes the cache; None: it has none."""
    parameters = inspect.signature(model.forward).parameters
    return next((keyword for keyword in CACHE_KEYWORDS if keyword in parameters), None)


def _sdpa_advice(model) -> str:
    """How to have a model's attention take masks: transformers ignores a call that sets it for classes of the old kind."""
    if not model._supports_sdpa:
        return "its class has no other attention, use another model"
    if not model._can_set_attn_implementation():
        return 'load the model with attn_implementation="sdpa"'
    return 'call model.set_attn_implementation("sdpa")'


def _numbers_from_padding(model) -> bool:
    return any(
        name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        for name, module in model.named_modules()
    )


def _check_kind(model):
    name = type(model).__name__
    if model.device.type == "meta":
        raise ValueError(
            f"the first weights of {name} are offloaded, so that it has no device: keep its embeddings on one (device_map)"
        )
    # A class of transformers says whether it has a language model head; another one is taken at its word.
    headless = type(model).__module__.startswith("transformers.") and not model.can_generate()
    if headless or model.config.is_encoder_decoder:
        raise ValueError(f"{name} is not a decoder-only causal LM: load the model with AutoModelForCausalLM")


def _check_layers(model):
    name, config = type(model).__name__, model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    if model._is_stateful or not types.issubset(LAYER_TYPES):
        kinds = f" ({', '.join(sorted(types))})" if types else ""
        raise ValueError(
            f"{name} has recurrent, hybrid or other special layers{kinds}, which cannot roll back row by row: "
            f"use a model whose layers are all {' or '.join(LAYER_TYPES)}"
        )


def _check_attention(model):
    name, config = type(model).__name__, model.config.get_text_config()
    attention = config._attn_implementation
    if attention not in MASKS and not is_flash(attention):
        raise ValueError(
            f"attention implementation {attention!r} takes no mask with a pattern for each row: {_sdpa_advice(model)}"
        )
    devices = set(getattr(model, "hf_device_map", {}).values()) - {"cpu", "disk"}
    if attention == "flex_attention" and len(devices) > 1:
        raise ValueError(
            f"the layers of {name} are on several devices ({', '.join(sorted(map(str, devices)))}), and a mask of flex "
            f"attention stays on one: {_sdpa_advice(model)}"
        )


def _check_forward(model):
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if cache_keyword(model) is None or "position_ids" not in parameters:
        raise ValueError(
            f"{name}.forward takes {', '.join(parameters)}, and must take position_ids and "
            f"{' or '.join(CACHE_KEYWORDS)}: use a model that can be told its positions"
        )


def _check_masks(model):
    name, attention = type(model).__name__, model.config.get_text_config()._attn_implementation
    if attention == "eager" and any(b.dim() == 4 and b.shape[2] == b.shape[3] > 1 for b in model.buffers()):
        raise ValueError(f"{name} has a causal mask of its own by slot in eager attention: {_sdpa_advice(model)}")


def _check_positions(model):
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(config, "alibi", False) or _numbers_from_padding(model):
        raise ValueError(
            f"{name} makes positions of its own (ALiBi, or counted from the padding id as in RoBERTa): "
            f"use a model that can be told its positions"
        )


def _check_own_cache(model):
    generation_config = getattr(model, "generation_config", None)
    if getattr(generation_config, "cache_implementation", None) == "quantized":
        raise ValueError(
            "model.generation_config.cache_implementation is 'quantized', and a quantized cache cannot roll back: "
            "set it to None"
        )
