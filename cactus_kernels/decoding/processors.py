"""transformers' logits processors and stopping criteria over ragged rows: each row as if it were generated alone."""

import copy
import math
from functools import partial

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from ..sampling import Sampling

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
    lengths; of the caller's own ones, rows after the first get a copy. So a request does not depend on its batch, and what
    a processor remembers of a text stays with that text. They never see a text that cannot come out, with tokens after
    EOS, past the row's drafts or after one that they forbid: some cannot bear one.
    """

    def __init__(
        self, model, prepared, generation_config, user_processors, prefix_allowed_tokens_fn, prompts, new_tokens
    ):
        """
        model, prepared, generation_config: the model, and what its `generate` prepared.
        user_processors, prefix_allowed_tokens_fn: what the caller gave.
        prompts: the prompts without padding, int64 [n_b] each. new_tokens: most tokens a row may get.
        """
        self.prepared, self.sampling = split_warpers(prepared)
        self.warpers = LogitsProcessorList(prepared[len(self.prepared) :])
        self.scores_only = all(type(processor) in SCORES_ONLY for processor in self.prepared)
        if self.scores_only:
            return
        self.eos = set(eos_ids(generation_config))
        self.by_row = []
        for row, prompt in enumerate(prompts):
            config = copy.deepcopy(generation_config)
            config.max_length = len(prompt) + new_tokens
            if config.min_new_tokens is not None:
                config.min_length = len(prompt) + config.min_new_tokens
            config.num_return_sequences = 1
            # transformers' own way to a processor list; it has no public name.
            whole = model._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=len(prompt),
                encoder_input_ids=prompt[None],
                prefix_allowed_tokens_fn=prefix_allowed_tokens_fn
                and partial(_in_row, prefix_allowed_tokens_fn, row // generation_config.num_return_sequences),
                logits_processor=LogitsProcessorList(
                    copy.deepcopy(processor) if row else processor for processor in user_processors or []
                ),
                device=prompt.device,
                model_kwargs={},
            )
            self.by_row.append(split_warpers(whole)[0])

    def __call__(self, logits, text, lengths, drafts, ahead):
        """Logits [B, K, V] in their own dtype where no processor has to run, else processed scores in fp32.

        logits: [B, K, V], of K next tokens for each row, the first of which come after `ahead` drafts.
        text: int64 [B, L], rows without padding. lengths: for each row the length of its text before any draft, or None
            for a row that takes no part. drafts: how many drafts each row has.
        """
        if self.scores_only and not self.prepared:
            return logits.float() if logits.dtype == torch.float64 else logits
        scores = logits.float()
        if self.scores_only:
            B, K, V = scores.shape
            return self.prepared(text[:, :1], scores.reshape(B * K, V)).view(B, K, V)
        scores = scores.clone()
        for row, length in enumerate(lengths):
            if length is None:
                continue
            drafted = text[row, length : length + drafts[row]].tolist()
            for k in range(scores.shape[1]):
                n = ahead + k
                if n > drafts[row] or not self.eos.isdisjoint(drafted[:n]):
                    break
                scores[row, k : k + 1] = self.by_row[row](
                    text[row : row + 1, : length + n], scores[row, k : k + 1].clone()
                )
                if n < len(drafted) and k + 1 < scores.shape[1] and scores[row, k, drafted[n]] == -torch.inf:
                    break
        return scores


class Stopping:
    """Where a row's new tokens end: at EOS, or where a criterion of the caller says so; checked token by token."""

    def __init__(self, criteria, generation_config, user_criteria):
        """criteria: what `generate` prepared, `user_criteria` among them; its own ones for length and EOS are replaced."""
        self.eos = set(eos_ids(generation_config))
        self.criteria = [
            c
            for c in criteria
            if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria)) and not any(c is own for own in user_criteria)
        ] + list(user_criteria)

    def cut(self, text, tokens):
        """How many of `tokens` a row keeps, and whether it ends with them.

        text: int64 [L], the row's text with the new tokens at its end. tokens: list of ints.
        """
        before = len(text) - len(tokens)
        for k, token in enumerate(tokens, 1):
            if token in self.eos or any(bool(c(text[None, : before + k], None)) for c in self.criteria):
                return k, True
        return len(tokens), False


def callers_processors(model, prepared, generation_config, input_ids, attention_mask):
    """What a caller gave to `generate`, read off what it prepared: a list of processors and a prefix_allowed_tokens_fn.

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
    return [p for p in others if not any(_alike(p, q) for q in own)], next(iter(allowed), None)


def callers_criteria(prepared, generation_config):
    """The stopping criteria among the prepared ones that the generation config does not ask for."""
    eos = sorted(eos_ids(generation_config))

    def asked_for(c):
        return (
            (type(c) is MaxLengthCriteria and c.max_length == generation_config.max_length)
            or (type(c) is MaxTimeCriteria and c.max_time == generation_config.max_time)
            or (type(c) is EosTokenCriteria and sorted(c.eos_token_id.tolist()) == eos)
        )

    return [c for c in prepared if not asked_for(c)]


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


def eos_ids(generation_config):
    """The ids that end a row, a list."""
    ids = generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else [int(i) for i in ids]


def pad_id(generation_config):
    """The id after a row's end: pad_token_id, or as in `generate` the first EOS. None if there is neither."""
    first_eos = next(iter(eos_ids(generation_config)), None)
    return first_eos if generation_config.pad_token_id is None else generation_config.pad_token_id


def _in_row(allowed, row, _, input_ids):
    """A caller's `prefix_allowed_tokens_fn` asked about a row that stands alone, where it would be row 0."""
    return allowed(row, input_ids)
