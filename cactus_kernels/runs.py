"""Decoding from text to text, as the command does it: a pair of models, settings, and what a run gave and took."""

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .assets import embedded_pair
from .chat import end_of_turn
from .decoding.cache.support import check_rollback, max_positions
from .decoding.generate import speculative_generate
from .decoding.keywords import NUM_ASSISTANT_TOKENS
from .decoding.models import check_same_tokenizer
from .decoding.outputs import TextStream
from .decoding.prepared import eos_ids
from .decoding.stats import GenerationStats
from .rules import RULES, Rule, SpS, given, resolve_rule, strength_name
from .verify import MAX_DRAFT_TOKENS

DEFAULT_PROMPT = "Question: Maria has 5 boxes of pencils."
DTYPES = ("auto", "float32", "bfloat16", "float16")
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Pair:
    """A target, its draft (None with prompt lookup) and their tokenizer, loaded; and the names they were asked for by."""

    model: torch.nn.Module
    assistant_model: torch.nn.Module | None
    tokenizer: object
    model_name: str
    assistant_name: str

    @property
    def models(self) -> tuple:
        return (self.model,) if self.assistant_model is None else (self.model, self.assistant_model)

    def to_dict(self) -> dict:
        """What was loaded and how, ready for JSON."""
        return {
            "model": self.model_name,
            "draft": self.assistant_name,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True)
class Settings:
    """How to decode. Raises ValueError or TypeError, naming what came and what to do."""

    rule: Rule
    seed: int
    num_assistant_tokens: int = NUM_ASSISTANT_TOKENS
    prompt_lookup_num_tokens: int | None = None
    max_new_tokens: int = 128
    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    backend: str | None = None

    def __post_init__(self):
        for name in ("num_assistant_tokens", "prompt_lookup_num_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_DRAFT_TOKENS:
                raise ValueError(f"{name.replace('_', '-')} must be in 1 .. {MAX_DRAFT_TOKENS}, got {value}")
        if self.prompt_lookup_num_tokens is not None and self.num_assistant_tokens != NUM_ASSISTANT_TOKENS:
            raise ValueError(
                "--prompt-lookup-num-tokens and --num-assistant-tokens are both given: leave the latter out"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max-new-tokens must be at least 1, got {self.max_new_tokens}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            advice = ": use --greedy for the most likely tokens" if self.temperature == 0 else ""
            raise ValueError(f"temperature must be above 0 and finite, got {self.temperature}{advice}")
        if self.top_k < 0:
            raise ValueError(f"top-k must be at least 0 (0 keeps every token), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be above 0 and at most 1 (1 keeps every token), got {self.top_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")

    def to_dict(self) -> dict:
        """Everything above, and the rule's strength, ready for JSON; what a run has no use for is None.

        delta: the strength again where the rule calls it so, else None.
        """
        rule = given(self.rule)
        values = asdict(self) | {"rule": self.rule.name, "strength": next(iter(rule.values()), None)}
        values["delta"] = rule.get("delta")
        if self.prompt_lookup_num_tokens is not None:
            values["num_assistant_tokens"] = None
        if self.greedy:
            values |= dict.fromkeys(("rule", "strength", "delta", "temperature", "top_k", "top_p", "seed"))
        return values


@dataclass(frozen=True)
class Run:
    """One continuation of a prompt. `stats` is None for plain decoding."""

    decoding: str
    text: str
    token_ids: list[int]
    seconds: float
    stats: GenerationStats | None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        return self.stats.tokens_per_forward if self.stats else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """None where nothing was drafted."""
        return self.stats and self.stats.acceptance_rate

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds in drafting, in the target, in verification, and the rest."""
        stats = self.stats
        parts = {"draft": stats.draft_seconds, "target": stats.target_seconds, "verify": stats.verify_seconds}
        return parts | {"rest": max(0.0, self.seconds - sum(parts.values()))}

    def to_dict(self) -> dict:
        return {
            "decoding": self.decoding,
            "text": self.text,
            "tokens": len(self.token_ids),
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_forward": self.tokens_per_forward,
            "acceptance_rate": self.acceptance_rate,
            "stats": self.stats and self.stats.to_dict(),
        }


def check_prompt(prompt: str) -> None:
    """Raises ValueError for a prompt that no tokenizer takes."""
    if not prompt.strip():
        raise ValueError("the prompt is empty: give some text")
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ValueError("the prompt is not UTF-8")


def make_rule(name: str, strength: float | None = None, delta: float | None = None) -> Rule:
    """A rule from its name and its strength, None: the default. Raises ValueError or TypeError.

    delta: the strength, too, of a rule that calls it so.
    """
    rule = resolve_rule(name)
    if strength is None and delta is None:
        return rule
    if strength is not None and delta is not None:
        raise ValueError("--strength and --delta are both given: leave one out")
    called, option = strength_name(name), "--strength" if delta is None else "--delta"
    if called is None:
        raise ValueError(f"rule {name} has no strength: leave out {option}")
    if delta is not None and called != "delta":
        raise ValueError(f"rule {name} has no delta, its strength is {called}: use --strength")
    return RULES[name](strength if delta is None else delta)


def find_device(name: str | None) -> torch.device:
    """The device of that name; None: a GPU where there is one. Raises ValueError where it cannot be had."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device must be cpu, cuda or cuda:0, cuda:1, ..., got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name} is not there: torch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    return torch.device(name)


def find_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """A dtype from its name; "auto" is float32 on a CPU and the checkpoint's own on a GPU. Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def load_pair(model_name: str | None, assistant_name: str | None, dtype, device: torch.device, lookup=False) -> Pair:
    """Two checkpoints by their directories or hub ids, or the embedded pair. Raises ValueError, naming what is wrong.

    lookup: whether drafts come from the text, so that there is no draft model.
    """
    if lookup and assistant_name is not None:
        raise ValueError("--draft and --prompt-lookup-num-tokens are both given: leave one out")
    if not lookup and (model_name is None) != (assistant_name is None):
        given, missing = ("--model", "--draft") if assistant_name is None else ("--draft", "--model")
        raise ValueError(f"{given} needs {missing}: give both, or neither for the embedded pair")
    if model_name is None:
        model, assistant_model, tokenizer = embedded_pair(dtype=dtype, device=device)
        pair = Pair(model, assistant_model, tokenizer, "embedded target", "embedded draft")
        if lookup:
            pair = replace(pair, assistant_model=None, assistant_name="prompt lookup")
    elif lookup:
        _load(AutoConfig, model_name)
        tokenizer = _load(AutoTokenizer, model_name)
        model = _load(AutoModelForCausalLM, model_name, dtype=dtype).to(device).eval()
        pair = Pair(model, None, tokenizer, model_name, "prompt lookup")
    else:
        # Configs and tokenizers first: they are small, and most mistakes show there.
        for name in (model_name, assistant_name):
            _load(AutoConfig, name)
        tokenizer, assistant_tokenizer = (_load(AutoTokenizer, name) for name in (model_name, assistant_name))
        check_same_tokenizer(tokenizer, assistant_tokenizer)
        models = (_load(AutoModelForCausalLM, name, dtype=dtype) for name in (model_name, assistant_name))
        model, assistant_model = (m.to(device).eval() for m in models)
        pair = Pair(model, assistant_model, tokenizer, model_name, assistant_name)
    for m in pair.models:
        check_rollback(m)
        # Of a checkpoint's own settings only the special tokens count: sampling is by the settings of the run.
        eos = m.generation_config.eos_token_id
        eos = pair.tokenizer.eos_token_id if eos is None else eos
        pad = pair.tokenizer.pad_token_id
        pad = pad if pad is not None or eos is None else eos if isinstance(eos, int) else eos[0]
        m.generation_config = GenerationConfig(
            bos_token_id=m.generation_config.bos_token_id, eos_token_id=eos, pad_token_id=pad
        )
    return pair


def end_answers(pair: Pair) -> None:
    """Has the pair end where its chat template ends an assistant's turn, too."""
    end, config = end_of_turn(pair.tokenizer), pair.model.generation_config
    ids = eos_ids(config)
    if end is not None and end not in ids:
        config.eos_token_id = [*ids, end]
        config.pad_token_id = end if config.pad_token_id is None else config.pad_token_id


def encode(pair: Pair, prompt: str, settings: Settings, add_special_tokens: bool = True) -> torch.Tensor:
    """int64 [1, P]. Raises ValueError for a prompt that leaves no room for the new tokens.

    add_special_tokens: as in tokenizers; False where the prompt holds them, as what a chat template writes.
    """
    ids = pair.tokenizer(prompt, return_tensors="pt", add_special_tokens=add_special_tokens).input_ids
    limits = [max_positions(m) for m in pair.models]
    limit = min((n for n in limits if n is not None), default=2**63)
    room = limit - ids.shape[1]
    if settings.max_new_tokens > room:
        advice = f"use --max-new-tokens {room} or less" if room > 0 else "shorten it"
        raise ValueError(
            f"the prompt is too long: {ids.shape[1]} tokens and {settings.max_new_tokens} new ones are more than the "
            f"{limit} positions of the models: {advice}"
        )
    return ids.to(pair.model.device)


def run_plain(pair: Pair, ids: torch.Tensor, settings: Settings) -> Run:
    """The target alone, one token a forward pass: `model.generate`."""

    def decode():
        with torch.random.fork_rng(devices=[pair.model.device] if pair.model.device.type == "cuda" else []):
            torch.manual_seed(settings.seed)
            return pair.model.generate(ids, attention_mask=torch.ones_like(ids), **_sampling(settings))

    sequences, seconds = _timed(decode, pair.model.device)
    return _run("plain", pair, ids, sequences, seconds, None)


def run_speculative(pair: Pair, ids: torch.Tensor, settings: Settings, write=None) -> Run:
    """Draft and verification. `write` is called with pieces of text as they are accepted."""

    def decode():
        return speculative_generate(
            pair.model,
            ids,
            attention_mask=torch.ones_like(ids),  # a template may hold the padding id
            assistant_model=pair.assistant_model,
            rule=settings.rule,
            num_assistant_tokens=settings.num_assistant_tokens,
            prompt_lookup_num_tokens=settings.prompt_lookup_num_tokens,
            seed=settings.seed,
            backend=settings.backend,
            streamer=write and TextStream(pair.tokenizer, write),
            return_dict_in_generate=True,
            **_sampling(settings),
        )

    out, seconds = _timed(decode, pair.model.device)
    label = "speculative" if settings.greedy else settings.rule.name
    return _run(label, pair, ids, out.sequences, seconds, out.stats)


def compare(pair: Pair, ids: torch.Tensor, settings: Settings) -> list[Run]:
    """Plain decoding first, then SpS and Cactus (greedy: speculative decoding, the same for every rule); all warmed up.

    All go on to `max_new_tokens`, past the end of the text, so that as many tokens are timed of each.
    """
    rules = [settings.rule] if settings.greedy else [SpS(), settings.rule]
    end, pair.model.generation_config.eos_token_id = pair.model.generation_config.eos_token_id, None
    try:
        for s in (_short(settings), settings):
            runs = [run_plain(pair, ids, s), *(run_speculative(pair, ids, replace(s, rule=rule)) for rule in rules)]
    finally:
        pair.model.generation_config.eos_token_id = end
    return runs


def warm_up(pair: Pair, ids: torch.Tensor, settings: Settings) -> None:
    """A few tokens, so that compilation and first allocations are not counted in the run that follows."""
    run_speculative(pair, ids, _short(settings))


def why_slower(runs: list[Run]) -> str | None:
    """What the figures say if a speculative run was slower than the plain one before it, else None."""
    plain, *others = runs
    slower = [run for run in others if run.tokens_per_second < plain.tokens_per_second]
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


def _load(loader, name, **kwargs):
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ValueError(f"cannot load {name!r}: there is no such directory")
    try:
        return loader.from_pretrained(name, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"cannot load {name!r}: {str(error).strip().splitlines()[0]}") from error


def _short(settings):
    return replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))


def _sampling(settings):
    if settings.greedy:
        return {"do_sample": False, "max_new_tokens": settings.max_new_tokens}
    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    return {"do_sample": True} | {name: getattr(settings, name) for name in names}


def _timed(decode, device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    out = decode()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out, time.perf_counter() - start


def _run(decoding, pair, ids, sequences, seconds, stats):
    token_ids = sequences[0, ids.shape[1] :].tolist()
    pieces = []
    stream = TextStream(pair.tokenizer, pieces.append)
    stream.put(ids)
    stream.put(torch.tensor(token_ids))
    stream.end()
    return Run(decoding, "".join(pieces), token_ids, seconds, stats)
