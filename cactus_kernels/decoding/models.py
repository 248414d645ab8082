"""Whether a target and its draft can decode together."""

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .arguments import Arguments
from .cache.support import check_rollback

# Vocabularies of one tokenizer may be padded to different sizes, but not by more than this.
MAX_PADDING = 1024


def check_models(arguments: Arguments) -> None:
    """Raises TypeError or ValueError if the target, or its draft where there is no prompt lookup, cannot be run."""
    if arguments.assistant_model is None and not arguments.looks_up:
        raise ValueError("assistant_model is None: pass the draft model, or prompt_lookup_num_tokens")
    _check_model("model", arguments.model)
    if not arguments.looks_up:
        _check_model("assistant_model", arguments.assistant_model)
        _check_together(arguments)


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


def check_processes(arguments: Arguments) -> None:
    """One process decodes alone: where others hold parts of the model, each of its calls would wait for theirs."""
    if arguments.keywords.get("synced_gpus"):
        raise ValueError("synced_gpus=True is not offered: the loop runs on one process")
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = several and torch.distributed.get_world_size() > 1
    if several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(arguments.model)):
        raise ValueError(
            "the model's weights are shared out among processes (FSDP or DeepSpeed ZeRO 3): gather them first"
        )


def _check_model(name, model):
    if not hasattr(model, "config") or not hasattr(model, "generation_config"):
        raise TypeError(f"{name} must be a transformers causal LM, got {type(model).__name__}")
    check_rollback(model)


def _check_together(arguments):
    model, draft = arguments.model, arguments.assistant_model
    tokenizer, assistant_tokenizer = arguments.tokenizer, arguments.assistant_tokenizer
    if model.device != draft.device:
        raise ValueError(f"model is on {model.device} and assistant_model on {draft.device}: move one of them")
    if tokenizer is not None and assistant_tokenizer is not None:
        check_same_tokenizer(tokenizer, assistant_tokenizer)
        return
    sizes = [m.config.get_text_config().vocab_size for m in (model, draft)]
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        raise ValueError(
            f"the target has {sizes[0]} tokens and the draft {sizes[1]}: they must share a tokenizer (if they do, pass "
            "tokenizer= and assistant_tokenizer=, which are compared id by id)"
        )
