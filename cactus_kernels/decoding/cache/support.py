"""Which models can roll back row by row, and how far they go."""

import inspect

import torch

from .kinds import check_alike
from .masks import MASKS, is_flash

# The keyword that takes the cache, newest name first: transformers 5.24 writes `cache` for `past_key_values`.
CACHE_KEYWORDS = ("cache", "past_key_values")
LAYER_TYPES = ("full_attention", "sliding_attention")


def max_positions(model) -> int | None:
    """Positions the model was made for, None if its config names no limit. Most models go on past it, see `table_positions`."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def table_positions(model) -> int | None:
    """Positions that a model looks up in a table, learned or made at the start, and has none beyond; None: it computes them."""
    limit, model = max_positions(model), without_wrapper(model)
    if limit is None:
        return None
    words = model.get_input_embeddings()
    # Some learned tables have up to two rows before the first position.
    learned = {
        m.num_embeddings - limit for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words
    }
    made = any(b.dim() == 2 and b.shape[0] == limit for b in model.buffers())
    return limit if made or learned & {0, 1, 2} else None


def check_length(model, length: int) -> None:
    """Raises ValueError if a target's tables of positions end before a text of `length` tokens does."""
    limit = table_positions(model)
    # The last token is never read.
    if limit is not None and length - 1 > limit:
        name = type(without_wrapper(model)).__name__
        raise ValueError(
            f"max_length is {length}, but the target, {name}, has a table of {limit} positions, for texts of {limit + 1} "
            "tokens: use a shorter prompt or fewer new tokens"
        )


def check_rollback(model) -> None:
    """Raises ValueError, naming what came and what to do, if `RollbackModel` cannot run the model."""
    model = without_wrapper(model)
    _check_kind(model)
    _check_layers(model)
    _check_attention(model)
    _check_forward(model)
    _check_masks(model)
    _check_positions(model)
    _check_own_cache(model)
    check_alike(model)


def without_wrapper(model):
    """The transformers model inside what `torch.compile` made, or PEFT with adapters in its layers (LoRA); others as they are."""
    while (inside := _inside(model)) is not model:
        model = inside
    return model


def to_call(model):
    """What runs the model: the module that `torch.compile` made, where there is one, else the one without wrappers."""
    while not is_compiled(model) and (inside := _inside(model)) is not model:
        model = inside
    return model


def is_compiled(model) -> bool:
    """Whether a module is one that `torch.compile` made of another."""
    return isinstance(getattr(model, "_orig_mod", None), torch.nn.Module)


def _inside(model):
    if is_compiled(model):
        return model._orig_mod
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
