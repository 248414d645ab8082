"""A draft that is the target with layers skipped."""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch

from ..cache.support import is_compiled

Model = TypeVar("Model", bound=torch.nn.Module)


def skip_layers(model: Model, layers: Iterable[int]) -> Model:
    """A draft that is the model without some of its layers, and shares all weights with it: no parameter is copied.

    Args:
        model: a decoder-only `transformers` causal LM.
        layers: ids of the layers to leave out, 0 .. num_hidden_layers - 1, at least one and not all.

    Returns:
        A model of the same class, to be passed as `assistant_model`. The one given is left as it is; changes of its
        weights show in both. Of a model that `torch.compile` made, the draft is one of the model inside, not compiled.

    Raises:
        TypeError, ValueError: the ids are no such layers, or the model's layers cannot be found or left out.
    """
    if is_compiled(model):
        return skip_layers(cast(Model, model._orig_mod), layers)
    config: Any = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    count = text_config.num_hidden_layers
    if isinstance(layers, int):
        raise TypeError(f"layers must hold ids of layers, such as [3, 4], got {layers}")
    skipped = set(layers)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in skipped):
        raise TypeError(f"layers must hold ints, got {layers!r}")
    if not skipped or not all(0 <= i < count for i in skipped) or len(skipped) == count:
        raise ValueError(f"layers must name some of 0 .. {count - 1}, not all, got {sorted(skipped)}")
    stacks = [n for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ValueError(f"{type(model).__name__} has {len(stacks)} lists of {count} layers, and must have one")
    kept = [i for i in range(count) if i not in skipped]
    text_config.num_hidden_layers = len(kept)
    if getattr(text_config, "layer_types", None) is not None:
        text_config.layer_types = [text_config.layer_types[i] for i in kept]

    draft = module = _shallow(model)
    for name in stacks[0].split(".")[:-1]:
        module._modules[name] = module = _shallow(module._modules[name])
    name = stacks[0].split(".")[-1]
    module._modules[name] = torch.nn.ModuleList(module._modules[name][i] for i in kept)
    for owner in (draft, module):
        owner.config = config if owner is draft else text_config
    return draft


def _shallow(module):
    """The same module with a list of parts of its own."""
    if "forward" in vars(module):
        raise ValueError(
            f"{type(module).__name__}.forward was replaced (by hooks that move weights?): skip_layers needs it"
        )
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
