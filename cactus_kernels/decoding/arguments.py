"""What a caller gave to the loop, before anything is checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arguments:
    """The arguments of `speculative_generate`, which documents them; `keywords` are those that go to `generate`.

    expanded: whether `generate` has repeated the rows already, and made the mask.
    """

    model: Any
    input_ids: Any
    assistant_model: Any
    rule: Any
    budget: Any
    num_assistant_tokens: Any
    draft_temperature: Any
    seed: Any
    backend: Any
    generation_config: Any
    logits_processor: Any
    stopping_criteria: Any
    streamer: Any
    tokenizer: Any
    assistant_tokenizer: Any
    keywords: Mapping[str, Any] = field(default_factory=dict)
    expanded: bool = False

    @property
    def looks_up(self) -> bool:
        """Whether drafts come from the text, and from no model."""
        return self.setting("prompt_lookup_num_tokens") is not None

    def setting(self, name: str) -> Any:
        """What `generate` will go by: its keyword, else the config passed, else the model's own; None: nobody says."""
        if name in self.keywords:
            return self.keywords[name]
        value = getattr(self.generation_config, name, None)
        own = getattr(self.model, "generation_config", None)
        return getattr(own, name, None) if value is None else value

    def drafting(self, name: str, filled_in: Any) -> Any:
        """A setting of drafting: its keyword, else the config passed, else the draft's own, else the model's; None: nobody says.

        filled_in: what `generate` makes of it in a config that it has prepared, where nobody says.
        """
        if name in self.keywords:
            return self.keywords[name]
        models = (self.assistant_model, self.model)
        draft, own = (getattr(getattr(each, "generation_config", None), name, None) for each in models)
        passed = getattr(self.generation_config, name, None)
        if self.expanded and passed in (filled_in, own):
            passed = None
        return next((value for value in (passed, draft, own) if value is not None), None)
