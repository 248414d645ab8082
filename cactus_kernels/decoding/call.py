"""A checked call of the loop: what `speculative_generate` was given, once nothing is wrong with it."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from .. import philox
from ..backends import choose_backend
from ..contract import check_budget
from ..definition import MAX_DRAFT_TOKENS
from ..rules import Rule, resolve_rule
from ..sampling import Sampling
from .arguments import Arguments
from .cache.handover import CACHE_NAME, check_cache
from .cache.support import CACHE_KEYWORDS
from .images import check_images
from .keywords import check_refused, check_taken, num_assistant_tokens_of
from .models import check_models, check_processes
from .prompt import check_input_ids, check_mask
from .state import check_copies
from .warn import warn_of_rule, warn_of_untried


@dataclass(frozen=True)
class Call:
    """A call that nothing is wrong with.

    Attributes:
        model: the target as it was given: `generate` hands on the one inside what `torch.compile` made.
        input_ids: int64 [B, P] on the model's device.
        budget: nats of each row, float64 [B] on the model's device; None: no budget.
        num_assistant_tokens: most drafts a round of each row, a list.
        max_ngram_size: of prompt lookup; None with a draft model.
        seed: of all rows, or int64 [B].
        continues: whether the caller brought a cache.
        keywords: those that go on to `generate`, which sees to what the loop does not.
    """

    model: Any
    assistant_model: Any
    input_ids: torch.Tensor
    rule: Rule
    budget: torch.Tensor | None
    num_assistant_tokens: list[int]
    max_ngram_size: int | None
    draft_temperature: float | None
    seed: int | torch.Tensor
    backend: str | None
    stopping_criteria: StoppingCriteriaList
    streamer: Any
    continues: bool
    prefill_chunk_size: int | None
    keywords: dict[str, Any]

    def seeds(self, batch_size: int) -> torch.Tensor:
        """The seed of every row, int64 [B]."""
        if isinstance(self.seed, int):
            return philox.request_seeds(self.seed, batch_size, self.input_ids.device)
        if len(self.seed) != batch_size:
            raise ValueError(f"seed has {len(self.seed)} entries for {batch_size} rows: give one a row, or an int")
        return self.seed.to(self.input_ids.device)


def check_call(arguments: Arguments) -> Call:
    """Raises TypeError or ValueError, naming what came and what to do; RuntimeError where the backend is not to be had."""
    rule = resolve_rule("cactus" if arguments.rule is None else arguments.rule)
    _check_draft_temperature(arguments)
    _check_one_prompt(arguments)
    check_taken(arguments)
    _check_lists(arguments)
    most, max_ngram_size = _check_lookup(arguments)
    check_models(arguments)
    input_ids = check_input_ids(arguments)
    check_refused(arguments)
    check_processes(arguments)
    rows = len(input_ids) * (1 if arguments.expanded else arguments.setting("num_return_sequences") or 1)
    chunk = _check_chunk(arguments.setting("prefill_chunk_size"))
    check_images(arguments.model, input_ids, arguments.keywords, chunk)
    cache = _check_caches(arguments, rows, input_ids.shape[1])
    mask = check_mask(arguments, input_ids)
    check_copies(arguments, rows)
    criteria = _check_criteria(arguments, rows)
    _check_streamer(arguments.streamer, rows)
    _check_strengths(rule, rows, arguments.model.device)
    call = Call(
        model=arguments.model,
        assistant_model=arguments.assistant_model,
        input_ids=input_ids,
        rule=rule,
        num_assistant_tokens=_check_drafts(most, rows),
        max_ngram_size=max_ngram_size,
        draft_temperature=arguments.draft_temperature,
        budget=_check_budget(arguments.budget, rule, rows, arguments.model.device),
        seed=_check_seed(arguments.seed, rows),
        backend=arguments.backend,
        stopping_criteria=criteria,
        streamer=arguments.streamer,
        continues=cache is not None,
        prefill_chunk_size=chunk,
        keywords=_passed_on(arguments, mask, cache),
    )
    choose_backend(call.backend, arguments.model.device)
    warn_of_rule(arguments, rule)
    warn_of_untried(arguments)
    return call


def _passed_on(arguments, mask, cache):
    """The keywords that `generate` gets: without those that the loop sees to, which it would see to itself."""
    own = ("inputs", "synced_gpus", *CACHE_KEYWORDS)
    keywords = {name: value for name, value in arguments.keywords.items() if name not in own}
    keywords["attention_mask"] = mask
    if cache is not None:
        keywords[CACHE_NAME] = cache
    for name in ("prompt_lookup_num_tokens", "stop_strings"):
        if arguments.setting(name):
            keywords[name] = None
    return keywords


def _check_draft_temperature(arguments):
    if arguments.draft_temperature is None:
        return
    if isinstance(arguments.draft_temperature, torch.Tensor):
        raise TypeError("draft_temperature must be a number, one for all rows, got a tensor")
    Sampling(arguments.draft_temperature)  # checks it
    if not arguments.setting("do_sample"):
        raise ValueError("draft_temperature is for sampled drafts: pass do_sample=True, or leave it out")
    if arguments.looks_up:
        raise ValueError("draft_temperature is for a draft model, and prompt lookup has none: leave it out")


def _check_one_prompt(arguments):
    if arguments.keywords.get("inputs") is not None and arguments.input_ids is not None:
        raise ValueError("inputs and input_ids are both given: leave one out")


def _check_lists(arguments):
    for name in ("logits_processor", "stopping_criteria"):
        value = getattr(arguments, name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list, got {type(value).__name__}: wrap it in a list")


def _check_lookup(arguments):
    """Most drafts a round, as given; and the longest n-gram of prompt lookup, None with a draft model."""
    lookup = arguments.setting("prompt_lookup_num_tokens")
    if lookup is None:
        return num_assistant_tokens_of(arguments), None
    if arguments.assistant_model is not None:
        raise ValueError("prompt_lookup_num_tokens and assistant_model are both given: leave one out")
    if arguments.num_assistant_tokens is not None:
        raise ValueError("prompt_lookup_num_tokens and num_assistant_tokens are both given: leave the latter out")
    max_ngram_size = arguments.setting("max_matching_ngram_size") or 2
    _check_count("prompt_lookup_num_tokens", lookup)
    _check_count("max_matching_ngram_size", max_ngram_size, largest=None)
    return lookup, max_ngram_size


def _check_chunk(chunk):
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"prefill_chunk_size must be a positive int, got {chunk!r}")
    return chunk


def _check_caches(arguments, rows, columns):
    """The cache that the caller brought under one of its names; None: none. columns: of the prompts."""
    caches = [arguments.keywords.get(name) for name in CACHE_KEYWORDS]
    caches = [cache for cache in caches if cache is not None]
    for cache in caches:
        check_cache(cache, rows, columns)
    return caches[-1] if caches else None


def _check_criteria(arguments, rows):
    """The caller's stopping criteria, stop strings among them."""
    criteria = StoppingCriteriaList(arguments.stopping_criteria or [])
    stop_strings = arguments.setting("stop_strings")
    if stop_strings:
        if arguments.tokenizer is None:
            raise ValueError("stop_strings need the tokenizer: pass tokenizer=")
        # Here, since `generate` has no way to give the tokenizer to a custom loop.
        criteria.append(StopStringCriteria(arguments.tokenizer, stop_strings))
    unpadded = arguments.setting("pad_token_id") is None and arguments.setting("eos_token_id") is None
    if rows > 1 and unpadded and (len(criteria) or arguments.setting("max_time")):
        raise ValueError("rows that end at different lengths need padding: pass pad_token_id")
    return criteria


def _check_streamer(streamer, rows):
    if isinstance(streamer, (list, tuple)):
        if len(streamer) != rows:
            raise ValueError(f"streamer has {len(streamer)} entries for {rows} rows: give one a row")
    elif streamer is not None and rows > 1:
        raise ValueError(f"a streamer takes one row, got {rows}: pass a list with one a row, or leave it out")


def _check_strengths(rule, rows, device):
    for strength in rule.strengths:
        if not isinstance(strength, torch.Tensor):
            continue
        if len(strength) != rows:
            raise ValueError(f"{rule.name} has {len(strength)} strengths for {rows} rows: give one a row, or a number")
        if strength.device != device:
            raise ValueError(f"the strengths are on {strength.device} and the model on {device}: move them")
        if not (strength.isfinite() & (strength >= 0)).all():
            raise ValueError(f"strengths must be finite and at least 0, got {strength.tolist()}")


def _check_count(name, value, smallest=1, largest=MAX_DRAFT_TOKENS):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < smallest or (largest is not None and value > largest):
        bounds = f"at least {smallest}" if largest is None else f"in {smallest} .. {largest}"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def _check_drafts(num_assistant_tokens, rows):
    """Most drafts a round of each row, a list."""
    if not isinstance(num_assistant_tokens, (list, tuple)):
        _check_count("num_assistant_tokens", num_assistant_tokens)
        return [num_assistant_tokens] * rows
    if len(num_assistant_tokens) != rows:
        raise ValueError(
            f"num_assistant_tokens has {len(num_assistant_tokens)} entries for {rows} rows: give one a row, or an int"
        )
    for value in num_assistant_tokens:
        _check_count("num_assistant_tokens", value, smallest=0)
    return list(num_assistant_tokens)


def _check_budget(budget, rule, rows, device):
    """Nats of each row, float64 [B]; None: no budget."""
    if budget is None:
        return None
    values = budget.tolist() if isinstance(budget, torch.Tensor) else budget
    values = list(values) if isinstance(values, (list, tuple)) else [values] * rows
    if any(isinstance(b, bool) or not isinstance(b, (int, float)) for b in values):
        raise TypeError(f"budget must be a number of nats, a list with one a row or None, got {budget!r}")
    if not all(0 <= b < float("inf") for b in values):
        raise ValueError(f"a budget must be finite and at least 0 nats (0 is lossless), got {budget}")
    if len(values) != rows:
        raise ValueError(f"budget has {len(values)} entries for {rows} rows: give one a row, or a number")
    check_budget(rule)
    return torch.tensor(values, dtype=torch.float64, device=device)


def _check_seed(seed, rows):
    """The seed of all rows, drawn from torch's generator where none is given, or one of each row, int64 [B]."""
    if seed is None:
        return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu"))
    if isinstance(seed, bool) or not isinstance(seed, (int, list, tuple, torch.Tensor)):
        raise TypeError(f"seed must be an int, a list of ints or None, got {type(seed).__name__}")
    values = [seed] if isinstance(seed, int) else seed.tolist() if isinstance(seed, torch.Tensor) else list(seed)
    if not isinstance(values, list) or any(isinstance(s, bool) or not isinstance(s, int) for s in values):
        raise TypeError(f"seed must hold ints, got {seed!r}")
    if any(not -(2**63) <= s < 2**63 for s in values):
        raise ValueError(f"a seed must fit in 64 bits, got {seed}")
    if isinstance(seed, int):
        return seed
    if len(values) != rows:
        raise ValueError(f"seed has {len(values)} entries for {rows} rows: give one a row, or an int")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
