"""Per-row rollback of a Hugging Face KV cache.

After a round of speculative decoding every row of the batch keeps another number of tokens. Here the keys and values of
the token at position t of a row live in slot t + 1 of that row, whatever the other rows do, and slot 0 takes what
padding entries write. What a row attends to is made from the positions alone (`masks.py`), so what lies in the slots
past a row's end is never seen: rolling back is to write over.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .masks import Masks, is_flash, right_aligned
from .rotary import RotaryLengths
from .support import cache_keyword, check_rollback, to_call, without_wrapper

SMALLEST_CAPACITY = 64


class Slots:
    """Where the tokens of the current call go, and what a layer gives to attention; shared by the layers of a cache.

    index: int64 [B, 1, T, 1], slot of each entry. used: slots in use, slot 0 counted. capacity: slots to allocate.
    seen: entries that a layer gives to attention. past: of those, how many come before the call's own, for models that
        make their masks themselves.
    view: (keys or values [B, heads, capacity, head_dim], those of the call [B, heads, T, head_dim]) to what a layer gives.
    """

    index: torch.Tensor
    view: Callable[[torch.Tensor, torch.Tensor], Any]

    def __init__(self) -> None:
        self.used = self.capacity = 0
        self.seen = self.past = 0


class ScatterLayer(CacheLayerMixin):
    """Keys and values of one layer, each [B, heads, capacity, head_dim], written at `slots.index`."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: Slots):
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Writes the states of T new tokens, each [B, heads, T, head_dim]; returns what the call attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys.shape[2] < self.slots.capacity:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)
        index = self.slots.index.to(key_states.device)
        self.keys.scatter_(2, index.expand_as(key_states), key_states)
        self.values.scatter_(2, index.expand_as(value_states), value_states)
        return self.slots.view(self.keys, key_states), self.slots.view(self.values, value_states)

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, because a masked slot still counts with weight 0, and 0 times an uninitialized NaN is NaN.
        batch, heads, _, head_dim = states.shape
        return states.new_zeros(batch, heads, self.slots.capacity, head_dim)

    def _grown(self, buffer: torch.Tensor) -> torch.Tensor:
        grown = self._empty(buffer)
        grown[:, :, : buffer.shape[2]] = buffer
        return grown

    def get_seq_length(self) -> int:
        return self.slots.past

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        return self.slots.seen, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0


class RollbackModel:
    """A causal LM over a batch of rows, each of which can go back to an earlier position at no cost.

    A call may start a row at any position the row has reached, and forgets what the row had from there on.
    The caller's model, its config and its inputs are left as they are.
    """

    def __init__(
        self,
        model,
        batch_size: int,
        max_length: int,
        prefill_chunk_size: int | None = None,
        prompts: list[int] | None = None,
    ):
        """
        model: a `transformers` causal LM.
        batch_size: rows, B. max_length: most positions a row may reach; memory grows towards it as needed.
        prefill_chunk_size: most columns of a forward; a longer call takes several. None: no limit.
        prompts: tokens of each row's prompt, for frequencies that follow the length of what is read; None: each token's own.
        Raises ValueError where `check_rollback` does.
        """
        check_rollback(model)
        self.run = to_call(model)
        self.model = model = without_wrapper(model)
        self.batch_size = batch_size
        self.max_length = max_length
        self.chunk = prefill_chunk_size
        self.slots = Slots()
        # A class in transformers' own caches, and called as this one is.
        self.cache = Cache(layer_class_to_replicate=partial(ScatterLayer, self.slots))  # type: ignore[arg-type]
        self.cache_keyword = cache_keyword(model)
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        config = model.config.get_text_config()
        self.aligned = is_flash(config._attn_implementation)
        self.flex = config._attn_implementation == "flex_attention"
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        self.masks = Masks(config, dtype)
        self.rotary = RotaryLengths(model, torch.tensor(prompts or [0] * batch_size, dtype=torch.int64, device="cpu"))
        # 0, 1, 2, … where the tokens of a single row are
        self.counting = torch.empty(0, dtype=torch.int64, device="cpu")

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        *,
        length: int,
        behind: int = 0,
        logits_to_keep: int = 0,
        **inputs,
    ) -> torch.Tensor:
        """Logits of a block of T tokens a row, [B, T, V], or of its last `logits_to_keep` columns if that is not 0.

        input_ids: int64 [B, T]; what stands at padding entries is ignored.
        positions: int64 [B, T], ascending by 1, but -1 at padding entries, which come first or last in a row. A row may
            be padding only. Logits at padding entries are finite and mean nothing. None: one row without padding, whose
            tokens are the last ones of `length`.
        length: the largest position + 1, known on the host so that no device is waited for (but once, if a block may be
            a prompt without padding).
        behind: how much larger it would be, were the padding entries that come last in a row tokens.
        inputs: whatever else the model's forward takes.
        Raises ValueError if the shapes do not fit, or if `length` is not in 0 .. max_length.
        """
        shape = (1, input_ids.shape[-1]) if positions is None else positions.shape
        if input_ids.shape != shape or input_ids.dim() != 2 or input_ids.shape[0] != self.batch_size:
            raise ValueError(
                f"input_ids {tuple(input_ids.shape)} and positions {tuple(shape)} must both be [{self.batch_size}, T]"
            )
        if not 0 <= length <= self.max_length:
            raise ValueError(f"length is {length}, not in 0 .. {self.max_length}: make max_length larger")
        T = input_ids.shape[1]
        if self.chunk is None or T <= self.chunk:
            return self._forward(input_ids, positions, length, behind, logits_to_keep or T, inputs)
        keep, chunk, logits = logits_to_keep or T, self.chunk, []
        for start in range(0, T, chunk):
            end = min(start + chunk, T)
            wanted = end - max(start, T - keep)
            # Columns ascend by 1, so that those before `end` reach no further than this.
            reach = max(length + behind - (T - end), 0)
            within = min(reach, length)
            at = None if positions is None else positions[:, start:end]
            piece = self._forward(input_ids[:, start:end], at, within, reach - within, max(wanted, 1), inputs)
            if wanted > 0:
                logits.append(piece)
        return torch.cat(logits, 1)

    def _forward(self, input_ids, positions, length, behind, logits_to_keep, inputs):
        if positions is None and self.flex:
            start = length - input_ids.shape[1]
            positions = torch.arange(start, length, dtype=torch.int64, device=input_ids.device)[None]
        if positions is None:
            mask, position_ids = self._place_last(input_ids.shape[1], length, input_ids.device)
        else:
            mask, position_ids = self._place_rows(positions, length, behind)
            input_ids = input_ids.masked_fill(positions < 0, 0)
        keywords = {self.cache_keyword: self.cache, **inputs}
        if self.keeps_logits:
            keywords["logits_to_keep"] = logits_to_keep
        with self.rotary.by_token(length):
            logits = self.run(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=True,
                return_dict=True,
                **keywords,
            ).logits
        return logits if self.keeps_logits else logits[:, -logits_to_keep:]

    def _place_rows(self, positions, length, behind):
        """Where the tokens of a call go and what they see: the mask and position_ids int64 [B, T]; the rest is in the slots."""
        slots, T = self.slots, positions.shape[1]
        self._place(positions, length)
        position_ids = positions.clamp(min=0)
        # Flex attention needs a mask in any case, and would be compiled once more for one that the model makes.
        own = torch.arange(T, dtype=torch.int64, device=positions.device)
        if not self.flex and length == T and bool((positions == own).all()):
            self._see_own(T)
            return None, position_ids
        if self.aligned:
            slots.seen = max(length + behind, T)
            slots.past = slots.seen - T
            slots.view, mask, position_ids = right_aligned(positions, slots.seen)
            return mask, position_ids
        # Models ask for a length to number positions and to make masks. Both are passed to them.
        slots.seen, slots.past, used = slots.used, 0, slots.used
        slots.view = lambda states, new: states[:, :, :used]
        return self.masks(positions, slots.used), position_ids

    def _place_last(self, T, length, device):
        """The same for the last T tokens of one row, whose places are known without a look at the device."""
        slots, start = self.slots, length - T
        self._reserve(length)
        if len(self.counting) < slots.capacity:
            self.counting = torch.arange(slots.capacity, dtype=torch.int64, device=device)
        slots.index = self.counting[None, None, start + 1 : length + 1, None]
        position_ids = self.counting[None, start:length]
        if start == 0:
            self._see_own(T)
            return None, position_ids
        slots.seen, slots.past = length, start
        slots.view = lambda states, new: states[:, :, 1 : length + 1]
        return None if self.aligned else self.masks.of_last(T, start, slots.capacity, device), position_ids

    def _see_own(self, T):
        # A prompt without padding: the model's own causal masks will do, or the kernels that need none.
        slots = self.slots
        slots.seen, slots.past, slots.view = T, 0, lambda states, new: new

    def _place(self, positions, length):
        self._reserve(length)
        self.slots.index = (positions + 1)[:, None, :, None]

    def _reserve(self, length):
        slots = self.slots
        slots.used = length + 1
        if slots.used > slots.capacity:
            slots.capacity = min(max(SMALLEST_CAPACITY, 2 * slots.used), self.max_length + 1)

    @property
    def layers(self) -> list[ScatterLayer]:
        """Of the cache; none before the first call."""
        return cast(list[ScatterLayer], self.cache.layers)

    def load(self, layer: int, positions, keys: torch.Tensor, values: torch.Tensor, *, length: int) -> None:
        """Set a layer's keys and values, each [B, heads, n, head_dim], at positions int64 [B, n], all below `length`."""
        self._place(positions, length)
        self.slots.view = lambda states, new: None
        self.cache.update(keys, values, layer)

    def unload(self, layer: int, positions) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's keys and values at positions int64 [B, n], anything where they are -1; the layer keeps nothing."""
        buffers, index = self.layers[layer], (positions + 1)[:, None, :, None]
        keys, values = (
            x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (buffers.keys, buffers.values)
        )
        buffers.keys = buffers.values = keys.new_empty(0)
        return keys, values
