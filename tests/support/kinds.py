"""Every kind of causal model that the installed transformers has, small and random."""

import inspect

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

V, WINDOW = 61, 8
LARGEST = 50_000_000  # parameters


def _named(value, names):
    return dict.fromkeys(names.split(), value)


# Sizes by the names that configs have for them.
SMALL = {
    **_named(V, "vocab_size unpadded_vocab_size output_vocab_size vocab_size_per_layer_input"),
    **_named(32, "hidden_size n_embd d_model embedding_size word_embed_proj_dim attention_hidden_size"),
    **_named(48, "intermediate_size n_inner ffn_dim dff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dim_ff"),
    **_named(48, "shared_intermediate_size moe_intermediate_size shared_expert_intermediate_size"),
    **_named(48, "prefix_dense_intermediate_size shared_experts_intermediate_size"),
    **_named(3, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    **_named(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_named(4, "swa_num_attention_heads index_n_heads"),
    **_named(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    **_named(8, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim kv_channels swa_head_dim index_head_dim dim_head"),
    **_named(8, "hidden_size_per_layer_input"),
    **_named(4, "rotary_dim"),
    **_named(16, "q_lora_rank kv_lora_rank o_lora_rank"),
    **_named(256, "max_position_embeddings n_positions max_seq_len n_ctx"),
    **_named(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_named(2, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    **_named(1, "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    **_named(WINDOW, "sliding_window window_size sliding_window_size"),
    **_named(1, "first_k_dense_replace num_dense_layers"),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
    "use_sliding_window": True, "max_window_layers": 1, "is_decoder": True, "type_vocab_size": 2,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8, "state_size": 8,
    "mamba_d_ssm": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
HEADS = {"num_key_value_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "mlp_dim": 16, "output_channels": 16, "global_attn_indexes": [0], "depth": 1, "num_heads": 2,
}  # fmt: skip
# What some kinds need beside, or in place of it.
OWN: dict[str, dict] = {
    **dict.fromkeys(
        "axk1 deepseek_v2 deepseek_v3 dots3_note_text glm4_moe_lite minicpm3 sarvam_mla youtu".split(), HEADS
    ),
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "dory": {"sliding_window": 24},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3": {"vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "git": {"vision_config": VISION},
    "got_ocr2": {"vision_config": VISION},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "zero_expert_num": 2, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8},
    "phi4_multimodal": {
        "vision_config": VISION,
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 3,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 8},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": V,
        "shape_vocab_size": V,
    },
    "xlm": {"emb_dim": 32},
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid"], "num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 12},
    "zaya": {"num_experts_per_tok": 1},
}
FLOAT32 = ("xglm",)  # its own masks are of no other dtype
KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# They do not build small: parts for sounds, pictures or bytes of sizes of their own, heads for another model's states.
NOT_BUILT = "blt dots3_note gemma3n gemma4_assistant moss_transcribe_diarize musicgen musicgen_melody".split()


def small_config(model_type: str, **changes):
    """A config of a kind with the sizes above; `changes` go before them."""
    cls = CONFIG_MAPPING[model_type]
    names = inspect.signature(cls.__init__).parameters
    given = {name: value for name, value in SMALL.items() if name in names} | OWN.get(model_type, {}) | changes
    if "layer_types" in names and "layer_types" not in given:
        types = set(cls().layer_types or ())
        window = {"sliding_attention", "full_attention"}
        if types == window or (types <= window and names.keys() & {"use_sliding_window"}):
            given["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if "text_config" in names:
        inner = cls().get_text_config()
        if inner.model_type in CONFIG_MAPPING and inner.model_type != model_type:
            given["text_config"] = small_config(inner.model_type, **given.get("text_config", {}))
    return cls(**given)


def build(model_type: str, **changes):
    """A small random model of a kind in float64."""
    torch.manual_seed(0)
    config = small_config(model_type, **changes)
    text = config.get_text_config()
    if any("expert" in name for name in vars(text)):
        text._experts_implementation = "eager"  # torch's grouped product takes no float64
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    assert size <= LARGEST, f"{model_type} has {size} parameters: name its sizes in OWN"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Attention of a fresh model is nearly flat, and hides a wrong slot.
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.to(torch.float32 if model_type in FLOAT32 else torch.float64).eval()
