"""`speculative_generate`: draft, score, verify, commit, over Hugging Face models."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.streamers import BaseStreamer

from ..rules import Rule
from .arguments import Arguments
from .bad_scores import raise_if_bad
from .batch import Batch, Emitted
from .cache.handover import CACHE_NAME, brought, give, take
from .cache.support import check_length
from .call import Call, check_call
from .clock import Clock
from .drafters.drafts import Drafter
from .drafters.model import ModelDrafter
from .drafters.prompt_lookup import PromptLookup
from .drafters.sampler import DraftSampler
from .images import image_inputs
from .keywords import GenerateKeywords
from .outputs import Streams, TokenScores
from .prepared import Callers, Prepared, pad_id
from .processors import Calls, Processors, callers_processors
from .scorer import Scored, Scorer, Target, vocab_size_of
from .state import by_row
from .stats import GenerationStats, cache_bytes, peak_memory
from .stopping import Stopping, callers_criteria
from .verifier import Verifier

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, and `stats` (a `GenerationStats`)."""

    stats: GenerationStats | None = None


def speculative_generate(  # noqa: PLR0913 (keywords of `generate` and the loop's own)
    model: torch.nn.Module,
    input_ids: torch.Tensor | None = None,
    *,
    assistant_model: torch.nn.Module | None = None,
    rule: Rule | str | None = None,
    budget: float | Sequence[float] | torch.Tensor | None = None,
    num_assistant_tokens: int | list[int] | tuple[int, ...] | None = None,
    draft_temperature: float | None = None,
    seed: int | list[int] | tuple[int, ...] | torch.Tensor | None = None,
    backend: Literal["triton", "torch"] | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence[StoppingCriteria] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    streamer: BaseStreamer | Sequence[BaseStreamer] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    **kwargs: "Unpack[GenerateKeywords]",
) -> torch.Tensor | SpeculativeOutput:
    """Generate with drafts and fused verification: a drop-in for `model.generate(..., assistant_model=...)`.

    Batches of any size; each request accepts its own number of tokens and ends alone. The default rule is lossy: with
    `rule="sps"` sampled tokens follow the target exactly, with `do_sample=False` they are those of plain greedy decoding
    whatever the rule (up to ties that a model's own rounding breaks: scoring several tokens at once differs in last bits,
    which shows in bf16). Processors and criteria are prepared by transformers, and shape draft and target alike; those
    that read the text are called for one row at a time, [1, L] without padding, as if it were generated alone; what they
    remember follows the tokens that the row keeps (docs/generate.md).

    Args:
        model: the target, a decoder-only causal LM with eager, sdpa, flex or flash attention and a cache that can roll back.
        input_ids: int64 [B, P], left-padded; rows of different lengths need `attention_mask`.
        assistant_model: the draft, of the same kind and with the same tokenizer; `skip_layers(model, ...)` makes one of
            the target's own weights. Without one, prompt_lookup_num_tokens drafts from the row's own text.
        rule: a `Rule` such as `Cactus(0.75)` or its name, such as "sps" or "cactus" (delta 1); the README has a table. None:
            "cactus", with a `UserWarning` where tokens are sampled. A lossy rule that is named without sampling warns too.
        budget: nats that each text may spend, a number or a list with one a row: then no text is more than e^budget times as
            likely as under the (processed) target, and the KL divergence of the law of whole texts is at most the budget
            (docs/rules.md). `stats.spent` tells what each text spent. For SpS, Cactus, AdaptiveCactus, Capped, Interpolation.
        num_assistant_tokens: tokens drafted a round, 1 to 64; or a list with one number a row, which may be 0. None: what the
            generation configs say (the one passed, the draft's, the model's), else 5.
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
    arguments = Arguments(
        model, input_ids, assistant_model, rule, budget, num_assistant_tokens, draft_temperature, seed, backend,
        generation_config, logits_processor, stopping_criteria, streamer, tokenizer, assistant_tokenizer, kwargs,
    )  # fmt: skip
    call = check_call(arguments)

    # Names of no parameters, so that `generate` takes no keyword of the caller's for one of the loop's own.
    def decode(*args, **prepared):
        return _decode(call, Prepared.of(Callers(logits_processor, prefix_allowed_tokens_fn), *args, **prepared))

    return arguments.model.generate(
        call.input_ids,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=call.stopping_criteria,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        custom_generate=decode,
        **call.keywords,
    )


def custom_generate(  # noqa: PLR0913 (`generate` passes on what stands here by name)
    model,
    input_ids,
    *,
    logits_processor,
    stopping_criteria,
    generation_config,
    assistant_model=None,
    rule=None,
    budget=None,
    num_assistant_tokens=None,
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
    arguments = Arguments(
        model, input_ids, assistant_model, rule, budget, num_assistant_tokens, draft_temperature, seed, backend,
        generation_config, logits_processor, callers_criteria(stopping_criteria, generation_config), streamer, tokenizer,
        assistant_tokenizer, {name: value for name, value in settings.items() if value is not None}, expanded=True,
    )  # fmt: skip
    call = check_call(arguments)
    prepared = Prepared.of(
        callers_processors(model, logits_processor, generation_config, input_ids, attention_mask),
        model,
        call.input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        **model_kwargs,
    )
    return _decode(call, prepared)


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


def _decode(call: Call, prepared: Prepared) -> torch.Tensor | SpeculativeOutput:
    """Decode what `generate` has prepared (`num_return_sequences` rows expanded too)."""
    prepared.check()
    decoder = _Decoder(call, prepared)
    batch = decoder.batch
    stats = GenerationStats.of(call.rule, batch.size, call.budget)
    kept = TokenScores(prepared.generation_config, batch.size, decoder.processors.warpers)
    decoder.read_images(prepared.images)
    streams = Streams(call.streamer, prepared.input_ids, batch.prompts)
    for scored, emitted in decoder.rounds():
        stats.count(emitted)
        kept.put(scored, emitted)
        streams.put(emitted, batch.remaining)
    return _output(call, prepared, decoder, kept, decoder.measured(stats))


class _Decoder:
    """The parts that a call is decoded by."""

    def __init__(self, call: Call, prepared: Prepared):
        model = prepared.model
        self.batch = Batch(
            prepared.input_ids, prepared.attention_mask, prepared.new_tokens, call.num_assistant_tokens,
            call.prefill_chunk_size,
        )  # fmt: skip
        check_length(model, self.batch.max_length)
        callers = by_row(prepared.callers.processors or [], call.stopping_criteria, self.batch.size)
        self.processors = Processors(prepared, self.batch.prompts, [processors for processors, _ in callers])
        self.stopping = Stopping(prepared, [criteria for _, criteria in callers], self.processors)
        # The first token of a round comes out in any case.
        self.scorer = Scorer(call.model, self.batch, Calls(self.processors, certain=1), vocab_size_of(model))
        sampling = self.processors.sampling if prepared.generation_config.do_sample else None
        self.verifier = Verifier(call, self.batch, sampling)
        self.drafter = self._drafter(call, sampling)
        cached = take(self.scorer.model, prepared.cache, self.batch.padding) if call.continues else 0
        self.target = Target(self.scorer, cached)
        self.clock = Clock(model.device)

    def _drafter(self, call, sampling) -> Drafter:
        batch, verifier = self.batch, self.verifier
        if call.max_ngram_size is not None:
            return PromptLookup(batch, call.max_ngram_size)
        scorer = Scorer(call.assistant_model, batch, Calls(self.processors, certain=0), self.scorer.vocab_size)
        if sampling is None:
            return ModelDrafter(scorer, None)
        if call.draft_temperature is not None:
            sampling = replace(sampling, temperature=call.draft_temperature)
        return ModelDrafter(
            scorer, DraftSampler(verifier.seed, sampling, max(batch.num_assistant_tokens), call.backend)
        )

    def read_images(self, images):
        """The target's pass over a prompt with images, where there are any."""
        if images:
            with self.clock.time("target"):
                self.target.read_prompt(images)

    def rounds(self) -> Iterator[tuple[Scored, list[Emitted]]]:
        """Draft, score, verify, commit, until every row has ended: of each round the target's scores, and what rows got."""
        batch, clock = self.batch, self.clock
        while batch.active:
            self.target.plan()
            with clock.time("draft"):
                drafts = self.drafter.draft(self.verifier.offset)
            with clock.time("target"):
                scored = self.target.score()
            with clock.time("verify"):
                verified = self.verifier.verify(scored.scores, drafts)
            emitted = batch.emit(verified, self.stopping, scored.logits)
            raise_if_bad(batch, verified, emitted, drafts, scored)
            batch.commit(emitted)
            yield scored, emitted

    def measured(self, stats: GenerationStats) -> GenerationStats:
        """The same with what the rounds took."""
        return replace(
            stats,
            spent=self.verifier.spent,
            target_forwards=self.target.forwards,
            draft_seconds=self.clock.seconds("draft"),
            target_seconds=self.clock.seconds("target"),
            verify_seconds=self.clock.seconds("verify"),
            target_cache_bytes=cache_bytes(self.target.model),
            draft_cache_bytes=cache_bytes(self.drafter.model),
            peak_memory_bytes=peak_memory(self.batch.device),
        )


def _output(
    call: Call, prepared: Prepared, decoder: _Decoder, kept: TokenScores, stats: GenerationStats
) -> torch.Tensor | SpeculativeOutput:
    """What `generate` returns: sequences alone, or with the rest. The cache is filled where it is given back."""
    config, batch, cache = prepared.generation_config, decoder.batch, prepared.cache
    sequences = batch.sequences(prepared.input_ids, pad_id(config))
    if config.return_dict_in_generate or call.continues:
        # Up to the end of the shortest row but its last token, which no forward pass has seen.
        seen = prepared.input_ids.shape[1] + min(stats.tokens) - 1
        cache = give(decoder.target.model, cache, batch.padding, seen)
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences, scores=kept.scores(), logits=kept.logits(), stats=stats, **{CACHE_NAME: cache}
    )
