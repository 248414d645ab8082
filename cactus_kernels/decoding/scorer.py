"""Forward passes over a batch: a model's logits of the tokens that may come next, and their processed scores."""

from dataclasses import dataclass

import torch

from .batch import Batch
from .cache.rollback import RollbackModel
from .cache.rotary import switch_length
from .processors import Calls


class Scorer:
    """A model over a batch: logits of the tokens that may come next, in the target's vocabulary, and their scores."""

    def __init__(self, model, batch: Batch, processors: Calls, vocab_size: int):
        """vocab_size: the target's, V. The model's own may be padded otherwise, or be a smaller one."""
        self.model = RollbackModel(model, batch.size, batch.max_length, batch.prefill_chunk_size, batch.length)
        self.batch, self.processors, self.vocab_size = batch, processors, vocab_size
        self.own_vocab_size = vocab_size_of(model)

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


@dataclass(frozen=True)
class Scored:
    """The target at every drafted place and the one after: [B, m + 1, V] each.

    Attributes:
        logits: as the model gave them, in its dtype.
        scores: as the processors leave them; the sampler's warpers are not in them.
    """

    logits: torch.Tensor
    scores: torch.Tensor


class Target:
    """The target over a batch: once over the prompts, then over each row's last token and its drafts.

    `forwards` counts its passes; a prompt read in chunks is one.
    """

    def __init__(self, scorer: Scorer, cached: int = 0):
        """cached: tokens of the longest row that the model's cache holds."""
        self.scorer, self.cached = scorer, cached
        self.forwards = 0
        self.reads_prompt = True
        self.switch = switch_length(self.model.model)
        self.switched: list[bool] = []  # which rows' keys are those of a long text

    @property
    def model(self) -> RollbackModel:
        return self.scorer.model

    def read_prompt(self, images):
        """A pass over the prompt alone: among drafts there may be tokens that stand for images."""
        batch = self.scorer.batch
        length = max(batch.length)
        self.forwards += 1
        self.model(*batch.block(length - self.cached, 0), length=length, logits_to_keep=1, **images)
        self.cached = length - 1

    def plan(self) -> None:
        """Before drafting: no round of a row goes past the length where its keys have to be made anew."""
        if self.switch is not None:
            batch, left = self.scorer.batch, [self.switch - n for n in self.scorer.batch.length]
            batch.plan([d if r < 0 else min(d, r) for d, r in zip(batch.drafts, left, strict=True)])

    def _switch(self) -> None:
        """Read all of the texts again where one has just come past that length."""
        lengths = self.scorer.batch.length
        switched = [self.switch is not None and n > self.switch for n in lengths]
        if switched != self.switched:
            self.model.rotary.read = torch.tensor(lengths, dtype=torch.int64, device="cpu")
            self.cached = 0 if self.switched else self.cached
            self.reads_prompt, self.switched = True, switched

    def score(self) -> Scored:
        """The target after each row's text, and after each of the drafts behind it."""
        batch = self.scorer.batch
        m = max(batch.drafts)
        self._switch()
        tokens, positions = batch.block(max(batch.length) - self.cached if self.reads_prompt else 1, m)
        self.reads_prompt = False
        self.forwards += 1
        logits = self.scorer.logits(tokens, positions, ahead=0, keep=m + 1)
        return Scored(logits, self.scorer.scores(logits, ahead=0))


def vocab_size_of(model) -> int:
    """Rows of a model's logits, padding of the vocabulary among them."""
    return model.config.get_text_config().vocab_size


def arg_max(scores):
    """The lowest of the ids with the largest score, int64; -1 where a score is NaN. scores: [..., V]."""
    largest, ids = scores.max(-1)
    return ids.masked_fill(largest.isnan(), -1)
