"""How the command decodes: the rule, the drafts, sampling, and where it ends."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..contract import check_budget
from ..decoding.keywords import NUM_ASSISTANT_TOKENS
from ..definition import MAX_DRAFT_TOKENS
from ..rules import RULES, Rule, given, rebuild, resolve_rule
from ..sampling import SETTINGS as SAMPLING
from .chat import Tokenizer

Backend = Literal["triton", "torch"] | None


@dataclass(frozen=True)
class RunSettings:
    """How to decode. Raises ValueError or TypeError, naming what came and what to do.

    stop: texts that end the new one, as `generate`'s stop_strings.
    named: what the rule was asked for by, its name and strength, where these are not the rule's own (lenience).
    """

    rule: Rule
    seed: int
    num_assistant_tokens: int = NUM_ASSISTANT_TOKENS
    prompt_lookup_num_tokens: int | None = None
    max_new_tokens: int = 128
    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_temperature: float | None = None
    budget: float | None = None
    stop: tuple[str, ...] = ()
    backend: Backend = None
    named: tuple[str, float | None] | None = None

    def __post_init__(self):
        self._check_counts()
        self._check_sampling()
        self._check_draft_temperature()
        self._check_budget()
        if "" in self.stop:
            raise ValueError("--stop is empty: give a text to stop at")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")

    def _check_counts(self) -> None:
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

    def _check_sampling(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            advice = ": use --greedy for the most likely tokens" if self.temperature == 0 else ""
            raise ValueError(f"temperature must be above 0 and finite, got {self.temperature}{advice}")
        if self.top_k < 0:
            raise ValueError(f"top-k must be at least 0 (0 keeps every token), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be above 0 and at most 1 (1 keeps every token), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min-p must be in [0, 1] (0 keeps every token), got {self.min_p}")

    def _check_draft_temperature(self) -> None:
        if self.draft_temperature is None:
            return
        if not (self.draft_temperature >= 0 and math.isfinite(self.draft_temperature)):
            raise ValueError(
                f"draft-temperature must be finite and at least 0 (0: greedy drafts), got {self.draft_temperature}"
            )
        if self.prompt_lookup_num_tokens is not None:
            raise ValueError("--draft-temperature is for a draft model, and prompt lookup has none: leave it out")

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        if not (self.budget >= 0 and math.isfinite(self.budget)):
            raise ValueError(f"budget must be finite and at least 0 nats (0 is lossless), got {self.budget}")
        check_budget(self.rule)

    @property
    def rule_as_given(self) -> tuple[str, float | None]:
        """The name and the strength by which the rule is reported."""
        return (self.rule.name, next(iter(given(self.rule).values()), None)) if self.named is None else self.named

    def keywords(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Those of `generate` and `speculative_generate`."""
        keywords: dict[str, Any] = {"do_sample": not self.greedy, "max_new_tokens": self.max_new_tokens}
        if not self.greedy:
            keywords |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            if self.min_p:  # else transformers sorts each row for nothing
                keywords["min_p"] = self.min_p
        if self.stop:
            keywords |= {"stop_strings": list(self.stop), "tokenizer": tokenizer}
        return keywords

    def to_dict(self) -> dict[str, Any]:
        """Everything above, and the rule's strength, ready for JSON; what a run has no use for is None.

        delta: the strength again where the rule calls it so, else None.
        """
        name, strength = self.rule_as_given
        values = asdict(self) | {"rule": name, "strength": strength, "delta": given(self.rule).get("delta")}
        del values["named"]
        if self.prompt_lookup_num_tokens is not None:
            values["num_assistant_tokens"] = None
        if self.greedy:
            values |= dict.fromkeys(("rule", "strength", "delta", "seed", "draft_temperature", "budget", *SAMPLING))
        return values


def make_rule(name: str, strength: float | None = None, delta: float | None = None) -> Rule:
    """A rule from its name and its strength, None: the default. Raises ValueError or TypeError.

    delta: the strength, too, of a rule that calls it so.
    """
    rule = resolve_rule(name)
    if strength is None and delta is None:
        return rule
    if strength is not None and delta is not None:
        raise ValueError("--strength and --delta are both given: leave one out")
    called, option = RULES[name].strength, "--strength" if delta is None else "--delta"
    if called is None:
        raise ValueError(f"rule {name} has no strength: leave out {option}")
    if delta is not None and called != "delta":
        raise ValueError(f"rule {name} has no delta, its strength is {called}: use --strength")
    return rebuild(name, [strength if delta is None else delta])


def name_rule(name: str, strength: float | None) -> tuple[str, float | None] | None:
    """`RunSettings.named` of a rule that was made by `make_rule`: None where its own name and strength say the same."""
    if name == resolve_rule(name).name:
        return None
    return name, RULES[name].default_strength if strength is None else strength
