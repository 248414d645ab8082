"""The rows of a batch while they are decoded, and a model run over them."""

import math

import torch

from .cache.rollback import RollbackModel


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
        self.emitted = [[] for _ in range(self.size)]
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
        self.lengths = torch.tensor(self.length, device=self.device)
        self.is_active = torch.tensor([r > 0 for r in self.remaining], device=self.device)
        # A row that may emit r more tokens has use for r - 1 drafts: the last one is recovered or the bonus.
        self.plan([min(n, max(r - 1, 0)) for n, r in zip(self.num_assistant_tokens, self.remaining, strict=True)])

    def plan(self, drafts):
        """Set the number of drafts of each row in this round, a list: a drafter may have fewer than it may give."""
        self.drafts = drafts
        self.num_drafts = torch.tensor(drafts, device=self.device)

    def block(self, before: int, after: int):
        """Tokens and positions, int64 [B, before + after] each: the last `before` of each row's text and `after` drafts.

        Positions are -1 where a row has no such token, as all of a row that has ended. Of one row there are only tokens that
        it has, and None for their positions: they are its last ones.
        """
        if self.size == 1:
            length = self.length[0]
            return self.text[:, max(length - before, 0) : length + min(after, self.drafts[0])], None
        j = torch.arange(-before, after, device=self.device)
        positions = self.lengths[:, None] + j
        real = (positions >= 0) & (j < self.num_drafts[:, None]) & self.is_active[:, None]
        return self.text.gather(1, positions.clamp(min=0)), positions.masked_fill(~real, -1)

    def commit(self, verified, stopping, stats, judged):
        """Append what verification emitted, each row its own number of tokens; returns it, a list for each row.

        judged: what was verified: logits and scores of the target [B, m + 1, V], and draft_token_ids [B, m]. Looked at
            where a value was bad alone: the ValueError says whose it was.
        """
        token_ids = verified.token_ids
        count = (token_ids >= 0).sum(1)
        last = (self.lengths + count - 1).clamp(min=0)[:, None]
        self.text.scatter_(1, last, token_ids.gather(1, (count - 1).clamp(min=0)[:, None]))
        valid, num_accepted, drafted = (x.tolist() for x in (verified.valid, verified.num_accepted, judged[-1]))
        emitted = [[] for _ in range(self.size)]
        for b, row in enumerate(token_ids.tolist()):
            if not self.remaining[b]:
                valid[b] = True
                continue
            tokens = [t for t in row if t >= 0]
            kept, ended = stopping.cut(self.text[b, : self.length[b] + len(tokens)], tokens)
            # A draft that ended before its time did so on bad scores.
            valid[b] &= num_accepted[b] >= self.drafts[b] or drafted[b][num_accepted[b]] >= 0
            valid[b] |= ended  # what is bad comes after the end
            stats.count(b, self.drafts[b], min(kept, num_accepted[b]), kept)
            self.length[b] += kept
            self.remaining[b] = 0 if ended else self.remaining[b] - kept
            emitted[b] = tokens[:kept]
            self.emitted[b] += emitted[b]
        if not all(valid):
            self._raise_bad({b: num_accepted[b] for b in range(self.size) if not valid[b]}, *judged)
        self._next_round()
        return emitted

    def _raise_bad(self, positions, logits, scores, draft_token_ids):
        """positions: of each row with a bad value, the drafted position of it. The rest as in `commit`."""
        bad, rows_of = "NaN, +inf or nothing but -inf", {}
        for b, j in positions.items():
            if not _is_law(logits[b, j]):
                whose = f"the target's own logits are {bad}"
            elif not _is_law(scores[b, j]):
                whose = f"the target's own logits are good, and {bad} after the logits processors"
            elif j < self.drafts[b] and draft_token_ids[b, j] < 0:
                whose = f"the draft's scores are {bad}, those of the target are good"
            else:
                whose = "the scores are good, but the rule makes no law of them"
            rows_of.setdefault(whose, []).append(b)
        found = [whose + (f" in requests {rows}" if len(rows_of) > 1 else "") for whose, rows in rows_of.items()]
        at = list(positions.values())
        raise ValueError(f"bad values in requests {list(positions)} at drafted positions {at}: {'; '.join(found)}")

    def sequences(self, input_ids, pad_token_id):
        """int64 [B, P + longest output]: prompts as they came, outputs, padding on the right."""
        longest = max(map(len, self.emitted))
        if any(len(tokens) < longest for tokens in self.emitted):
            self.emitted = [tokens + [pad_token_id] * (longest - len(tokens)) for tokens in self.emitted]
        return torch.cat([input_ids, torch.tensor(self.emitted, dtype=torch.int64, device=self.device)], dim=1)


class Scorer:
    """A model over a batch: logits of the tokens that may come next, in the target's vocabulary, and their scores."""

    def __init__(self, model, batch, processors, vocab_size):
        """vocab_size: the target's, V. The model's own may be padded otherwise, or be a smaller one."""
        self.model = RollbackModel(model, batch.size, batch.max_length, batch.prefill_chunk_size)
        self.batch, self.processors, self.vocab_size = batch, processors, vocab_size
        self.own_vocab_size = model.config.get_text_config().vocab_size

    def logits(self, tokens, positions, ahead, keep):
        """[B, keep, V] after a block of tokens; the first of them come after `ahead` drafts."""
        batch = self.batch
        rows = [(n, d) for n, d, r in zip(batch.length, batch.drafts, batch.remaining, strict=True) if r]
        length = max(n + min(d, ahead + keep - 1) for n, d in rows)
        behind = max(n for n, _ in rows) + ahead + keep - 1 - length
        # A padded vocabulary may be the draft's or the target's. What the draft cannot read costs acceptance alone; what
        # it cannot say has probability 0; what the target does not know is never proposed.
        if self.own_vocab_size != self.vocab_size:
            tokens = tokens.clamp(max=self.own_vocab_size - 1)
        logits = self.model(tokens, positions, length=length, behind=behind, logits_to_keep=keep)
        if self.own_vocab_size != self.vocab_size:
            pad = self.vocab_size - logits.shape[-1]
            # Not -inf: where processors leave nothing but tokens that the draft cannot say, it says any of those.
            value = max(-1e30, torch.finfo(logits.dtype).min)
            logits = torch.nn.functional.pad(logits, (0, pad), value=value)
        return logits

    def scores(self, logits, ahead):
        """`logits` as the processors leave them, [B, keep, V]; what is left to the sampler is not in them."""
        batch = self.batch
        lengths = [n if r else None for n, r in zip(batch.length, batch.remaining, strict=True)]
        return self.processors(logits, batch.text, lengths, batch.drafts, ahead)


def _is_law(scores):
    """Whether scores [V] make a distribution."""
    return math.isfinite(scores.float().logsumexp(-1).item())


def arg_max(scores):
    """The lowest of the ids with the largest score, int64; -1 where a score is NaN. scores: [..., V]."""
    largest, ids = scores.max(-1)
    return ids.masked_fill(largest.isnan(), -1)
