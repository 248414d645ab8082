"""Tiny models that the loop refuses, or takes by another attention only."""

import transformers

from .models import COMMON, V, build


def with_attention(name: str):
    model = build("llama")
    model.config._attn_implementation = name
    return model


def flex_on_two_devices():
    model = with_attention("flex_attention")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": "cpu", "model.layers.1": 1}
    return model


def model_of(name: str, **kwargs):
    """A model of class `name` of transformers; its config's class has the same stem."""
    stem = name.split("For")[0].removesuffix("Model")
    return getattr(transformers, name)(getattr(transformers, stem + "Config")(**kwargs))


SMALL_BERT = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
SMALL_NEXT = COMMON | {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
SMALL_MAMBA = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}
SMALL_T5 = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
SMALL_NEO = {
    "vocab_size": V, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 64,
}  # fmt: skip
