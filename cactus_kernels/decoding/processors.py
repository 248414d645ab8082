"""transformers' logits processors over ragged rows: each row as if it were generated alone."""

import copy
import math
from functools import partial

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from ..sampling import Sampling
from .prepared import Callers, Prepared, eos_ids
from .state import copied, remembers

# The warpers that `Sampling` stands for, in the order it takes them, each with the name of its setting.
WARPERS = (
    (hf.TemperatureLogitsWarper, "temperature"),
    (hf.TopKLogitsWarper, "top_k"),
    (hf.TopPLogitsWarper, "top_p"),
    (hf.MinPLogitsWarper, "min_p"),
)
# Processors that look at the scores alone, so that all rows and positions go through them at once.
SCORES_ONLY = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
)


def split_warpers(processors):
    """The processors that have to run, and what the warpers at their end come to: a list and a `Sampling`.

    Warpers that stand in another order, or mean something else than `Sampling` does, run as they are.
    """
    rest, settings, allowed = list(processors), {}, len(WARPERS)
    while rest:
        kind = next((k for k, (warper, _) in enumerate(WARPERS[:allowed]) if type(rest[-1]) is warper), None)
        if kind is None or getattr(rest[-1], "filter_value", -math.inf) != -math.inf:
            break
        name = WARPERS[kind][1]
        if getattr(rest[-1], "min_tokens_to_keep", 1) != 1:
            break
        settings[name] = getattr(rest.pop(), name)
        allowed = kind
    return LogitsProcessorList(rest), Sampling(**settings)


class Processors:
    """The processors of `generate`, applied to draft and target alike; `sampling` is what comes after them.

    `warpers` are the processors that `sampling` stands for, for those who want the scores that `generate` gives.

    Processors that read the text get a row's own text without padding, and are made for each row with that row's
    lengths; of the caller's own ones each row has its own. So a request does not depend on its batch, and what a processor
    remembers of a text stays with that text: it is called for each token that the row keeps, in order, and drafts are shown
    to copies. They never see a text that cannot come out, with tokens after EOS, past the row's drafts or after one that
    they forbid: some cannot bear one.
    """

    def __init__(self, prepared: Prepared, prompts, callers):
        """prompts: without padding, int64 [n_b] each. callers: for each row a list of the caller's processors."""
        whole = prepared.logits_processor
        self.prepared, self.sampling = split_warpers(whole)
        self.warpers = LogitsProcessorList(whole[len(self.prepared) :])
        self.scores_only = all(type(processor) in SCORES_ONLY for processor in self.prepared)
        if self.scores_only:
            return
        self.eos = set(eos_ids(prepared.generation_config))
        self.by_row = [_row_processors(prepared, *row) for row in enumerate(zip(prompts, callers, strict=True))]
        # Those that remember something, and the ones before them, which give them their scores.
        self.remembering = [max((i + 1 for i, p in enumerate(r) if remembers(p)), default=0) for r in self.by_row]

    def follow(self, row: int, text, logits) -> None:
        """Let a row's processors remember a token that it kept, and that only copies of them were asked about.

        text: int64 [1, L], up to that token. logits: [1, V], the target's after it.
        """
        if not self.scores_only and self.remembering[row]:
            LogitsProcessorList(self.by_row[row][: self.remembering[row]])(text, logits.float().clone())


class Calls:
    """A model's calls of the processors, which each of its rounds makes in the order of the text."""

    def __init__(self, processors: Processors, certain: int):
        """certain: how many of a round's places are kept whatever comes out: processors themselves are called there."""
        self.processors, self.certain = processors, certain
        self.copies: dict[int, LogitsProcessorList] = {}

    def __call__(self, logits, text, lengths, drafts, ahead):
        """Logits [B, K, V] in their own dtype where no processor has to run, else processed scores in fp32.

        logits: [B, K, V], of K next tokens for each row, the first of which come after `ahead` drafts.
        text: int64 [B, L], rows without padding. lengths: for each row the length of its text before any draft, or None
            for a row that takes no part. drafts: how many drafts each row has.
        """
        processors = self.processors
        if processors.scores_only and not processors.prepared:
            return logits.float() if logits.dtype == torch.float64 else logits
        scores = logits.float()
        if processors.scores_only:
            B, K, V = scores.shape
            return processors.prepared(text[:, :1], scores.reshape(B * K, V)).view(B, K, V)
        scores = scores.clone()
        for row, length in enumerate(lengths):
            if length is None:
                continue
            drafted = text[row, length : length + drafts[row]].tolist()
            for k in range(scores.shape[1]):
                n = ahead + k
                if n > drafts[row] or not processors.eos.isdisjoint(drafted[:n]):
                    break
                scores[row, k : k + 1] = self._at(n, row)(
                    text[row : row + 1, : length + n], scores[row, k : k + 1].clone()
                )
                if n < len(drafted) and k + 1 < scores.shape[1] and scores[row, k, drafted[n]] == -torch.inf:
                    break
        return scores

    def _at(self, n, row) -> LogitsProcessorList:
        """The processors of a row to be called after n drafts, which may remember what came before."""
        own = self.processors.by_row[row]
        if n < self.certain or not self.processors.remembering[row]:
            return own
        if n == self.certain:
            self.copies[row] = LogitsProcessorList(copied(own))
        return self.copies[row]


def _row_processors(prepared, row, given):
    """Processors of a row of the batch as `generate` would prepare them for it alone.

    given: the row's prompt, int64 [n], and the caller's processors.
    """
    prompt, callers = given
    generation_config, allowed = prepared.generation_config, prepared.callers.prefix_allowed_tokens_fn
    config = copy.deepcopy(generation_config)
    config.max_length = len(prompt) + prepared.new_tokens
    if config.min_new_tokens is not None:
        config.min_length = len(prompt) + config.min_new_tokens
    config.num_return_sequences = 1
    # transformers' own way to a processor list; it has no public name.
    whole = prepared.model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=prompt[None],
        prefix_allowed_tokens_fn=allowed and partial(_in_row, allowed, row // generation_config.num_return_sequences),
        logits_processor=LogitsProcessorList(callers),
        device=prompt.device,
        model_kwargs={},
    )
    return split_warpers(whole)[0]


def callers_processors(model, prepared, generation_config, input_ids, attention_mask) -> Callers:
    """What a caller gave to `generate`, read off what it prepared.

    A processor is the caller's if the generation config alone does not ask for the like of it.
    """
    own = model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids[:: generation_config.num_return_sequences],  # `generate` repeats the rows later
        device=input_ids.device,
        model_kwargs={"attention_mask": attention_mask},
    )
    allowed = [p._prefix_allowed_tokens_fn for p in prepared if type(p) is hf.PrefixConstrainedLogitsProcessor]
    others = [p for p in prepared if type(p) is not hf.PrefixConstrainedLogitsProcessor]
    return Callers([p for p in others if not any(_alike(p, q) for q in own)], next(iter(allowed), None))


def _alike(processor, other):
    """Whether two processors are of one type and hold the same settings."""
    mine, others = vars(processor), vars(other)
    return (
        type(processor) is type(other)
        and mine.keys() == others.keys()
        and all(
            torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
            for x, y in ((mine[name], others[name]) for name in mine)
        )
    )


def _in_row(allowed, row, _, input_ids):
    """A caller's `prefix_allowed_tokens_fn` asked about a row that stands alone, where it would be row 0."""
    return allowed(row, input_ids)
