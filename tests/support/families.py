"""Chat templates in the manner of the paper's families, written here in short form, and tiny models that have them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# name: (template, special tokens, BOS that the tokenizer itself puts first, EOS of the generation config)
FAMILIES = {
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, ["<|im_end|>", "<|endoftext|>"],
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", ["<eos>"],
    ),
    "deepseek-r1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ["<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"], "<|begin|>", ["<|end|>"],
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|begin_of_text|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
}  # fmt: skip
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    {"role": "user", "content": "Bye"},
]
RENDERED = {
    "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<think>\nhm\n</think>\n\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "deepseek-r1": "<|begin|><|User|>Hi<|Assistant|>\n\nHello<|end|><|User|>Bye<|Assistant|><think>\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\nhm\n</think>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}
END_OF_TURN = {"qwen3": "<|im_end|>", "gemma": "<end_of_turn>", "deepseek-r1": "<|end|>", "llama3": "<|eot_id|>"}


def tokenizer_of(family):
    template, special, bos, eos = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    names = {"bos_token": bos, "eos_token": eos[0], "extra_special_tokens": special}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, **{k: v for k, v in names.items() if v is not None}
    )


def save_checkpoints(root: Path) -> None:
    """Tiny random models on disk, each with the tokenizer and EOS of a family, in a directory of its name."""
    for family in FAMILIES:
        tokenizer = tokenizer_of(family)
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
            )
        )  # fmt: skip
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(FAMILIES[family][3])
        model.save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
