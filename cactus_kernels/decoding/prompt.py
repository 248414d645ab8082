"""The prompt of a batch: its ids, and the mask that says where padding is."""

import torch

from .arguments import Arguments


def check_input_ids(arguments: Arguments) -> torch.Tensor:
    """The prompts, int64 [B, P] on the model's device. Raises TypeError or ValueError."""
    model, input_ids = arguments.model, arguments.input_ids
    if input_ids is None:
        input_ids = arguments.keywords.get("inputs")
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


def check_mask(arguments: Arguments, input_ids: torch.Tensor) -> torch.Tensor | None:
    """The mask int64 [B, P], 0 at padding; None where `generate` makes it. Raises ValueError if it contradicts the ids.

    input_ids: int64 [B, P].
    """
    mask = arguments.keywords.get("attention_mask")
    if mask is None:
        if not arguments.expanded:
            _check_padding(input_ids, arguments.setting("pad_token_id"), arguments.setting("eos_token_id"))
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


def _check_padding(input_ids, pad_token_id, eos_token_id):
    """Raises ValueError where `generate` would have to guess which tokens are padding."""
    if pad_token_id is None:
        return
    pads = input_ids == pad_token_id
    first, last = pads[:, 0].any(), pads[:, -1].any()
    if len(input_ids) > 1 and (last or (first and not pads[:, 0].all())):
        # A batch whose rows all begin with one token may mean it: some models have one id for padding and beginning.
        raise ValueError(f"rows begin or end with the padding id {pad_token_id}: pass attention_mask")
    # Where the padding id is no EOS, `generate` takes it for padding wherever it stands.
    text = pad_token_id in (eos_token_id if isinstance(eos_token_id, (list, tuple)) else (eos_token_id,))
    if not text and (last or (~pads[:, :-1] & pads[:, 1:]).any()):
        raise ValueError(f"the padding id {pad_token_id} stands inside or at the end of a row: pass attention_mask")
