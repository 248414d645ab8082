"""`speculative_generate`: draft, score, verify, commit, over Hugging Face models."""

import inspect
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

from ..inputs import choose_backend
from ..rules import Coupled
from ..verify import VerifyOutput, verify_from_logits
from .batch import Batch, Scorer, arg_max
from .cache.handover import CACHE_NAME, brought, give, take
from .call import NUM_ASSISTANT_TOKENS, check_prepared, check_request
from .drafters.model import ModelDrafter, PromptLookup
from .images import image_inputs
from .outputs import Streams, TokenScores
from .processors import Processors, Stopping, callers_criteria, callers_processors, pad_id
from .stats import Stats, cache_bytes, peak_memory


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, and `stats` (a `Stats`)."""

    stats: Stats | None = None


def speculative_generate(
    model,
    input_ids=None,
    *,
    assistant_model=None,
    rule="cactus",
    budget=None,
    num_assistant_tokens=NUM_ASSISTANT_TOKENS,
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
    """Generate with drafts and fused verification: a drop-in for `model.generate(..., assistant_model=...)`.

    Batches of any size; each request accepts its own number of tokens and ends alone. The default rule is lossy: with
    `rule="sps"` sampled tokens follow the target exactly, with `do_sample=False` they are those of plain greedy decoding
    whatever the rule (up to ties that a model's own rounding breaks: scoring several tokens at once differs in last bits,
    which shows in bf16). Processors and criteria are prepared by transformers, and shape draft and target alike; those
    that read the text are called for one row at a time, [1, L] without padding, as if it were generated alone.

    Args:
        model: the target, a decoder-only causal LM with eager, sdpa, flex or flash attention and a cache that can roll back.
        input_ids: int64 [B, P], left-padded; rows of different lengths need `attention_mask`.
        assistant_model: the draft, of the same kind and with the same tokenizer; `skip_layers(model, ...)` makes one of
            the target's own weights. Without one, prompt_lookup_num_tokens drafts from the row's own text.
        rule: a `Rule` such as `Cactus(0.75)` or its name, such as "sps" or "cactus" (delta 1); the README has a table.
        budget: nats that each text may spend, a number or a list with one a row: then no text is more than e^budget times as
            likely as under the (processed) target, and the KL divergence of the law of whole texts is at most the budget
            (docs/rules.md). `stats.spent` tells what each text spent. For SpS, Cactus, AdaptiveCactus, Capped, Interpolation.
        num_assistant_tokens: tokens drafted a round, 1 to 64; or a list with one number a row, which may be 0.
        draft_temperature: the draft's temperature where it samples, >= 0 (0: greedy drafts); None: that of `temperature`.
        seed: an int gives row r the stream (seed, r), so that a row's tokens depend on its place; a list or int64 tensor
            holds one seed a row (after num_return_sequences), and then they do not; None draws one from torch's generator.
            The same seed gives the same tokens, up to the rounding of the models' own products.
        backend: as in `verify`.
        streamer: as in `generate`, for one row; or a list with one a row, which gets its row's prompt without padding,
            every token, and its end as soon as the row has ended.
        generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, **kwargs: as in `generate`;
            docs/generate.md has a row for each keyword. A cache (a `DynamicCache`, as it came back from an earlier call) is
            continued from, and holds the new text afterwards.
        tokenizer, assistant_tokenizer: if both are given, their ids are compared; `tokenizer` serves `stop_strings` too.

    Returns:
        int64 [B, P + new tokens], as `generate` does; or `SpeculativeOutput` with `return_dict_in_generate=True`. Its
        cache ends where the shortest row does.

    Raises:
        TypeError, ValueError: before any work, naming what came and what to do. ValueError while running where a model
            or a processor gave NaN or other bad scores, naming the requests and which of them it was.
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


def custom_generate(
    model,
    input_ids,
    *,
    logits_processor,
    stopping_criteria,
    generation_config,
    assistant_model=None,
    rule="cactus",
    budget=None,
    num_assistant_tokens=NUM_ASSISTANT_TOKENS,
    draft_temperature=None,
    prompt_lookup_num_tokens=None,
    max_matching_ngram_size=None,
    seed=None,
    backend=None,
    streamer=None,
    tokenizer=None,
    assistant_tokenizer=None,
    stop_strings=None,
    **model_kwargs,
):
    """The loop of `speculative_generate` as `model.generate(..., custom_generate=)` takes it.

        model.generate(**inputs, custom_generate=partial(custom_generate, assistant_model=draft), rule="sps", seed=1)

    `generate` gives a function neither its own assistant_model, streamer, tokenizer nor assistant_tokenizer: bind them
    with `functools.partial`. The other keywords above may stand in the call of `generate`, also stop_strings where the
    tokenizer is bound, and prompt_lookup_num_tokens, which needs no binding. Their meaning and errors are those of
    `speculative_generate`, but that `generate` makes the mask where there is none, from the padding id.

    Raises:
        ValueError: also for an assistant_model or a streamer that was passed to `generate` and would be lost.
    """
    _refuse_lost(inspect.currentframe())
    attention_mask = model_kwargs.get("attention_mask")  # named above, `generate` would not prepare it
    settings = {"stop_strings": stop_strings, "prompt_lookup_num_tokens": prompt_lookup_num_tokens}
    settings |= {"max_matching_ngram_size": max_matching_ngram_size, "attention_mask": attention_mask}
    settings |= image_inputs(model_kwargs) | {CACHE_NAME: brought(model_kwargs)}
    request = check_request(
        model, input_ids, assistant_model, rule, budget, num_assistant_tokens, draft_temperature, seed, generation_config,
        logits_processor, callers_criteria(stopping_criteria, generation_config), streamer, tokenizer, assistant_tokenizer,
        {name: value for name, value in settings.items() if value is not None}, expanded=True,
    )  # fmt: skip
    choose_backend(backend, model.device)
    user_processors, prefix_allowed_tokens_fn = callers_processors(
        model, logits_processor, generation_config, input_ids, attention_mask
    )
    return _decode(
        model,
        request.input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        request=request,
        assistant_model=assistant_model,
        backend=backend,
        user_processors=user_processors,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        streamer=streamer,
        **model_kwargs,
    )


def _refuse_lost(frame):
    """Raises ValueError if the call of `generate` above us was given what it keeps from a function that it calls.

    It drops these without a word, and there is no other way to see them.
    """
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    for name in ("assistant_model", "streamer"):
        if frame is not None and frame.f_locals.get(name) is not None:
            raise ValueError(
                f"generate keeps its {name} from custom_generate: bind it, "
                f"custom_generate=functools.partial(custom_generate, {name}=...)"
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
    check_prepared(input_ids, attention_mask, model_kwargs)
    new_tokens = generation_config.max_length - input_ids.shape[1]
    batch = Batch(input_ids, attention_mask, new_tokens, request.num_assistant_tokens, request.prefill_chunk_size)
    processors = Processors(
        model, logits_processor, generation_config, user_processors, prefix_allowed_tokens_fn, batch.prompts, new_tokens
    )
    stopping = Stopping(stopping_criteria, generation_config, request.stopping_criteria)
    decoder = _Decoder(
        model, assistant_model, batch, processors, request, request.seeds(batch.size), backend,
        greedy=not generation_config.do_sample,
    )  # fmt: skip
    cache = model_kwargs.get(CACHE_NAME)
    if request.continues:
        decoder.cached = take(decoder.scorer.model, cache, batch.padding)
    stats = Stats.of(request.rule, batch.size, request.budget)
    kept = TokenScores(generation_config, batch.size, processors.warpers)
    clock = _Clock(model.device)
    images = image_inputs(model_kwargs)
    if images:
        with clock.time("target"):
            decoder.read_prompt(images)
        stats.target_forwards += 1
    streams = Streams(streamer, input_ids, batch.prompts)

    while batch.active:
        with clock.time("draft"):
            draft_token_ids, drawn_from = decoder.draft()
        with clock.time("target"):
            logits, scores = decoder.score()
        with clock.time("verify"):
            verified = decoder.verify(scores, draft_token_ids, drawn_from)
        emitted = batch.commit(verified, stopping, stats, (logits, scores, draft_token_ids))
        stats.target_forwards += 1
        kept.put(logits, scores, emitted)
        streams.put(emitted, batch.remaining)

    if request.budget is not None:
        stats.spent = (request.budget - decoder.left).tolist()
    stats.draft_seconds, stats.target_seconds, stats.verify_seconds = (
        clock.seconds(k) for k in ("draft", "target", "verify")
    )
    stats.target_cache_bytes, stats.draft_cache_bytes = map(cache_bytes, (decoder.scorer.model, decoder.drafter.model))
    stats.peak_memory_bytes = peak_memory(model.device)
    sequences = batch.sequences(input_ids, pad_id(generation_config))
    if generation_config.return_dict_in_generate or request.continues:
        # Up to the end of the shortest row but its last token, which no forward pass has seen.
        seen = input_ids.shape[1] + min(stats.tokens) - 1
        cache = give(decoder.scorer.model, cache, batch.padding, seen)
    if generation_config.return_dict_in_generate:
        return SpeculativeOutput(
            sequences=sequences, scores=kept.scores(), logits=kept.logits(), stats=stats, **{CACHE_NAME: cache}
        )
    return sequences


class _Decoder:
    """Target and drafts over a batch, and the random stream of each row."""

    def __init__(self, model, assistant_model, batch, processors, request, seed, backend, greedy):
        self.left = request.budget  # of a budget, float64 [B]; or None
        self.batch, self.rule, self.seed, self.backend, self.greedy = batch, request.rule, seed, backend, greedy
        self.sampling = draft_sampling = processors.sampling
        if request.draft_temperature is not None:
            draft_sampling = replace(self.sampling, temperature=request.draft_temperature)
        vocab_size = model.config.get_text_config().vocab_size
        self.scorer = Scorer(model, batch, processors, vocab_size)
        self.offset = torch.zeros(batch.size, dtype=torch.int64, device=batch.device)
        if request.max_ngram_size is None:
            self.drafter = ModelDrafter(
                assistant_model,
                batch,
                processors,
                vocab_size,
                None if greedy else draft_sampling,
                seed,
                self.offset,
                backend,
            )
        else:
            self.drafter = PromptLookup(batch, request.max_ngram_size)
        self.first_round = True
        self.cached = 0  # tokens of the longest row that the target need not read again

    def draft(self):
        """Drafts of the round: ids int64 [B, m], -1 beyond a row's number, and the rows they were drawn from (drafters.py)."""
        return self.drafter.draft()

    def read_prompt(self, images):
        """The target's pass over the prompt alone: among drafts there may be tokens that stand for images."""
        length = max(self.batch.length)
        self.scorer.model(*self.batch.block(length - self.cached, 0), length=length, logits_to_keep=1, **images)
        self.cached = length - 1

    def score(self):
        """The target at the last token and every draft: logits [B, m + 1, V], as they are and as processors leave them."""
        batch = self.batch
        m = max(batch.drafts)
        tokens, positions = batch.block(max(batch.length) - self.cached if self.first_round else 1, m)
        self.first_round = False
        logits = self.scorer.logits(tokens, positions, ahead=0, keep=m + 1)
        return logits, self.scorer.scores(logits, ahead=0)

    def verify(self, scores, draft_token_ids, drawn_from):
        """Accept, recover: a `VerifyOutput`. The random words of every drafted row are spent, also of rejected ones."""
        if self.greedy:
            return verify_greedy(arg_max(scores), draft_token_ids)
        verified = verify_from_logits(
            scores, drawn_from.pop("draft_logits", None), draft_token_ids, self.rule, sampling=self.sampling,
            budget=self.left, seed=self.seed, offset=self.offset, backend=self.backend, **drawn_from,
        )  # fmt: skip
        if self.left is not None:
            self.left = self.left - verified.spent
        # Of a coupled draw the words are those of the token's position, whatever was drafted.
        coupled = isinstance(self.rule, Coupled)
        self.offset += (verified.token_ids >= 0).sum(1) if coupled else self.batch.num_drafts + 1
        return verified


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
