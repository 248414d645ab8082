"""A conversation's cache as `generate` keeps it, read into a `RollbackModel` and made from one.

There the token in column c of the left-padded batch stands in slot c, here in slot position + 1. So a cache that the
caller brings is copied once before decoding and once after it, whatever the number of rounds.
"""

from collections.abc import Iterator

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput

# What `generate` calls the cache: in its keywords and in what it returns.
CACHE_NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


def check_cache(cache, rows: int, columns: int) -> None:
    """Raises TypeError or ValueError if a cache of the caller's is not one to continue from.

    rows: of the batch, after `num_return_sequences`. columns: of input_ids, which hold the whole text.
    """
    if not isinstance(cache, DynamicCache):
        raise TypeError(
            f"the cache must be a DynamicCache, got {type(cache).__name__}: leave it out, or bring such a one"
        )
    kinds = {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if cache.offloading or kinds:
        what = "offloaded" if cache.offloading else ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"the cache is not a plain DynamicCache ({what}): make it with DynamicCache(config=model.config)"
        )
    cached = cache.get_seq_length()
    if cached >= columns:
        raise ValueError(
            f"the cache holds {cached} tokens and input_ids {columns}: input_ids must hold the whole text, and more than "
            "is cached"
        )
    held = {keys.shape[0] for keys in _keys(cache)} - {rows}
    if held:
        raise ValueError(f"the cache has {held.pop()} rows for {rows} rows of the batch: bring one with a row for each")


def brought(prepared: dict):
    """The cache among the keywords that `generate` prepared, if it is the caller's and not its own empty one."""
    cache = prepared.get(CACHE_NAME)
    own = cache is None or not (getattr(cache, "_is_user_defined", False) or cache.get_seq_length())
    return None if own else cache


def take(model, cache, padding: list[int]) -> int:
    """Copy a cache into a `RollbackModel`; returns how many tokens of the longest row it holds.

    padding: how many columns each row has at its left.
    """
    cached = cache.get_seq_length()
    length = cached - min(padding)
    if length <= 0:
        return 0
    for i, layer in enumerate(cache.layers):
        if not _holds(layer):
            continue
        # A layer with a sliding window holds the last columns only.
        held = torch.arange(cached - layer.keys.shape[2], cached, dtype=torch.int64, device=layer.keys.device)
        positions = held - torch.tensor(padding, dtype=torch.int64, device=held.device)[:, None]
        model.load(i, positions.clamp(min=-1), layer.keys, layer.values, length=length)
    return length


def give(model, cache, padding: list[int], columns: int):
    """Make a cache of `generate`'s from a `RollbackModel`, which has no more use after it.

    cache: what `generate` prepared or the caller brought, filled in place if it is a `DynamicCache`.
    padding: as in `take`. columns: how many the cache shall hold; every row must have come as far.
    """
    if not model.layers:
        return cache  # a model without attention
    if not isinstance(cache, DynamicCache):
        cache = DynamicCache(config=model.model.config)
    filled = DynamicCache(config=model.model.config)
    for i, layer in enumerate(model.layers):
        if not _holds(layer):
            continue  # it shares another's keys and values
        positions = torch.arange(columns, dtype=torch.int64, device=layer.keys.device)
        positions = positions - torch.tensor(padding, dtype=torch.int64, device=positions.device)[:, None]
        filled.update(*model.unload(i, positions.clamp(min=-1)), i)
    cache.layers = filled.layers
    return cache


def _keys(cache) -> Iterator[torch.Tensor]:
    return (layer.keys for layer in cache.layers if _holds(layer))


def _holds(layer) -> bool:
    return layer.is_initialized and layer.keys.numel() > 0
