"""The rows of a batch while they are decoded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..contract import VerifyOutput
from .stopping import Stopping


@dataclass(frozen=True)
class Emitted:
    """What a row got in a round.

    Attributes:
        token_ids: a list; empty for a row that had ended before.
        accepted: how many of them were drafted, of `drafted` ones; those after the row's end do not count.
        ended: whether the row ends with them.
    """

    token_ids: list[int]
    accepted: int
    drafted: int
    ended: bool


class Batch:
    """The rows' texts without padding, and how far each has come.

    Attributes:
        padding: columns at the left of each row as it came (a list).
        text: int64 [B, L]; row b holds its prompt and tokens in text[b, : length[b]], drafts beyond.
        length: tokens of each row (a list; `lengths` is the same on the device).
        remaining: tokens each row may still emit, 0 once it has ended.
        drafts: drafts of each row in this round, at most its number of assistant tokens (`num_drafts` on the device).
    """

    def __init__(self, input_ids, attention_mask, new_tokens, num_assistant_tokens, prefill_chunk_size=None):
        """
        num_assistant_tokens: a list with the most drafts a round of each row.
        prefill_chunk_size: most columns of a forward pass over the batch, None: no limit.
        """
        self.size, P = input_ids.shape
        self.device = input_ids.device
        self.padding = [0] * self.size if attention_mask is None else (attention_mask == 0).sum(1).tolist()
        self.prompts = [row[pad:] for row, pad in zip(input_ids, self.padding, strict=True)]
        self.num_assistant_tokens = num_assistant_tokens
        self.prefill_chunk_size = prefill_chunk_size
        self.length = [P - pad for pad in self.padding]
        self.max_length = max(self.length) + new_tokens
        self.remaining = [new_tokens] * self.size
        self.emitted: list[list[int]] = [[] for _ in range(self.size)]
        self.text = torch.zeros(
            (self.size, self.max_length + max(num_assistant_tokens)), dtype=torch.int64, device=self.device
        )
        for row, prompt in zip(self.text, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        self._next_round()

    @property
    def active(self) -> bool:
        return any(self.remaining)

    def _next_round(self):
        self.lengths = torch.tensor(self.length, dtype=torch.int64, device=self.device)
        self.is_active = torch.tensor([r > 0 for r in self.remaining], dtype=torch.bool, device=self.device)
        # A row that may emit r more tokens has use for r - 1 drafts: the last one is recovered or the bonus.
        self.plan([min(n, max(r - 1, 0)) for n, r in zip(self.num_assistant_tokens, self.remaining, strict=True)])

    def plan(self, drafts: list[int]) -> None:
        """Set the number of drafts of each row in this round: a drafter may have fewer than it may give."""
        self.drafts = drafts
        self.num_drafts = torch.tensor(drafts, dtype=torch.int64, device=self.device)

    def write(self, token_ids: torch.Tensor, first: int = 0) -> None:
        """Put drafts int64 [B, k] behind each row's text, its draft `first` and those after it."""
        k = token_ids.shape[1]
        columns = self.lengths[:, None] + (
            first if k == 1 else torch.arange(first, first + k, dtype=torch.int64, device=self.device)
        )
        self.text.scatter_(1, columns, token_ids)

    def block(self, before: int, after: int):
        """Tokens and positions, int64 [B, before + after] each: the last `before` of each row's text and `after` drafts.

        Positions are -1 where a row has no such token, as all of a row that has ended. Of one row there are only tokens that
        it has, and None for their positions: they are its last ones.
        """
        if self.size == 1:
            length = self.length[0]
            return self.text[:, max(length - before, 0) : length + min(after, self.drafts[0])], None
        j = torch.arange(-before, after, dtype=torch.int64, device=self.device)
        positions = self.lengths[:, None] + j
        real = (positions >= 0) & (j < self.num_drafts[:, None]) & self.is_active[:, None]
        return self.text.gather(1, positions.clamp(min=0)), positions.masked_fill(~real, -1)

    def emit(self, verified: VerifyOutput, stopping: Stopping, logits: torch.Tensor) -> list[Emitted]:
        """What each row gets of what was verified: the accepted drafts and the token after them, up to where it ends.

        logits: [B, m + 1, V], the target's.
        """
        token_ids = verified.token_ids
        # The accepted drafts stand behind the text already.
        last = (token_ids >= 0).sum(1) - 1
        columns = (self.lengths + last).clamp(min=0)[:, None]
        self.text.scatter_(1, columns, token_ids.gather(1, last.clamp(min=0)[:, None]))
        rows = zip(token_ids.tolist(), verified.num_accepted.tolist(), strict=True)
        return [
            self._emit_row(b, [t for t in row if t >= 0], accepted, stopping, logits[b])
            for b, (row, accepted) in enumerate(rows)
        ]

    def _emit_row(self, b, tokens, accepted, stopping, logits):
        if not self.remaining[b]:
            return Emitted([], 0, 0, True)
        kept, ended = stopping.cut(b, self.text[b, : self.length[b] + len(tokens)], tokens, logits)
        # Drafts after an accepted one that ends the row were no proposals to the target.
        drafted = kept if ended and kept <= accepted else self.drafts[b]
        return Emitted(tokens[:kept], min(kept, accepted), drafted, ended)

    def commit(self, emitted: Sequence[Emitted]) -> None:
        """Append what each row got, and begin the next round."""
        for b, row in enumerate(emitted):
            kept = len(row.token_ids)
            self.length[b] += kept
            self.remaining[b] = 0 if row.ended else self.remaining[b] - kept
            self.emitted[b] += row.token_ids
        self._next_round()

    def sequences(self, input_ids, pad_token_id):
        """int64 [B, P + longest output]: prompts as they came, outputs, padding on the right."""
        longest = max(map(len, self.emitted))
        padded = [tokens + [pad_token_id] * (longest - len(tokens)) for tokens in self.emitted]
        return torch.cat([input_ids, torch.tensor(padded, dtype=torch.int64, device=self.device)], dim=1)
