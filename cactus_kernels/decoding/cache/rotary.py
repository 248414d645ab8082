"""Rotary positions whose frequencies follow the length of the text: dynamic scaling and longrope of transformers.

A model takes the frequencies of a forward pass from its largest position, for all rows and tokens alike. In plain `generate` of
one row that is the prompt's last position while the prompt is read, and each later token's own. Here a pass reads several tokens
of rows of several lengths, so each token is given what it would have there.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

# Models that read the whole text again, by the other frequencies, once it comes past `switch_length` (read in their sources).
READS_AGAIN = ("phi3", "phimoe", "phi4_multimodal")


def switch_length(model) -> int | None:
    """Tokens up to which a model keeps one set of keys, that has to be made anew beyond them; None: it keeps them all."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in READS_AGAIN or rope.get("rope_type") != "longrope":
        return None
    return rope["original_max_position_embeddings"]


class RotaryLengths:
    """What a model's rotary modules make of each token, where its text's length matters.

    Attributes:
        read: int64 [B], the least length that each row's tokens are read at: that of its prompt.
    """

    def __init__(self, model, read: torch.Tensor):
        self.read = read
        self.modules = [(m, kinds) for m in model.modules() if (kinds := _kinds(m))]

    @contextmanager
    def by_token(self, length: int) -> Iterator[None]:
        """Within it forward passes of the model go by each token's own length. length: of the longest text."""
        hooks = [
            module.register_forward_hook(self._rows, with_kwargs=True)
            for module, kinds in self.modules
            if length > min(_first(module, layer) for layer in kinds)
        ]
        try:
            # A model that was compiled without these hooks may run on without them.
            with torch.compiler.set_stance("force_eager") if hooks else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _rows(self, module, args, kwargs, output):
        """Cosines and sines [B, T, D] each, in place of those of the largest position."""
        given: dict[str, Any] = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        x, positions = given.pop("x"), given.pop("position_ids")
        layer = given.get("layer_type")
        if layer not in _kinds(module):
            return output
        first = _first(module, layer)
        lengths = torch.maximum(positions + 1, self.read.to(positions.device)[:, None]).clamp(min=first)
        if _kinds(module)[layer] == "longrope":
            lengths = lengths.clamp(max=first + 1)
        made = [torch.empty_like(part) for part in output]
        for length in lengths.unique().tolist():
            at = lengths == length
            _forget(module, layer)
            # The largest position says how long the text is.
            each = module.forward(x, torch.cat([positions[at], positions.new_tensor([length - 1])])[None], **given)
            for whole, part in zip(made, each, strict=True):
                whole[at] = part[0, :-1]
        _forget(module, layer)
        return tuple(made)


def _forget(module, layer) -> None:
    """Back to a rotary module's first frequencies: it keeps those of the longest text so far."""
    prefix = "" if layer is None else f"{layer}_"
    module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone(), persistent=False)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _kinds(module) -> dict[str | None, str]:
    """The kinds of frequencies of a rotary module that follow the length, by layer type; None: of all layers."""
    if not hasattr(module, "rope_type"):
        return {}
    kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    return {layer: kind for layer, kind in kinds.items() if kind == "longrope" or "dynamic" in kind}


def _first(module, layer) -> int:
    """The longest text that a rotary module reads by its first frequencies."""
    if _kinds(module)[layer] != "longrope":
        return module.original_max_seq_len
    rope = module.config.rope_parameters
    return (rope if layer is None else rope[layer])["original_max_position_embeddings"]
