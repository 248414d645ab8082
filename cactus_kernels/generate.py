"""`speculative_generate`: draft, score, verify, commit, over Hugging Face models."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from .cache import RollbackModel
from .checks import check_request
from .inputs import choose_backend
from .processors import Processors, Stopping, pad_id
from .rows import DraftSampler
from .rules import Coupled
from .sampling import RowStats
from .stats import Stats
from .verify import VerifyOutput, verify_from_logits


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, and `stats` (a `Stats`)."""

    stats: Stats | None = None


def speculative_generate(
    model,
    input_ids=None,
    *,
    assistant_model,
    rule="cactus",
    budget=None,
    num_assistant_tokens=5,
    draft_temperature=None,
    seed=None,
    backend=None,
    generation_config=None,
    logits_processor=None,
    stopping_criteria=None,
    prefix_allowed_tokens_fn=None,
    streamer=None,
    tokenizer=None,
    assistant_tokenizer=None,
    **kwargs,
):
    """Generate with a draft model and fused verification: a drop-in for `model.generate(..., assistant_model=...)`.

    Batches of any size; each request accepts its own number of tokens and ends alone. The default rule is lossy: with
    `rule="sps"` sampled tokens follow the target exactly, with `do_sample=False` they are those of plain greedy decoding
    whatever the rule (up to ties that a model's own rounding breaks: scoring several tokens at once differs in last bits,
    which shows in bf16). Processors and criteria are prepared by transformers, and shape draft and target alike; those
    that read the text are called for one row at a time, [1, L] without padding, as if it were generated alone.

    Args:
        model: the target, a decoder-only causal LM with eager or sdpa attention and a cache that can roll back.
        input_ids: int64 [B, P], left-padded; rows of different lengths need `attention_mask`.
        assistant_model: the draft, of the same kind and with the same tokenizer.
        rule: a `Rule` such as `Cactus(0.75)` or its name, such as "sps" or "cactus" (delta 1); the README has a table.
        budget: nats that each text may spend, a number or a list with one a row: then no text is more than e^budget times as
            likely as under the (processed) target, and the KL divergence of the law of whole texts is at most the budget
            (docs/rules.md). `stats.spent` tells what each text spent. For SpS, Cactus, AdaptiveCactus, Capped, Interpolation.
        num_assistant_tokens: tokens drafted a round, 0 to 64; with 0 the target decodes alone.
        draft_temperature: the draft's temperature where it samples, >= 0 (0: greedy drafts); None: that of `temperature`.
        seed: an int gives row r the stream (seed, r), so that a row's tokens depend on its place; a list or int64 tensor
            holds one seed a row (after num_return_sequences), and then they do not; None draws one from torch's generator.
            The same seed gives the same tokens, up to the rounding of the models' own products.
        backend: as in `verify`.
        generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer, **kwargs: as in
            `generate`, e.g. attention_mask, max_new_tokens, do_sample, temperature, top_k, top_p, min_p,
            repetition_penalty, eos_token_id, pad_token_id, return_dict_in_generate.
        tokenizer, assistant_tokenizer: if both are given, their ids are compared; `tokenizer` serves `stop_strings` too.

    Returns:
        int64 [B, P + new tokens], as `generate` does; or `SpeculativeOutput` with `return_dict_in_generate=True`.

    Raises:
        TypeError, ValueError: before any work, naming what came and what to do. ValueError while running where a model
            gave NaN or other bad probabilities, naming the requests.
        RuntimeError: the backend asked for is not to be had.
    """
    request = check_request(
        model, input_ids, assistant_model, rule, budget, num_assistant_tokens, draft_temperature, seed, generation_config,
        logits_processor, stopping_criteria, streamer, tokenizer, assistant_tokenizer, kwargs,
    )  # fmt: skip
    choose_backend(backend, model.device)

    # Names of no parameters, so that `generate` takes no keyword of the caller's for one of the loop's own.
    def decode(*args, **prepared):
        return _decode(
            *args,
            **prepared,
            request=request,
            assistant_model=assistant_model,
            backend=backend,
            user_processors=logits_processor,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            streamer=streamer,
        )

    return model.generate(
        request.input_ids,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=request.stopping_criteria,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        custom_generate=decode,
        **request.kwargs,
    )


def _decode(
    model,
    input_ids,
    *,
    logits_processor,
    stopping_criteria,
    generation_config,
    request,
    assistant_model,
    backend,
    user_processors,
    prefix_allowed_tokens_fn,
    streamer,
    attention_mask=None,
    **model_kwargs,
):
    """The decoding loop, called by `generate` with everything prepared (`num_return_sequences` rows expanded too)."""
    new_tokens = generation_config.max_length - input_ids.shape[1]
    batch = _Batch(input_ids, attention_mask, new_tokens, request.num_assistant_tokens)
    processors = Processors(
        model, logits_processor, generation_config, user_processors, prefix_allowed_tokens_fn, batch.prompts, new_tokens
    )
    stopping = Stopping(stopping_criteria, generation_config, request.stopping_criteria)
    decoder = _Decoder(
        model, assistant_model, batch, processors, request, request.seeds(batch.size), backend,
        greedy=not generation_config.do_sample,
    )  # fmt: skip
    stats = Stats.of(request.rule, batch.size, request.budget)
    clock = _Clock(model.device)
    if streamer is not None:
        streamer.put(input_ids.cpu())

    while batch.active:
        with clock.time("draft"):
            draft_token_ids, draft_logits, draft_stats = decoder.draft()
        with clock.time("target"):
            target = decoder.score()
        with clock.time("verify"):
            verified = decoder.verify(target, draft_logits, draft_stats, draft_token_ids)
        emitted = batch.commit(verified, stopping, stats)
        stats.target_forwards += 1
        if streamer is not None:
            for token in emitted[0]:
                streamer.put(torch.tensor([token]))

    if streamer is not None:
        streamer.end()
    if request.budget is not None:
        stats.spent = (request.budget - decoder.left).tolist()
    stats.draft_seconds, stats.target_seconds, stats.verify_seconds = (
        clock.seconds(k) for k in ("draft", "target", "verify")
    )
    sequences = batch.sequences(input_ids, pad_id(generation_config))
    if generation_config.return_dict_in_generate:
        return SpeculativeOutput(sequences=sequences, stats=stats)
    return sequences


class _Batch:
    """The rows of a batch: their texts without padding, and how far each has come.

    Attributes:
        text: int64 [B, L]; row b holds its prompt and tokens in text[b, : length[b]], drafts beyond.
        length: tokens of each row (a list; `lengths` is the same on the device).
        remaining: tokens each row may still emit, 0 once it has ended.
    """

    def __init__(self, input_ids, attention_mask, new_tokens, num_assistant_tokens):
        self.size, P = input_ids.shape
        self.device = input_ids.device
        padding = [0] * self.size if attention_mask is None else (attention_mask == 0).sum(1).tolist()
        self.prompts = [row[pad:] for row, pad in zip(input_ids, padding, strict=True)]
        self.num_assistant_tokens = num_assistant_tokens
        self.length = [P - pad for pad in padding]
        self.max_length = max(self.length) + new_tokens
        self.remaining = [new_tokens] * self.size
        self.emitted = [[] for _ in range(self.size)]
        self.text = torch.zeros(
            (self.size, self.max_length + num_assistant_tokens), dtype=torch.int64, device=self.device
        )
        for row, prompt in zip(self.text, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        self._plan()

    @property
    def active(self) -> bool:
        return any(self.remaining)

    def _plan(self):
        # A row that may emit r more tokens has use for r - 1 drafts: the last one is recovered or the bonus.
        self.drafts = [min(self.num_assistant_tokens, max(r - 1, 0)) for r in self.remaining]
        self.lengths = torch.tensor(self.length, device=self.device)
        self.num_drafts = torch.tensor(self.drafts, device=self.device)
        self.is_active = torch.tensor([r > 0 for r in self.remaining], device=self.device)

    def block(self, before: int, after: int):
        """Tokens and positions, int64 [B, before + after] each: the last `before` of each row's text and `after` drafts.

        Positions are -1 where a row has no such token, as all of a row that has ended.
        """
        j = torch.arange(-before, after, device=self.device)
        positions = self.lengths[:, None] + j
        real = (positions >= 0) & (j < self.num_drafts[:, None]) & self.is_active[:, None]
        return self.text.gather(1, positions.clamp(min=0)), positions.masked_fill(~real, -1)

    def commit(self, verified, stopping, stats):
        """Append what verification emitted, each row its own number of tokens; returns it, a list for each row."""
        token_ids = verified.token_ids
        count = (token_ids >= 0).sum(1)
        last = (self.lengths + count - 1).clamp(min=0)[:, None]
        self.text.scatter_(1, last, token_ids.gather(1, (count - 1).clamp(min=0)[:, None]))
        valid, num_accepted = verified.valid.tolist(), verified.num_accepted.tolist()
        emitted = [[] for _ in range(self.size)]
        for b, row in enumerate(token_ids.tolist()):
            if not self.remaining[b]:
                valid[b] = True
                continue
            tokens = [t for t in row if t >= 0]
            kept, ended = stopping.cut(self.text[b, : self.length[b] + len(tokens)], tokens)
            valid[b] |= ended  # what is bad comes after the end
            stats.count(b, self.drafts[b], min(kept, num_accepted[b]), kept)
            self.length[b] += kept
            self.remaining[b] = 0 if ended else self.remaining[b] - kept
            emitted[b] = tokens[:kept]
            self.emitted[b] += emitted[b]
        VerifyOutput(token_ids, verified.num_accepted, torch.tensor(valid)).raise_if_invalid()
        self._plan()
        return emitted

    def sequences(self, input_ids, pad_token_id):
        """int64 [B, P + longest output]: prompts as they came, outputs, padding on the right."""
        longest = max(map(len, self.emitted))
        if any(len(tokens) < longest for tokens in self.emitted):
            self.emitted = [tokens + [pad_token_id] * (longest - len(tokens)) for tokens in self.emitted]
        return torch.cat([input_ids, torch.tensor(self.emitted, dtype=torch.int64, device=self.device)], dim=1)


class _Decoder:
    """Target and draft over a batch, and the random stream of each row."""

    def __init__(self, model, assistant_model, batch, processors, request, seed, backend, greedy):
        self.batch, self.processors, self.rule, self.seed, self.backend = batch, processors, request.rule, seed, backend
        self.left = request.budget  # of a budget, float64 [B]; or None
        self.sampling = self.draft_sampling = processors.sampling
        if request.draft_temperature is not None:
            self.draft_sampling = replace(self.sampling, temperature=request.draft_temperature)
        self.target = RollbackModel(model, batch.size, batch.max_length)
        self.assistant = RollbackModel(assistant_model, batch.size, batch.max_length)
        self.vocab_size, self.draft_vocab_size = (
            m.config.get_text_config().vocab_size for m in (model, assistant_model)
        )
        self.offset = torch.zeros(batch.size, dtype=torch.int64, device=batch.device)
        self.greedy = greedy
        self.first_round = True

    def draft(self):
        """Draft the round's tokens one by one into the batch's text: their ids int64 [B, m], -1 beyond a row's number of
        drafts; the logits they were drawn from, [B, m, V], and their `RowStats` [B, m] (None if greedy)."""
        batch = self.batch
        m = max(batch.drafts)
        ids = torch.full((batch.size, m), -1, dtype=torch.int64, device=batch.device)
        logits, stats = None, []
        sampler = DraftSampler(self.seed, self.offset, m, self.draft_sampling, self.backend)
        for j in range(m):
            # The last two tokens, since the draft has not seen the last one that was accepted when all were. It writes
            # over what it had, so every row may do the same.
            before = (max(batch.length) if self.first_round else 2) if j == 0 else 0
            tokens, positions = batch.block(before, j) if j == 0 else (x[:, -1:] for x in batch.block(0, j))
            scores = self._scores(self.assistant, tokens, positions, ahead=j, keep=1)[:, 0]
            if self.greedy:
                token = arg_max(scores)
            else:
                if logits is None:
                    logits = scores.new_empty((batch.size, m, scores.shape[-1]))
                logits[:, j] = scores
                drawn = sampler(scores, j)
                token = drawn.token_ids
                stats.append(drawn.stats)
            ids[:, j] = torch.where(batch.num_drafts > j, token, -1)
            batch.text.scatter_(1, (batch.lengths + j)[:, None], token.clamp(min=0)[:, None])
        return ids, logits, RowStats.stack(stats) if stats else None

    def score(self):
        """The target at the last token and every draft: logits [B, m + 1, V], or the arg max [B, m + 1]."""
        batch = self.batch
        m = max(batch.drafts)
        tokens, positions = batch.block(max(batch.length) if self.first_round else 1, m)
        self.first_round = False
        scores = self._scores(self.target, tokens, positions, ahead=0, keep=m + 1)
        return arg_max(scores) if self.greedy else scores

    def verify(self, target, draft_logits, draft_stats, draft_token_ids):
        """Accept, recover: a `VerifyOutput`. The random words of every drafted row are spent, also of rejected ones."""
        num_drafts = self.batch.num_drafts
        if self.greedy:
            verified = verify_greedy(target, draft_token_ids)
        else:
            verified = verify_from_logits(
                target, draft_logits, draft_token_ids, self.rule, sampling=self.sampling, draft_stats=draft_stats,
                budget=self.left, seed=self.seed, offset=self.offset, backend=self.backend,
            )  # fmt: skip
            if self.left is not None:
                self.left = self.left - verified.spent
            # Of a coupled draw the words are those of the token's position, whatever was drafted.
            coupled = isinstance(self.rule, Coupled)
            self.offset += (verified.token_ids >= 0).sum(1) if coupled else num_drafts + 1
        # A draft that ended before its time did so on bad scores.
        stop = verified.num_accepted.long()
        following = torch.nn.functional.pad(draft_token_ids, (0, 1), value=-1).gather(1, stop[:, None])[:, 0]
        return replace(verified, valid=verified.valid & ((following >= 0) | (stop >= num_drafts)))

    def _scores(self, model, tokens, positions, ahead, keep):
        """Processed logits [B, keep, V] after a block of tokens; the first of them come after `ahead` drafts."""
        batch = self.batch
        length = max(
            n + min(d, ahead + keep - 1)
            for n, d, r in zip(batch.length, batch.drafts, batch.remaining, strict=True)
            if r
        )
        if model is self.assistant:
            # A padded vocabulary may be the draft's or the target's. What the draft cannot read costs acceptance alone;
            # what it cannot say has probability 0; what the target does not know is never proposed.
            tokens = tokens.clamp(max=self.draft_vocab_size - 1)
        logits = model(tokens, positions, length=length, logits_to_keep=keep)
        if model is self.assistant and self.draft_vocab_size != self.vocab_size:
            pad = self.vocab_size - logits.shape[-1]
            # Not -inf: where processors leave nothing but tokens that the draft cannot say, it says any of those.
            value = max(-1e30, torch.finfo(logits.dtype).min)
            logits = torch.nn.functional.pad(logits, (0, pad), value=value)
        lengths = [n if r else None for n, r in zip(batch.length, batch.remaining, strict=True)]
        return self.processors(logits, batch.text, lengths, batch.drafts, ahead)


def arg_max(scores):
    """The lowest of the ids with the largest score, int64; -1 where a score is NaN. scores: [..., V]."""
    largest, ids = scores.max(-1)
    return ids.masked_fill(largest.isnan(), -1)


def verify_greedy(target_token_ids, draft_token_ids) -> VerifyOutput:
    """Verification at temperature 0: a drafted token is accepted iff it is the target's arg max.

    target_token_ids: int64 [B, m + 1], -1 where a row is bad. draft_token_ids: int64 [B, m], -1 where a draft has ended.
    """
    m = draft_token_ids.shape[1]
    accepted = (target_token_ids[:, :m] == draft_token_ids) & (draft_token_ids >= 0)
    num_accepted = accepted.long().cumprod(1).sum(1)
    j = torch.arange(m + 1, device=target_token_ids.device)
    token_ids = torch.where(j <= num_accepted[:, None], target_token_ids, -1)
    valid = target_token_ids.gather(1, num_accepted[:, None])[:, 0] >= 0
    return VerifyOutput(token_ids, num_accepted.int(), valid)


class _Clock:
    """Seconds spent under each name, without waiting for the device until they are asked for."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.spans = {}

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def time(self, name):
        start = self._now()
        yield
        self.spans.setdefault(name, []).append((start, self._now()))

    def seconds(self, name):
        if not self.cuda:
            return sum(end - start for start, end in self.spans.get(name, ()))
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.spans.get(name, ())) / 1000
