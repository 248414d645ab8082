"""Decoding from text to text, as the command does it: what a run gave and took."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..decoding.cache.support import table_positions
from ..decoding.generate import SpeculativeOutput, speculative_generate
from ..decoding.outputs import TextStream
from ..decoding.stats import GenerationStats
from ..rules import SpS
from .pair import ModelPair
from .settings import RunSettings

DEFAULT_PROMPT = "Question: Maria has 5 boxes of pencils."
WARM_UP_TOKENS = 16

Write = Callable[[str], None]
Decoded = TypeVar("Decoded")


@dataclass(frozen=True)
class Run:
    """One continuation of a prompt; of plain decoding, unless it is a `SpeculativeRun`."""

    decoding: str
    text: str
    token_ids: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds

    @property
    def tokens_per_forward(self) -> float | None:
        """None where nothing was decoded."""
        return 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """None where nothing was drafted."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Everything above, ready for JSON."""
        return {
            "decoding": self.decoding,
            "text": self.text,
            "tokens": len(self.token_ids),
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_forward": self.tokens_per_forward,
            "acceptance_rate": self.acceptance_rate,
            "stats": None,
        }


@dataclass(frozen=True)
class SpeculativeRun(Run):
    stats: GenerationStats

    @property
    def tokens_per_forward(self) -> float | None:
        return self.stats.tokens_per_forward

    @property
    def acceptance_rate(self) -> float | None:
        return self.stats.acceptance_rate

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds in drafting, in the target, in verification, and the rest."""
        stats = self.stats
        parts = {"draft": stats.draft_seconds, "target": stats.target_seconds, "verify": stats.verify_seconds}
        return parts | {"rest": max(0.0, self.seconds - sum(parts.values()))}

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"stats": self.stats.to_dict()}


def check_prompt(prompt: str) -> None:
    """Raises ValueError for a prompt that no tokenizer takes."""
    if not prompt.strip():
        raise ValueError("the prompt is empty: give some text")
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ValueError("the prompt is not UTF-8")


def encode(pair: ModelPair, prompt: str, settings: RunSettings, add_special_tokens: bool = True) -> torch.Tensor:
    """int64 [1, P]. Raises ValueError for a prompt that leaves no room for the new tokens.

    add_special_tokens: as in tokenizers; False where the prompt holds them, as what a chat template writes.
    """
    ids = pair.tokenizer(prompt, return_tensors="pt", add_special_tokens=add_special_tokens).input_ids
    limit = table_positions(pair.model)
    # The last token is never read.
    room = math.inf if limit is None else limit + 1 - ids.shape[1]
    if settings.max_new_tokens > room:
        advice = f"use --max-new-tokens {room} or less" if room > 0 else "shorten it"
        raise ValueError(
            f"the prompt is too long: {ids.shape[1]} tokens and {settings.max_new_tokens} new ones are more than the "
            f"{limit} positions of the target: {advice}"
        )
    return ids.to(pair.model.device)


def run_plain(pair: ModelPair, ids: torch.Tensor, settings: RunSettings) -> Run:
    """The target alone, one token a forward pass: `model.generate`."""

    def decode() -> torch.Tensor:
        with torch.random.fork_rng(devices=[pair.model.device] if pair.model.device.type == "cuda" else []):
            torch.manual_seed(settings.seed)
            return pair.model.generate(ids, attention_mask=torch.ones_like(ids), **settings.keywords(pair.tokenizer))

    sequences, seconds = _timed(decode, pair.model.device)
    return Run("plain", *_text(pair, ids, sequences), seconds)


def run_speculative(
    pair: ModelPair, ids: torch.Tensor, settings: RunSettings, write: Write | None = None
) -> SpeculativeRun:
    """Draft and verification. `write` is called with pieces of text as they are accepted."""

    def decode() -> SpeculativeOutput:
        out = speculative_generate(
            pair.model,
            ids,
            attention_mask=torch.ones_like(ids),  # a template may hold the padding id
            assistant_model=pair.assistant_model,
            rule=None if settings.greedy else settings.rule,
            num_assistant_tokens=None if settings.prompt_lookup_num_tokens else settings.num_assistant_tokens,
            prompt_lookup_num_tokens=settings.prompt_lookup_num_tokens,
            budget=settings.budget,
            draft_temperature=settings.draft_temperature,
            seed=settings.seed,
            backend=settings.backend,
            streamer=write and TextStream(pair.tokenizer, write),
            return_dict_in_generate=True,
            **settings.keywords(pair.tokenizer),
        )
        assert isinstance(out, SpeculativeOutput)  # asked for by return_dict_in_generate
        return out

    out, seconds = _timed(decode, pair.model.device)
    assert out.stats is not None  # so is this
    name, strength = settings.rule_as_given
    stats = replace(out.stats, rule=name, strengths=[] if strength is None else [strength])
    label = "speculative" if settings.greedy else name
    return SpeculativeRun(label, *_text(pair, ids, out.sequences), seconds, stats)


def compare(pair: ModelPair, ids: torch.Tensor, settings: RunSettings) -> tuple[Run, list[SpeculativeRun]]:
    """Plain decoding first, then SpS and Cactus (greedy: speculative decoding, the same for every rule); all warmed up.

    All go on to `max_new_tokens`, past the end of the text, so that as many tokens are timed of each.
    """
    rules = [settings.rule] if settings.greedy else [SpS(), settings.rule]
    end, pair.model.generation_config.eos_token_id = pair.model.generation_config.eos_token_id, None
    try:
        for s in (_short(settings), settings):
            plain = run_plain(pair, ids, s)
            speculative = [run_speculative(pair, ids, replace(s, rule=rule, named=None)) for rule in rules]
    finally:
        pair.model.generation_config.eos_token_id = end
    return plain, speculative


def warm_up(pair: ModelPair, ids: torch.Tensor, settings: RunSettings) -> None:
    """A few tokens, so that compilation and first allocations are not counted in the run that follows."""
    run_speculative(pair, ids, _short(settings))


def why_slower(plain: Run, speculative: list[SpeculativeRun]) -> str | None:
    """What the figures say if a speculative run was slower than the plain one, else None."""
    slower = [run for run in speculative if run.tokens_per_second < plain.tokens_per_second]
    if not slower:
        return None
    worst = min(slower, key=lambda run: run.tokens_per_second)
    forwards = worst.stats.target_forwards
    whole, draft, target, plain_token = (
        f"{1000 * seconds:.1f} ms"
        for seconds in (
            worst.seconds / forwards,
            worst.stats.draft_seconds / forwards,
            worst.stats.target_seconds / forwards,
            plain.seconds / len(plain.token_ids),
        )
    )
    return (
        f"Slower than plain decoding here: {' and '.join(run.decoding for run in slower)}. With {worst.decoding}, a round "
        f"takes {whole} ({draft} of it drafting, {target} in the target) and gives {worst.tokens_per_forward:.1f} tokens; a "
        f"plain token takes {plain_token}. Speculation pays where a draft is far cheaper than the target and scoring "
        "several tokens costs no more than one, as with large models on a GPU. Small models, on a CPU above all, spend "
        "their time in calls whatever these compute, so that neither holds."
    )


def _short(settings: RunSettings) -> RunSettings:
    return replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))


def _timed(decode: Callable[[], Decoded], device: torch.device) -> tuple[Decoded, float]:
    """What `decode` returns, and the seconds that it took, those of work that it left to a GPU among them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    out = decode()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out, time.perf_counter() - start


def _text(pair: ModelPair, ids: torch.Tensor, sequences: torch.Tensor) -> tuple[str, list[int]]:
    """What follows the prompt in the first of the sequences, as text and as tokens."""
    token_ids = sequences[0, ids.shape[1] :].tolist()
    pieces: list[str] = []
    stream = TextStream(pair.tokenizer, pieces.append)
    stream.put(ids)
    stream.put(torch.tensor(token_ids, dtype=torch.int64, device="cpu"))
    stream.end()
    return "".join(pieces), token_ids
