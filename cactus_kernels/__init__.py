"""Speculative sampling for large language models: Cactus and SpS verification in one launch, and the loop around it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import law
from .rows import SampleOutput, draw, row_stats, sample
from .rules import (
    AdaptiveCactus,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Lenience,
    Mentored,
    Optimal,
    Rule,
    SpS,
    TopK,
    Typical,
)
from .sampling import RowStats, Sampling
from .verify import VerifyOutput, verify, verify_from_logits

if TYPE_CHECKING:  # what is loaded lazily, for type checkers
    from .assets import embedded_pair
    from .decoding.drafters.skip_layers import skip_layers
    from .decoding.generate import SpeculativeOutput, custom_generate, speculative_generate
    from .decoding.stats import GenerationStats

__version__ = "0.1.0"

# Most of these need transformers, which takes seconds to import: loaded when first asked for.
_LAZY = {
    "GenerationStats": "decoding.stats",
    "SpeculativeOutput": "decoding.generate",
    "custom_generate": "decoding.generate",
    "embedded_pair": "assets",
    "skip_layers": "decoding.drafters.skip_layers",
    "speculative_generate": "decoding.generate",
}

__all__ = [
    "AdaptiveCactus",
    "Cactus",
    "Capped",
    "Coupled",
    "GenerationStats",
    "Interpolation",
    "Lenience",
    "Mentored",
    "Optimal",
    "RowStats",
    "Rule",
    "SampleOutput",
    "Sampling",
    "SpS",
    "SpeculativeOutput",
    "TopK",
    "Typical",
    "VerifyOutput",
    "custom_generate",
    "draw",
    "embedded_pair",
    "law",
    "row_stats",
    "sample",
    "skip_layers",
    "speculative_generate",
    "verify",
    "verify_from_logits",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
