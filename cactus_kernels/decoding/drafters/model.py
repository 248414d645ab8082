"""Where drafts come from: a draft model, n-grams of the text so far, the target with layers skipped.

A drafter has one method, `draft()`. It writes drafts of the round behind each row's text in the batch, tells the batch
how many each row has where that is fewer than `batch.drafts` (`batch.plan`), and returns

    draft_token_ids: int64 [B, m], -1 beyond a row's number of drafts;
    drawn_from: the rows that they were drawn from, as arguments of `verify_from_logits`; empty where each was certain
        (one-hot).
"""

import copy

import torch

from ...rows import DraftSampler
from ..batch import Scorer, arg_max


class ModelDrafter:
    """Tokens drawn one by one from a draft model."""

    def __init__(self, assistant_model, batch, processors, vocab_size, sampling, seed, offset, backend):
        """
        vocab_size: the target's. sampling: a `Sampling`, or None for greedy decoding.
        seed, offset: int64 [B] each, as in `verify`; `offset` is the loop's, which moves it on.
        """
        self.scorer = Scorer(assistant_model, batch, processors, vocab_size)
        self.batch, self.offset = batch, offset
        self.sampler = sampling and DraftSampler(seed, sampling, max(batch.num_assistant_tokens), backend)
        self.first_round = True

    @property
    def model(self):
        return self.scorer.model

    def draft(self):
        batch, sampler = self.batch, self.sampler
        m = max(batch.drafts)
        if not m:
            return torch.empty((batch.size, 0), dtype=torch.int64, device=batch.device), {}
        if sampler:
            sampler.start(self.offset, m)
        # The last two tokens, since the draft has not seen the last one that was accepted when all were. It writes
        # over what it had, so every row may do the same.
        tokens, positions = batch.block(max(batch.length) if self.first_round else 2, 0)
        _, draft_positions = batch.block(0, m)
        self.first_round = False
        steps = torch.arange(m, device=batch.device)
        columns = batch.lengths[:, None] + steps
        drafted = []
        for j in range(m):
            scores = self.scorer.scores(self.scorer.logits(tokens, positions, ahead=j, keep=1), ahead=j)[:, 0]
            token = sampler.draw(scores, j) if sampler else arg_max(scores)
            drafted.append(token)
            tokens = token.clamp(min=0)[:, None]
            positions = draft_positions if draft_positions is None else draft_positions[:, j : j + 1]
            batch.text.scatter_(1, columns[:, j : j + 1], tokens)
        ids = torch.stack(drafted, 1).masked_fill(steps >= batch.num_drafts[:, None], -1)
        return ids, sampler.drawn_from() if sampler else {}


class PromptLookup:
    """Tokens that followed the row's last n-gram where it stood before: the longest n-gram, the latest place.

    (Saxena, "Prompt Lookup Decoding", 2023, takes the first place; `generate` does too.) A place with as many tokens
    after it as the row may draft goes before a later one with fewer. Rows without a match draft nothing.
    """

    model = None

    def __init__(self, batch, max_ngram_size):
        self.batch, self.max_ngram_size = batch, max_ngram_size

    def draft(self):
        batch = self.batch
        text, lengths = batch.text[:, : max(batch.length)], batch.lengths[:, None]
        start = torch.zeros_like(lengths)  # of the continuation; 0 where there is none
        for n in range(min(self.max_ngram_size, text.shape[1] - 1), 0, -1):
            last = text.gather(1, (lengths - n + torch.arange(n, device=batch.device)).clamp(min=0))
            following = torch.arange(n, text.shape[1] + 1, device=batch.device)
            match = (text.unfold(1, n, 1) == last[:, None]).all(-1) & (following < lengths)
            whole = match & (following + batch.num_drafts[:, None] <= lengths)
            latest = (whole * following).amax(1, keepdim=True)
            longest = following[match.int().argmax(1)][:, None]
            found = torch.where(whole.any(1, keepdim=True), latest, longest)
            start = torch.where((start == 0) & match.any(1, keepdim=True), found, start)
        count = torch.where(start > 0, (lengths - start).minimum(batch.num_drafts[:, None]), 0)[:, 0]
        batch.plan(count.tolist())
        j = torch.arange(max(batch.drafts), device=batch.device)
        ids = batch.text.gather(1, start + j)
        batch.text.scatter_(1, lengths + j, ids)
        return ids.masked_fill(j >= count[:, None], -1), {}


def skip_layers(model, layers):
    """A draft that is the model without some of its layers, and shares all weights with it: no parameter is copied.

    Args:
        model: a decoder-only `transformers` causal LM.
        layers: ids of the layers to leave out, 0 .. num_hidden_layers - 1, at least one and not all.

    Returns:
        A model of the same class, to be passed as `assistant_model`. The one given is left as it is; changes of its
        weights show in both.

    Raises:
        TypeError, ValueError: the ids are no such layers, or the model's layers cannot be found or left out.
    """
    config = copy.deepcopy(model.config)
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
