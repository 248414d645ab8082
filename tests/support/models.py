"""Tiny models for tests: made here, nothing downloaded."""

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

V = 61  # of the transformers below
WINDOW = 8


class TableConfig(PretrainedConfig):
    model_type = "table"

    def __init__(self, vocab_size=8, num_hidden_layers=1, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.num_hidden_layers = vocab_size, num_hidden_layers


class TableModel(PreTrainedModel, GenerationMixin):
    """A language model that looks the next token's logits up by the current token: exact, whatever the batch."""

    config_class = TableConfig
    _supports_sdpa = True

    def __init__(self, table):
        """table: logits fp32 [V, V] of the next token given the current one."""
        super().__init__(TableConfig(vocab_size=table.shape[1]))
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.calls = 0

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, past_key_values=None, **kwargs):
        self.calls += 1
        return CausalLMOutputWithPast(logits=self.table[input_ids])

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}


def table_pair(V=8, seed=0, noise=1.0):
    """A target and a draft with V tokens that differ by Gaussian noise on the logits."""
    generator = torch.Generator().manual_seed(seed)
    table = 1.5 * torch.randn(V, V, generator=generator)
    return TableModel(table), TableModel(table + noise * torch.randn(V, V, generator=generator))


def probs(model, token):
    """The distribution after a token, float64 [V]."""
    return model.table[token].float().softmax(-1).double()


COMMON = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT2 = {
    "vocab_size": V,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": ("LlamaConfig", COMMON),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen3": ("Qwen3Config", COMMON | {"head_dim": 8}),
    "qwen3-windows": ("Qwen3Config", COMMON | MIXED | {"head_dim": 8, "use_sliding_window": True}),
    "mistral": ("MistralConfig", COMMON | {"sliding_window": WINDOW}),
    "qwen3-moe": ("Qwen3MoeConfig", COMMON | MOE | {"head_dim": 8}),
    "phi3": ("Phi3Config", COMMON | {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", COMMON | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", COMMON | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "granite": ("GraniteConfig", COMMON | {"residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "smollm3": ("SmolLM3Config", COMMON | {"no_rope_layers": [1, 0, 1]}),
    "cohere": ("CohereConfig", COMMON | {"logit_scale": 1.0}),
    "cohere2": ("Cohere2Config", COMMON | MIXED | {"logit_scale": 1.0}),
    "olmo2": ("Olmo2Config", COMMON),
    "gpt2": ("GPT2Config", GPT2),
    "gpt-neox": ("GPTNeoXConfig", COMMON),
    "opt": ("OPTConfig", COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def build(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64, **changes):
    """A small random transformer of a family; `changes` go to its config."""
    name, kwargs = FAMILIES[family]
    torch.manual_seed(0)
    # Experts looped over: torch's grouped product takes no float64.
    experts = {"experts_implementation": "eager"} if "num_experts" in kwargs else {}
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**kwargs | changes), attn_implementation=attention, **experts
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Attention of a fresh model is nearly flat, and hides a wrong slot.
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.to(dtype).eval()
