"""What each entry of a block attends to in a cache whose slots are positions + 1, in the form that attention takes it."""

import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # entries, and slots, of a block of flex attention


def visible_spans(positions: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last slot that each entry attends to, int64 [B, T] each.

    positions: int64 [B, T]. An entry at position t sees positions max(0, t - window + 1) .. t, hence itself; a padding
    entry (-1) sees slot 0 alone, so that its softmax is over something.
    """
    last = positions + 1
    first = torch.ones_like(last) if window is None else (last - window + 1).clamp(min=1)
    return torch.minimum(first, last), last


def visible_slots(positions: torch.Tensor, used: int, window: int | None) -> torch.Tensor:
    """Which slots each entry attends to, bool [B, 1, T, used]: those of `visible_spans`."""
    first, last = (slots[:, None, :, None] for slots in visible_spans(positions, window))
    slot = torch.arange(used, dtype=torch.int64, device=positions.device)
    visible = slot <= last
    visible &= slot >= first
    return visible


def block_mask(positions: torch.Tensor, used: int, window: int | None) -> BlockMask:
    """`visible_slots` as flex attention takes it: which blocks are seen in part, which as a whole, and a rule for the part."""
    T, device = positions.shape[1], positions.device
    # One tensor: torch 2.13 mistakes sizes for one another in C++ when a rule has more of them.
    spans = torch.stack(visible_spans(positions, window))

    def visible(b, h, entry, slot):
        zero = torch.zeros_like(b)  # torch 2.7 takes no plain number beside tensors here
        return (slot >= spans[zero, b, entry]) & (slot <= spans[zero + 1, b, entry])

    # A block more than needed, each way, since torch compiles sizes of 1 apart. Entries that are none do as the last one.
    entries = torch.arange((T + 2 * BLOCK - 1) // BLOCK * BLOCK, dtype=torch.int64, device=device)
    entries = entries.clamp(max=T - 1).view(-1, BLOCK)
    first, last = spans[:, :, None, entries, None]
    start = torch.arange(0, used + BLOCK, BLOCK, dtype=torch.int64, device=device)
    end = start + BLOCK - 1
    some = ((start <= last) & (end >= first)).any(3)
    whole = ((start >= first) & (end <= last)).all(3)
    count, blocks = _listed(some & ~whole)
    full_count, full_blocks = _listed(whole)
    return BlockMask.from_kv_blocks(
        count, blocks, full_count, full_blocks, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(T, used)
    )


def _listed(blocks):
    """Blocks bool [B, 1, entries, slots] as a `BlockMask` lists them, int32: how many a row has; the row's, these first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _boolean(visible, dtype):
    return visible


def _additive(visible, dtype):
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(visible.logical_not_(), torch.finfo(dtype).min)


MOST_KEPT = 65  # tokens of a round: longer blocks are prompts, which come once

# The form of mask that each attention implementation takes; None: a `BlockMask`.
MASKS = {"sdpa": _boolean, "eager": _additive, "flex_attention": None}


class Masks:
    """The attention masks of a model, made from positions."""

    def __init__(self, config, dtype: torch.dtype):
        """config: of the language model. dtype: of additive masks."""
        self.form = MASKS.get(config._attn_implementation)
        self.dtype = dtype
        self.windows = _windows(config)
        # Of the last tokens of one row, where they are one or more: how many, their start, masks.
        self.widest: dict[bool, tuple[int, int, dict[str, torch.Tensor]]] = {}

    def __call__(self, positions: torch.Tensor, used: int):
        """One mask [B, 1, T, used] if all layers see alike, else a dict of masks by layer type; each a tensor or a `BlockMask`.

        positions: int64 [B, T], -1 at padding entries. used: slots in use.
        """
        if self.form is None:
            return self._by_layer_type({n: block_mask(positions, used, w) for n, w in self.windows.items()})
        return self._by_layer_type(
            {n: self.form(visible_slots(positions, used, w), self.dtype) for n, w in self.windows.items()}
        )

    def of_last(self, count: int, start: int, capacity: int, device):
        """The same for the last `count` tokens of one row, the first at `start`: masks [1, 1, count, start + count].

        They are cut out of wider masks, for rows up to `capacity`, which serve until a row is longer: what a token sees
        depends on distances alone.
        """
        assert self.form is not None  # block masks are made from positions, of a row alone too
        known, widest, masks = self.widest.get(count == 1, (0, 0, {}))
        if known != count or widest < start:
            widest = start if count > MOST_KEPT else capacity
            positions = torch.arange(widest, widest + count, dtype=torch.int64, device=device)[None]
            used = widest + count + 1  # slot 0, which no token sees, is left out
            masks = {
                n: self.form(visible_slots(positions, used, w)[..., 1:], self.dtype) for n, w in self.windows.items()
            }
            if count <= MOST_KEPT:
                self.widest[count == 1] = count, widest, masks
        return self._by_layer_type({name: mask[..., widest - start :] for name, mask in masks.items()})

    def _by_layer_type(self, masks):
        # Not every model takes a dict, and those that do take a single mask as well: for all their layers.
        return masks if len(masks) > 1 else next(iter(masks.values()))


def is_flash(attention: str) -> bool:
    """Whether an attention implementation takes no mask but the padding of rows: flash attention 2 and later."""
    return "flash" in attention and not attention.startswith("paged")


def right_aligned(positions: torch.Tensor, seen: int):
    """Rows pushed to the right, as batches with left padding are: for attention that takes nothing but their padding.

    positions: int64 [B, T], -1 at padding entries. seen: the length of the longest row with the padding behind it, at least T.
    Returns:
        view: as `Slots.view`, giving [B, heads, seen, head_dim] with the call's own entries last.
        mask: bool [B, seen], False where a row has no token; None for one row, which has no padding.
        position_ids: int64 [B, T]; padding entries count on, since a row that starts anew would be taken for two texts
            in one.
    """
    B, T = positions.shape
    behind = torch.arange(T - 1, -1, -1, dtype=torch.int64, device=positions.device)
    last = (positions + behind).masked_fill(positions < 0, -1).amax(1, keepdim=True)  # where the last column would be
    position_ids = (last - behind).clamp(min=0)
    if B == 1:
        return (lambda states, new: states[:, :, 1 : seen + 1]), None, position_ids
    kept = last - torch.arange(seen - 1, -1, -1, dtype=torch.int64, device=positions.device)
    is_token = (kept >= 0) & (kept <= positions.amax(1, keepdim=True))
    slots = (kept + 1).masked_fill(~is_token, 0)[:, None, :, None]

    def view(states, new):
        index = slots.to(states.device)
        return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))

    return view, is_token, position_ids


def _windows(config) -> dict[str, int | None]:
    """The sliding window of each layer type of the model, None for full attention."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"]
    return {name: window if name == "sliding_attention" else None for name in dict.fromkeys(types)}
