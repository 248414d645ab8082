"""What a run of speculative decoding did."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .batch import Emitted


@dataclass
class GenerationStats:
    """Counts and times of one call of `speculative_generate`; lists have one entry for each request.

    Attributes:
        rule, strengths: the rule's name and its strengths (a number, or one for each request).
        budget, spent: nats that each text might spend, and those that it did; None without a budget. A text that spent x is at
            most e^x times as likely as under the target.
        target_forwards: forward passes of the target over the batch, each followed by one verification; with images
            one more, over the prompt.
        rounds: verifications that each request took part in.
        drafted, accepted: draft tokens proposed, and of those the ones in the output. Drafts after an accepted one that ended
            the text (EOS, a stopping criterion) are not counted.
        tokens: tokens emitted: accepted ones, and one recovered or bonus token a round.
        accepted_lengths: for each request the accepted tokens of every round.
        draft_seconds, target_seconds, verify_seconds: time in drafting, in the target's forward passes with their
            processors, and in verification; on a GPU between events on the stream, on a CPU wall clock.
        target_cache_bytes, draft_cache_bytes: keys and values that the caches held at the end; 0 without a draft model.
        peak_memory_bytes: most memory that torch had on the target's device so far (`torch.cuda.max_memory_allocated`:
            reset it before a call to have it of that call); on a CPU most that the process had. None where it cannot be read.
    """

    rule: str
    strengths: list[Any]
    budget: list[float] | None = None
    spent: list[float] | None = None
    target_forwards: int = 0
    rounds: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted_lengths: list[list[int]] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    target_cache_bytes: int = 0
    draft_cache_bytes: int = 0
    peak_memory_bytes: int | None = None

    @classmethod
    def of(cls, rule, batch_size: int, budget=None) -> "GenerationStats":
        """Of a call that has not begun. budget: float64 [B], or None."""

        def zeros():
            return [0] * batch_size

        return cls(
            rule.name,
            strengths=[s.tolist() if hasattr(s, "tolist") else s for s in rule.strengths],
            budget=None if budget is None else budget.tolist(),
            rounds=zeros(),
            drafted=zeros(),
            accepted=zeros(),
            tokens=zeros(),
            accepted_lengths=[[] for _ in range(batch_size)],
        )

    def count(self, emitted: "Sequence[Emitted]") -> None:
        """One round: what each request got, nothing where it had ended before."""
        for request, row in enumerate(emitted):
            if row.token_ids:
                self.rounds[request] += 1
                self.drafted[request] += row.drafted
                self.accepted[request] += row.accepted
                self.tokens[request] += len(row.token_ids)
                self.accepted_lengths[request].append(row.accepted)

    @property
    def total_variation_bound(self) -> list[float] | None:
        """What bounds the total variation between the law of each text of `tokens` tokens and the target's: 1 - e^-budget.

        Since no text is more than e^budget times as likely as under the target (docs/law.md). None without a budget.
        """
        return None if self.budget is None else [-math.expm1(-b) for b in self.budget]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens, of all requests; None if nothing was drafted."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens a request got from one forward pass of the target, on average; plain decoding has 1. None before any."""
        return sum(self.tokens) / sum(self.rounds) if sum(self.rounds) else None

    def to_dict(self) -> dict[str, Any]:
        """Everything above, ready for JSON."""
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "total_variation_bound": self.total_variation_bound,
            "tokens_per_forward": self.tokens_per_forward,
        }


def cache_bytes(model) -> int:
    """Bytes of the keys and values that a `RollbackModel` holds; 0 for None."""
    layers = () if model is None else model.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)


def peak_memory(device: torch.device) -> int | None:
    """Bytes, as `GenerationStats.peak_memory_bytes` has them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 (there is none on Windows)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
