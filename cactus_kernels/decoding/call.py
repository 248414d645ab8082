"""What `speculative_generate` refuses, before any work is done."""

from dataclasses import dataclass

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .. import philox
from ..inputs import MAX_DRAFT_TOKENS, check_budget
from ..rules import Rule, resolve_rule
from ..sampling import Sampling
from .cache.handover import CACHE_NAME, check_cache
from .cache.rollback import CACHE_KEYWORDS, check_rollback
from .images import IMAGE_INPUTS, check_images

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
    "use_mtp": (bool, "heads of the target that predict several tokens are not drafted from: pass an assistant_model"),
    "speculation_type": (bool, "not offered: pass an assistant_model or prompt_lookup_num_tokens"),
    "assistant_early_exit": (bool, "not offered: pass assistant_model=skip_layers(model, ...)"),
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
    "assistant_confidence_threshold", "num_assistant_tokens_schedule", "assistant_lookbehind", "target_lookbehind",
)  # fmt: skip
# Settings of transformers' own drafting, with the values that it fills in where they are not set.
DRAFTING = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}
# What `generate` prepares for a model's forward pass, and the loop makes itself.
PREPARED = ("position_ids", "cache_position", "logits_to_keep", "use_cache", *CACHE_KEYWORDS)
NUM_ASSISTANT_TOKENS = 5  # unless the caller says otherwise
# Vocabularies of one tokenizer may be padded to different sizes, but not by more than this.
MAX_PADDING = 1024


@dataclass
class Request:
    """A checked call. `input_ids` int64 [B, P] on the model's device; `kwargs` go to `generate` as they are.

    num_assistant_tokens: most drafts a round of each row, a list. max_ngram_size: of prompt lookup, None with a draft model.
    continues: whether the caller brought a cache.
    """

    input_ids: torch.Tensor
    rule: Rule
    budget: torch.Tensor | None  # float64 [B], on the model's device
    num_assistant_tokens: list[int]
    max_ngram_size: int | None
    draft_temperature: float | None
    seed: int | torch.Tensor
    stopping_criteria: StoppingCriteriaList
    kwargs: dict
    continues: bool
    prefill_chunk_size: int | None

    def seeds(self, batch_size: int) -> torch.Tensor:
        """The seed of every row, int64 [B]."""
        if isinstance(self.seed, int):
            return philox.request_seeds(self.seed, batch_size, self.input_ids.device)
        if len(self.seed) != batch_size:
            raise ValueError(f"seed has {len(self.seed)} entries for {batch_size} rows: give one a row, or an int")
        return self.seed.to(self.input_ids.device)


def check_request(
    model, input_ids, assistant_model, rule, budget, num_assistant_tokens, draft_temperature, seed, generation_config,
    logits_processor, stopping_criteria, streamer, tokenizer, assistant_tokenizer, kwargs, expanded=False,
) -> Request:  # fmt: skip
    """Check the arguments of `speculative_generate`, which documents them. Raises TypeError or ValueError.

    expanded: whether `generate` has repeated the rows already, and made the mask.
    """
    rule = resolve_rule(rule)
    kwargs = dict(kwargs)

    def setting(name):
        """What `generate` will go by: its keyword, else the config passed, else the model's own."""
        if name in kwargs:
            return kwargs[name]
        value = getattr(generation_config, name, None)
        own = getattr(model, "generation_config", None)
        return getattr(own, name, None) if value is None else value

    if draft_temperature is not None:
        _check_draft_temperature(draft_temperature, setting)
    inputs = kwargs.pop("inputs", None)
    if inputs is not None and input_ids is not None:
        raise ValueError("inputs and input_ids are both given: leave one out")
    input_ids = inputs if input_ids is None else input_ids
    for name, filled_in in DRAFTING.items():
        value = getattr(generation_config, name, None)
        if value not in (None, filled_in):
            advice = "pass it as a keyword" if name == "num_assistant_tokens" else "leave it out"
            raise ValueError(f"{name}={value!r} in the generation_config is not gone by: {advice}")
    for name in NOT_TAKEN:
        if kwargs.get(name) is not None:
            advice = "pass the prompt as input_ids" if name.startswith("inputs") else "leave it out"
            raise ValueError(f"{name} is not taken by speculative_generate: {advice}")
    for name, value in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
        if value is not None and not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list, got {type(value).__name__}: wrap it in a list")
    max_ngram_size = None
    lookup = setting("prompt_lookup_num_tokens")
    if lookup is not None:
        if assistant_model is not None:
            raise ValueError("prompt_lookup_num_tokens and assistant_model are both given: leave one out")
        if num_assistant_tokens != NUM_ASSISTANT_TOKENS:
            raise ValueError("prompt_lookup_num_tokens and num_assistant_tokens are both given: leave the latter out")
        num_assistant_tokens, max_ngram_size = lookup, setting("max_matching_ngram_size") or 2
        kwargs["prompt_lookup_num_tokens"] = None  # `generate` would see to it itself, and refuse what it cannot do
        _check_count("prompt_lookup_num_tokens", lookup)
        _check_count("max_matching_ngram_size", max_ngram_size, largest=None)
    _check_models(model, assistant_model, lookup is not None, tokenizer, assistant_tokenizer)
    input_ids = _check_input_ids(model, input_ids)
    for name, (refused, advice) in REFUSED.items():
        value = setting(name)
        if value is not None and refused(value):
            raise ValueError(f"{name}={value!r}: {advice}")
    _check_processes(model, kwargs.pop("synced_gpus", None))

    rows = len(input_ids) * (1 if expanded else setting("num_return_sequences") or 1)
    chunk = setting("prefill_chunk_size")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"prefill_chunk_size must be a positive int, got {chunk!r}")
    check_images(model, input_ids, kwargs, chunk)
    caches = [cache for cache in (kwargs.pop(name, None) for name in CACHE_KEYWORDS) if cache is not None]
    for cache in caches:
        check_cache(cache, rows, input_ids.shape[1])
        kwargs[CACHE_NAME] = cache
    pad_token_id, eos_token_id = setting("pad_token_id"), setting("eos_token_id")
    if not expanded or kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = _check_mask(input_ids, kwargs.get("attention_mask"), pad_token_id, eos_token_id)
    criteria = StoppingCriteriaList(stopping_criteria or [])
    stop_strings = setting("stop_strings")
    if stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer: pass tokenizer=")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stop_strings"] = None  # `generate` has no way to give the tokenizer to a custom loop
    ends_early = len(criteria) or setting("max_time")
    if rows > 1 and pad_token_id is None and eos_token_id is None and ends_early:
        raise ValueError("rows that end at different lengths need padding: pass pad_token_id")
    _check_streamer(streamer, rows)
    _check_strengths(rule, rows, model.device)
    counts = _check_drafts(num_assistant_tokens, rows)
    budget = _check_budget(budget, rule, rows, model.device)
    seed = _check_seed(seed, rows)
    return Request(
        input_ids, rule, budget, counts, max_ngram_size, draft_temperature, seed, criteria, kwargs, caches != [], chunk
    )


def check_prepared(input_ids, attention_mask, model_kwargs) -> None:
    """Raises ValueError for inputs of the model that `generate` has prepared and the loop would have to ignore.

    input_ids: int64 [B, P]. attention_mask: [B, P], or None for all ones, as it comes from `generate`.
    """
    for name, value in model_kwargs.items():
        if value is not None and name not in (*PREPARED, *IMAGE_INPUTS):
            raise ValueError(f"{name} is not taken by the decoding loop: leave it out")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # Models that number images in directions of their own have as many sheets [S, B, P], all alike for text.
        if positions.shape[-2:] != mask.shape or ((positions != mask.cumsum(1) - 1) & (mask != 0)).any():
            raise ValueError("position_ids are not those of the mask, and are not taken: leave them out")


def check_same_tokenizer(tokenizer, assistant_tokenizer) -> None:
    """Raises ValueError if two tokenizers give a token different ids; padding of the vocabulary does not matter."""
    mine, other = tokenizer.get_vocab(), assistant_tokenizer.get_vocab()
    if mine == other:
        return
    different = [t for t in mine.keys() | other.keys() if mine.get(t) != other.get(t)]
    token = min(different)
    raise ValueError(
        f"the draft has another tokenizer: {len(different)} tokens differ, among them {token!r} with id "
        f"{mine.get(token)} in the target's and {other.get(token)} in the draft's: use a draft of the same family"
    )


def _check_input_ids(model, input_ids):
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids must be an int64 tensor [B, P], got {type(input_ids).__name__}")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must have shape [B, P], got {tuple(input_ids.shape)}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids are empty, shape {tuple(input_ids.shape)}: give at least one token a row")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids must be int64, got {input_ids.dtype}")
    vocab_size = model.config.get_text_config().vocab_size
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids must be in 0 .. {vocab_size - 1}, got {low if low < 0 else high}: another tokenizer?"
        )
    return input_ids.to(model.device, torch.int64)


def _check_draft_temperature(draft_temperature, setting):
    if isinstance(draft_temperature, torch.Tensor):
        raise TypeError("draft_temperature must be a number, one for all rows, got a tensor")
    Sampling(draft_temperature)  # checks it
    if not setting("do_sample"):
        raise ValueError("draft_temperature is for sampled drafts: pass do_sample=True, or leave it out")
    if setting("prompt_lookup_num_tokens") is not None:
        raise ValueError("draft_temperature is for a draft model, and prompt lookup has none: leave it out")


def _check_streamer(streamer, rows):
    if isinstance(streamer, (list, tuple)):
        if len(streamer) != rows:
            raise ValueError(f"streamer has {len(streamer)} entries for {rows} rows: give one a row")
    elif streamer is not None and rows > 1:
        raise ValueError(f"a streamer takes one row, got {rows}: pass a list with one a row, or leave it out")


def _check_strengths(rule, rows, device):
    for strength in rule.strengths:
        if not isinstance(strength, torch.Tensor):
            continue
        if len(strength) != rows:
            raise ValueError(f"{rule.name} has {len(strength)} strengths for {rows} rows: give one a row, or a number")
        if strength.device != device:
            raise ValueError(f"the strengths are on {strength.device} and the model on {device}: move them")
        if not (strength.isfinite() & (strength >= 0)).all():
            raise ValueError(f"strengths must be finite and at least 0, got {strength.tolist()}")


def _check_count(name, value, smallest=1, largest=MAX_DRAFT_TOKENS):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < smallest or (largest is not None and value > largest):
        bounds = f"at least {smallest}" if largest is None else f"in {smallest} .. {largest}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def _check_drafts(num_assistant_tokens, rows):
    """Most drafts a round of each row, a list."""
    if not isinstance(num_assistant_tokens, (list, tuple)):
        _check_count("num_assistant_tokens", num_assistant_tokens)
        return [num_assistant_tokens] * rows
    if len(num_assistant_tokens) != rows:
        raise ValueError(
            f"num_assistant_tokens has {len(num_assistant_tokens)} entries for {rows} rows: give one a row, or an int"
        )
    for value in num_assistant_tokens:
        _check_count("num_assistant_tokens", value, smallest=0)
    return list(num_assistant_tokens)


def _check_processes(model, synced_gpus):
    """One process decodes alone: where others hold parts of the model, each of its calls would wait for theirs."""
    if synced_gpus:
        raise ValueError("synced_gpus=True is not offered: the loop runs on one process")
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = several and torch.distributed.get_world_size() > 1
    if several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        raise ValueError(
            "the model's weights are shared out among processes (FSDP or DeepSpeed ZeRO 3): gather them first"
        )


def _check_models(model, assistant_model, lookup, tokenizer, assistant_tokenizer):
    models = {"model": model} | ({} if lookup else {"assistant_model": assistant_model})
    if not lookup and assistant_model is None:
        raise ValueError("assistant_model is None: pass the draft model, or prompt_lookup_num_tokens")
    for name, m in models.items():
        if not hasattr(m, "config") or not hasattr(m, "generation_config"):
            raise TypeError(f"{name} must be a transformers causal LM, got {type(m).__name__}")
        check_rollback(m)
    if lookup:
        return
    if model.device != assistant_model.device:
        raise ValueError(
            f"model is on {model.device} and assistant_model on {assistant_model.device}: move one of them"
        )
    if tokenizer is not None and assistant_tokenizer is not None:
        check_same_tokenizer(tokenizer, assistant_tokenizer)
        return
    sizes = [m.config.get_text_config().vocab_size for m in (model, assistant_model)]
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        raise ValueError(
            f"the target has {sizes[0]} tokens and the draft {sizes[1]}: they must share a tokenizer (if they do, pass "
            "tokenizer= and assistant_tokenizer=, which are compared id by id)"
        )


def _check_mask(input_ids, mask, pad_token_id, eos_token_id):
    if mask is None:
        if pad_token_id is None:
            return None
        pads = input_ids == pad_token_id
        first, last = pads[:, 0].any(), pads[:, -1].any()
        if len(input_ids) > 1 and (last or (first and not pads[:, 0].all())):
            # A batch whose rows all begin with one token may mean it: some models have one id for padding and beginning.
            raise ValueError(f"rows begin or end with the padding id {pad_token_id}: pass attention_mask")
        # Where the padding id is no EOS, `generate` takes it for padding wherever it stands.
        text = pad_token_id in (eos_token_id if isinstance(eos_token_id, (list, tuple)) else (eos_token_id,))
        if not text and (last or (~pads[:, :-1] & pads[:, 1:]).any()):
            raise ValueError(f"the padding id {pad_token_id} stands inside or at the end of a row: pass attention_mask")
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got {shape}")
    mask = mask.to(input_ids.device).long()
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold 0 and 1")
    if not mask[:, -1].all() or (mask.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask has padding at the right of a row or inside it: use tokenizer.padding_side='left'"
        )
    return mask


def _check_budget(budget, rule, rows, device):
    if budget is None:
        return None
    values = budget.tolist() if isinstance(budget, torch.Tensor) else budget
    values = list(values) if isinstance(values, (list, tuple)) else [values] * rows
    if any(isinstance(b, bool) or not isinstance(b, (int, float)) for b in values):
        raise TypeError(f"budget must be a number of nats, a list with one a row or None, got {budget!r}")
    if not all(0 <= b < float("inf") for b in values):
        raise ValueError(f"a budget must be finite and at least 0 nats (0 is lossless), got {budget}")
    if len(values) != rows:
        raise ValueError(f"budget has {len(values)} entries for {rows} rows: give one a row, or a number")
    check_budget(rule)
    return torch.tensor(values, dtype=torch.float64, device=device)


def _check_seed(seed, rows):
    if seed is None:
        return int(torch.randint(-(2**63), 2**63 - 1, ()))
    if isinstance(seed, bool) or not isinstance(seed, (int, list, tuple, torch.Tensor)):
        raise TypeError(f"seed must be an int, a list of ints or None, got {type(seed).__name__}")
    values = [seed] if isinstance(seed, int) else seed.tolist() if isinstance(seed, torch.Tensor) else list(seed)
    if not isinstance(values, list) or any(isinstance(s, bool) or not isinstance(s, int) for s in values):
        raise TypeError(f"seed must hold ints, got {seed!r}")
    if any(not -(2**63) <= s < 2**63 for s in values):
        raise ValueError(f"a seed must fit in 64 bits, got {seed}")
    if isinstance(seed, int):
        return seed
    if len(values) != rows:
        raise ValueError(f"seed has {len(values)} entries for {rows} rows: give one a row, or an int")
    return torch.tensor(values, dtype=torch.int64)
