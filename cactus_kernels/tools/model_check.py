"""Whether real models decode in the loop as by plain `generate`: greedy tokens and scores, and how far apart they are."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..decoding.generate import SpeculativeOutput, speculative_generate
from ..decoding.keywords import NUM_ASSISTANT_TOKENS
from .frontier import load_documents
from .pair import LOOKUP, Model, ModelPair

PROMPT_TOKENS = (5, 40, 21, 12)  # of the rows of a batch
# Differences of scores, as a share of their spread, that rounding explains.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
COLUMNS = ("models", "batch", "equal tokens", "scores apart", "at most", "first other token")

Texts = list[tuple[list[int], torch.Tensor]]  # of each row the new tokens, and their scores fp32 [T, V]


@dataclass(frozen=True)
class Comparison:
    """One model over one batch, with drafts of one kind.

    apart: of the tokens of all rows up to the first that differs, that one included, the root mean square difference of
        the scores over their standard deviation. largest: the largest difference of two scores.
    equal, tokens: new tokens that are those of plain `generate`, of all. differs: where the first one differs: the row, its
        place, and how far apart the two best scores are there by plain `generate`; None: none does.
    """

    name: str
    rows: int
    apart: float
    largest: float
    tolerance: float
    equal: int
    tokens: int
    differs: tuple[int, int, float] | None

    @property
    def failure(self) -> str | None:
        """What is wrong, in words; None: rounding explains all there is."""
        if self.apart <= self.tolerance:
            return None
        return (
            f"{self.name}, {self.batch}: scores are {self.apart:.1g} of their spread apart, and rounding explains "
            f"{self.tolerance:g}"
        )

    @property
    def batch(self) -> str:
        return "one row" if self.rows == 1 else f"{self.rows} ragged rows"

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of a table with `COLUMNS`."""
        first = ""
        if self.differs is not None:
            row, place, gap = self.differs
            first = f"row {row}, token {place}, best two {gap:.1e} apart"
        counted = f"{self.equal} of {self.tokens}"
        return self.name, self.batch, counted, f"{self.apart:.1e}", f"{self.largest:.1e}", first


@torch.no_grad()
def compare_models(
    pair: ModelPair, max_new_tokens: int, progress: Callable[[str, float], None] = lambda what, share: None
) -> list[Comparison]:
    """The target with its draft, and the draft with drafts from the text; ragged rows together, and one alone.

    Texts go on past their ends. Raises ValueError where a model cannot be decoded at all.
    """
    checks = [(pair.model, pair.model_name, pair.assistant_model, pair.assistant_name)]
    if pair.assistant_model is not None:
        checks.append((pair.assistant_model, pair.assistant_name, None, LOOKUP))
    prompts = _prompts(pair)
    found = []
    for i, (model, name, draft, draft_name) in enumerate(checks):
        model.generation_config.eos_token_id = None
        progress(f"{name} by plain generate", i / len(checks))
        plain = [_plain(model, prompt, max_new_tokens) for prompt in prompts]
        for rows in (range(len(prompts)), range(1, 2)):
            progress(f"{name} with {draft_name}", (i + 0.5) / len(checks))
            ours = _speculative(model, draft, [prompts[r] for r in rows], max_new_tokens)
            found.append(_compare(f"{name} with {draft_name}", [plain[r] for r in rows], ours, model.dtype))
    return found


def window_not_reached(pair: ModelPair, max_new_tokens: int) -> int | None:
    """The largest sliding window that no text of the check runs past; None: there is none."""
    windows = [getattr(m.config.get_text_config(), "sliding_window", None) or 0 for m in pair.models]
    return max(windows) if max(windows) >= max(PROMPT_TOKENS) + max_new_tokens else None


def _prompts(pair: ModelPair) -> list[list[int]]:
    documents = load_documents(None)
    return [pair.tokenizer(text).input_ids[:n] for text, n in zip(documents, PROMPT_TOKENS, strict=False)]


def _plain(model: Model, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    ids = torch.tensor([prompt], dtype=torch.int64, device=model.device)
    return next(_texts(model.generate(ids, attention_mask=torch.ones_like(ids), **_settings(count)), len(prompt)))


def _speculative(model: Model, draft: Model | None, prompts: list[list[int]], count: int) -> Texts:
    width = max(map(len, prompts))
    rows = [([0] * (width - len(p)) + p, [0] * (width - len(p)) + [1] * len(p)) for p in prompts]
    ids, mask = torch.tensor(rows, dtype=torch.int64, device=model.device).unbind(1)
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": NUM_ASSISTANT_TOKENS} if draft is None else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not compared with plain `generate`", UserWarning)  # it is now
        out = speculative_generate(
            model, ids, attention_mask=mask, assistant_model=draft, rule="sps", **drafts, **_settings(count)
        )
    assert isinstance(out, SpeculativeOutput)  # asked for by return_dict_in_generate
    return list(_texts(out, width))


def _settings(count: int) -> dict[str, Any]:
    return {
        "do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip


def _texts(out: Any, width: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    logits = torch.stack(out.logits, 1).float().cpu()
    yield from zip(out.sequences[:, width:].tolist(), logits, strict=True)


def _compare(name: str, plain: Texts, ours: Texts, dtype: torch.dtype) -> Comparison:
    squares, spreads, largest, equal, differs = 0.0, 0.0, 0.0, 0, None
    for row, ((ids, scores), (own_ids, own_scores)) in enumerate(zip(plain, ours, strict=True)):
        place = next((i for i, pair in enumerate(zip(ids, own_ids, strict=True)) if pair[0] != pair[1]), len(ids))
        equal += place
        # Up to there, and there, both have read the same text.
        right = scores[: place + 1].double()
        own = own_scores[: place + 1].double()
        known = right.isfinite()  # a model may forbid tokens of its own
        if not torch.equal(known, own.isfinite()):
            squares = math.inf
        difference, spread = (x.where(known, 0) for x in (own - right, right))
        squares += difference.square().sum().item()
        spreads += (spread - spread.mean(1, keepdim=True)).square().sum().item()
        largest = max(largest, difference.abs().max().item())
        if place < len(ids) and differs is None:
            best = scores[place].topk(2).values
            differs = row + 1, place + 1, (best[0] - best[1]).item()
    tokens = sum(len(ids) for ids, _ in plain)
    apart = math.sqrt(squares / spreads)
    return Comparison(name, len(plain), apart, largest, TOLERANCES[dtype], equal, tokens, differs)
