"""Speculative sampling for large language models: Cactus and SpS verification in one launch, and the loop around it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import law
    from .contract import SampleOutput, VerifyOutput
    from .decoding.drafters.skip_layers import skip_layers
    from .decoding.generate import SpeculativeOutput, custom_generate, speculative_generate
    from .decoding.stats import GenerationStats
    from .drawing import draw, row_stats, sample
    from .kernels.scratch import new_scratch
    from .rules import (
        AdaptiveCactus,
        Block,
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
    from .tools.pair import embedded_pair
    from .verification import verify, verify_from_logits

__version__ = "0.1.0"

# Where the public names are. Each module is loaded when one of its names is first asked for: torch takes a second to import,
# transformers several more.
_HOMES = {
    "contract": ("SampleOutput", "VerifyOutput"),
    "decoding.drafters.skip_layers": ("skip_layers",),
    "decoding.generate": ("SpeculativeOutput", "custom_generate", "speculative_generate"),
    "decoding.stats": ("GenerationStats",),
    "drawing": ("draw", "row_stats", "sample"),
    "kernels.scratch": ("new_scratch",),
    "rules": (
        "AdaptiveCactus", "Block", "Cactus", "Capped", "Coupled", "Interpolation", "Lenience", "Mentored", "Optimal",
        "Rule", "SpS", "TopK", "Typical",
    ),
    "sampling": ("RowStats", "Sampling"),
    "tools.pair": ("embedded_pair",),
    "verification": ("verify", "verify_from_logits"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdaptiveCactus",
    "Block",
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
    "new_scratch",
    "row_stats",
    "sample",
    "skip_layers",
    "speculative_generate",
    "verify",
    "verify_from_logits",
]


def __getattr__(name: str) -> Any:
    if name == "law":
        return import_module(".law", __name__)
    if name in _HOME_OF:
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
