"""Tiny vision-language models, and images for them."""

import torch
import transformers as hf

from .models import COMMON, MIXED

IMAGE, WORDS = 60, 50  # the token that stands for a part of an image; ids below WORDS are text
VISION = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def llava():
    text, vision = hf.LlamaConfig(**COMMON), hf.CLIPVisionConfig(**VISION, hidden_size=16, projection_dim=16)
    config = hf.LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return hf.LlavaForConditionalGeneration, config


def gemma3():
    text = hf.Gemma3TextConfig(**COMMON | MIXED | {"head_dim": 8})
    vision = hf.SiglipVisionConfig(**VISION, hidden_size=16)
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE, boi_token_index=58,
        eoi_token_index=59,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration, config


def qwen2_vl():
    text = COMMON | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2}
    config = hf.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=59, vision_start_token_id=57,
        vision_end_token_id=58,
    )  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration, config


def made(kind):
    torch.manual_seed(0)
    cls, config = kind()
    model = cls(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def pixels(n):
    return torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
