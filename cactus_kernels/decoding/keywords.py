"""The keywords of `generate` that the loop takes, and those that it refuses before any work; docs/generate.md has them all."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch
from transformers import Cache

from .arguments import Arguments

NUM_ASSISTANT_TOKENS = 5  # unless the caller or a generation config says otherwise


class GenerateKeywords(TypedDict, total=False):
    """What `speculative_generate` takes beside its own parameters: the rows of docs/generate.md, with their types."""

    inputs: torch.Tensor | None
    attention_mask: torch.Tensor | None
    past_key_values: Cache | None
    cache: Cache | None
    prefill_chunk_size: int | None
    # Images for a vision-language target.
    pixel_values: torch.Tensor | None
    image_sizes: torch.Tensor | None
    pixel_mask: torch.Tensor | None
    pixel_attention_mask: torch.Tensor | None
    mm_encoder_outputs: Any
    # How long.
    max_length: int | None
    max_new_tokens: int | None
    min_length: int | None
    min_new_tokens: int | None
    max_time: float | None
    stop_strings: str | list[str] | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    # How tokens are chosen.
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    renormalize_logits: bool | None
    remove_invalid_values: bool | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_repetition_penalty: float | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    sequence_bias: Any
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    # What comes back.
    num_return_sequences: int | None
    return_dict_in_generate: bool | None
    output_scores: bool | None
    output_logits: bool | None
    # They change no token here.
    bos_token_id: int | None
    decoder_start_token_id: int | list[int] | None
    early_stopping: bool | str | None
    length_penalty: float | None
    max_cache_len: int | None
    cache_config: dict[str, Any] | None
    compile_config: Any
    disable_compile: bool | None
    continuous_batching_config: Any
    trust_remote_code: bool | None
    # They are refused but for these values.
    cache_implementation: Literal["dynamic", "static"] | None
    use_cache: Literal[True] | None
    inputs_embeds: None
    position_ids: None
    encoder_outputs: None
    logits_to_keep: None
    labels: None
    num_beams: Literal[1] | None
    num_beam_groups: Literal[1] | None
    diversity_penalty: Literal[0] | None
    constraints: Sequence[None] | None
    force_words_ids: Sequence[None] | None
    penalty_alpha: Literal[0] | None
    low_memory: Literal[False] | None
    dola_layers: None
    guidance_scale: Literal[1] | None
    watermarking_config: None
    token_healing: Literal[False] | None
    negative_prompt_ids: None
    negative_prompt_attention_mask: None
    output_attentions: Literal[False] | None
    output_hidden_states: Literal[False] | None
    synced_gpus: Literal[False] | None
    num_assistant_tokens_schedule: Literal["constant"] | None
    assistant_confidence_threshold: Literal[0] | None
    assistant_lookbehind: None
    target_lookbehind: None
    assistant_early_exit: None
    assistant_ensemble_weight: None
    use_mtp: Literal[False] | None
    speculation_type: None
    is_assistant: Literal[False] | None
    custom_generate: None


# Settings of `generate` that change what is generated in a way this loop does not follow: (refused if, what to do).
REFUSED = {
    "num_beams": (lambda v: v > 1, "beam search does not sample: use num_beams=1"),
    "num_beam_groups": (lambda v: v > 1, "beam search does not sample: leave it out"),
    "diversity_penalty": (lambda v: v != 0, "beam search does not sample: leave it out"),
    "constraints": (bool, "beam search does not sample: leave it out"),
    "force_words_ids": (bool, "beam search does not sample: leave it out"),
    "low_memory": (bool, "contrastive search does not sample: leave it out"),
    "penalty_alpha": (lambda v: v > 0, "contrastive search does not sample: leave penalty_alpha out"),
    "dola_layers": (bool, "DoLa decoding cannot be verified: leave it out"),
    "use_mtp": (bool, "heads of the target that predict several tokens are not drafted from: leave it out"),
    "speculation_type": (bool, "not offered: leave it out; an assistant_model or prompt_lookup_num_tokens drafts"),
    "assistant_early_exit": (bool, "not offered: leave it out, and pass assistant_model=skip_layers(model, ...)"),
    "assistant_ensemble_weight": (bool, "a draft mixed with the target is not offered: leave it out"),
    "is_assistant": (bool, "the loop is no assistant: leave it out"),
    "guidance_scale": (lambda v: v != 1, "classifier-free guidance runs the model itself: leave it out"),
    "watermarking_config": (bool, "a watermark is a law of its own: leave it out"),
    "output_attentions": (bool, "not offered: leave it out"),
    "output_hidden_states": (bool, "not offered: leave it out"),
    "use_cache": (lambda v: v is False, "speculative decoding needs the cache: leave use_cache out"),
    "token_healing": (bool, "not offered: leave it out"),
    "cache_implementation": (
        lambda v: v in ("quantized", "paged") or str(v).startswith("offloaded"),
        "a quantized, paged or offloaded cache cannot roll back here: leave it out",
    ),
}
# Keywords of `generate` that the loop would have to ignore.
NOT_TAKEN = (
    "inputs_embeds", "encoder_outputs", "custom_generate", "position_ids",
    "negative_prompt_ids", "negative_prompt_attention_mask", "labels", "logits_to_keep",
)  # fmt: skip
# Settings of transformers' own drafting: (what it fills in where nobody says, what asks for nothing that the loop does not do).
DRAFTING = {
    "num_assistant_tokens_schedule": ("constant", "constant"),
    "assistant_confidence_threshold": (0.4, 0),
    "assistant_lookbehind": (10, None),
    "target_lookbehind": (10, None),
}
FILLED_IN_NUM_ASSISTANT_TOKENS = 20  # by transformers, in the same way


def check_taken(arguments: Arguments) -> None:
    """Raises ValueError for keywords that the loop would have to ignore, and for settings of drafting wherever they stand."""
    for name in NOT_TAKEN:
        if arguments.keywords.get(name) is not None:
            advice = "pass the prompt as input_ids" if name.startswith("inputs") else "leave it out"
            raise ValueError(f"{name} is not taken by speculative_generate: {advice}")
    for name, (filled_in, taken) in DRAFTING.items():
        value = arguments.drafting(name, filled_in)
        if value is not None and value != taken:
            raise ValueError(
                f"{name}={value!r} is not followed: where you pass it, leave it out; where it stands in a model's "
                f"generation_config, pass {name}={taken!r}"
            )


def num_assistant_tokens_of(arguments: Arguments) -> Any:
    """Most drafts a round, as the call or a generation config says; not checked."""
    if arguments.num_assistant_tokens is not None:
        return arguments.num_assistant_tokens
    said = arguments.drafting("num_assistant_tokens", FILLED_IN_NUM_ASSISTANT_TOKENS)
    return NUM_ASSISTANT_TOKENS if said is None else said


def check_refused(arguments: Arguments) -> None:
    """Raises ValueError for settings, wherever they stand, that the loop does not follow."""
    for name, (refused, advice) in REFUSED.items():
        value = arguments.setting(name)
        if value is not None and refused(value):
            raise ValueError(f"{name}={value!r}: {advice}")
