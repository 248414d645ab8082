"""Speed against divergence on a pair of models: the exact law of every rule at the positions of a text."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .. import law
from ..decoding.cache.support import max_positions
from ..rules import RULES, Rule, SpS, given
from .pair import ASSETS, Model, ModelPair
from .runs import run_plain
from .settings import SAMPLING, RunSettings

MAX_DRAFTED = 16  # tokens a forward are given for 1 .. 16 drafted ones
ELEMENTS = 1 << 18  # row elements handled at once: enough to amortise an operation, few enough for the cache
MAX_TOKENS = 1024  # of a piece of text: its logits are held at once
PROMPT_TOKENS, SELF_GENERATED_TOKENS = 8, 128  # of each document, where the target writes the rest itself
MEANS = ("acceptance", "kl", "kl_reverse", "total_variation", "chi_square")  # of what `_figures` gives of a rule
WEIGHTS = [1 - (1 - i / 16) ** 2 for i in range(17)]  # of the interpolations: p at 0, q at 1

Curves = Mapping[str, Sequence[Rule]]
# A curve for each rule by name, over the strengths that its file gives.
CURVES: Curves = {name: rule.measured for name, rule in RULES.items() if rule.measured}


class Chunk(NamedTuple):
    """Positions that were handled at once: the number of their piece of text, and what `_figures` gives of them."""

    piece: int
    figures: torch.Tensor
    interpolations: torch.Tensor
    of_token: torch.Tensor


@dataclass(frozen=True)
class MeasurementSettings:
    """What to measure: how many positions, and how both models' rows are processed. Raises ValueError or TypeError.

    self_generated: the text gives prompts alone, and the target writes the rest.
    """

    positions: int = 500
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    self_generated: bool = False
    seed: int = 0

    def __post_init__(self):
        if self.positions < 1:
            raise ValueError(f"positions must be at least 1, got {self.positions}")
        self.decoding(1, self.seed)  # checks the others

    def __str__(self):
        parts = [f"T {self.temperature:g}"]
        parts += [f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p:g}"] * (self.top_p < 1)
        parts += [f"min-p {self.min_p:g}"] * (self.min_p > 0)
        return ", ".join(parts) + ("; self-generated" if self.self_generated else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def decoding(self, max_new_tokens: int, seed: int) -> RunSettings:
        """How the target writes; its checks are the checks of the settings above."""
        return RunSettings(SpS(), seed, max_new_tokens=max_new_tokens, **{n: getattr(self, n) for n in SAMPLING})


@dataclass(frozen=True)
class Point:
    """A rule at one strength: means over all positions, in nats; infinite where one of them is.

    acceptance_error, kl_error: standard errors of two of them, as if positions were independent; NaN of one position.
    rule, name: as it is written in Python, and what `resolve_rule` knows it by.
    tokens_per_forward: for 1 .. 16 drafted tokens, along the text: a draft of m tokens from position i gives
        1 + a_i + a_i a_(i+1) + ... + a_i ... a_(i+m-1), with a the acceptances. None where no document is that long.
    nll: of the text's tokens under the emitted law; `nll_gain` how much lower it is than under the target, with its
        standard error; `nll_interpolation` under the w q + (1 - w) p whose mean KL is that of the rule.
    """

    curve: str
    rule: str
    name: str
    strength: float | None
    acceptance: float
    acceptance_error: float
    kl: float
    kl_error: float
    kl_reverse: float
    total_variation: float
    chi_square: float
    tokens_per_forward: list[float | None]
    nll: float
    nll_gain: float
    nll_gain_error: float
    nll_interpolation: float | None


@dataclass(frozen=True)
class Frontier:
    """Every rule at every strength on the same positions. `complete` is False if the run was interrupted.

    positions: how many. scored: those at which both models can emit the text's token, over which `nll` is taken.
    draft_kl: KL(p || q); target_nll, draft_nll: of the text's tokens under q and p.
    """

    points: list[Point]
    positions: int
    scored: int
    documents: int
    complete: bool
    draft_kl: float
    target_nll: float
    draft_nll: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: numbers with nine digits; what is infinite or not known is None."""
        return _rounded(asdict(self))


def load_documents(path: str | None) -> list[str]:
    """The documents of a text file, those of the package's own without a path: what blank lines part. Raises ValueError."""
    file = ASSETS / "problems.txt" if path is None else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8") from error
    documents = [d.strip() for d in re.split(r"\n\s*\n", text) if d.strip()]
    if not documents:
        raise ValueError(f"{str(file)!r} holds no text")
    return documents


def measure(
    pair: ModelPair,
    documents: list[str],
    settings: MeasurementSettings,
    progress: Callable[[str, float], None] = lambda what, share: None,
    curves: Curves | None = None,
) -> Frontier:
    """The exact law of every rule at the first positions of the documents, those after their first tokens.

    Args:
        documents: texts, each scored with its own tokens as context, in pieces that fit both models.
        progress: told what is done and the share that is over.
        curves: name -> rules in the order of their strengths; `CURVES` unless given.

    An interrupt (Ctrl-C) ends it early: what comes back is taken over the positions done, `complete` False. With none done
    it is raised. Raises ValueError where the documents give no position.
    """
    curves = CURVES if curves is None else curves
    rules = [rule for some in curves.values() for rule in some]
    done: list[Chunk] = []
    count, complete = 0, False
    try:
        for piece, (tokens, first) in enumerate(_pieces(pair, documents, settings)):
            tokens = tokens[: first + settings.positions - count]
            rows = _rows(pair, tokens, first, settings)
            size = max(1, ELEMENTS // rows[0].shape[1])
            for p, q, token in zip(*(x.split(size) for x in (*rows, tokens[first:].cpu())), strict=True):
                of_chunk = _figures(p.double().softmax(-1), q.double().softmax(-1), token[:, None], rules)
                done.append(Chunk(piece, *of_chunk))
                count += len(token)
                progress("measuring", count / settings.positions)
            if count == settings.positions:
                break
        complete = True
    except KeyboardInterrupt:
        if not done:
            raise
    if not done:
        raise ValueError("the text gives no position to measure at: it has no document of two tokens")
    return _summary(curves, done, complete)


def _pieces(pair: ModelPair, documents: list[str], settings: MeasurementSettings) -> Iterator[tuple[torch.Tensor, int]]:
    """Token ids [L] on the models' device, and the first of them that is a position, of one piece of text after another."""
    limit = min(
        (n for n in map(max_positions, (pair.model, pair.assistant_model)) if n is not None), default=MAX_TOKENS
    )
    limit = min(limit, MAX_TOKENS)
    for i, text in enumerate(documents):
        tokens = pair.tokenizer(text, return_tensors="pt").input_ids[0].to(pair.model.device)
        if settings.self_generated:
            prompt = tokens[:PROMPT_TOKENS]
            decoding = settings.decoding(min(limit - len(prompt), SELF_GENERATED_TOKENS), seed=settings.seed + i)
            written = run_plain(pair, prompt[None], decoding).token_ids
            yield torch.cat([prompt, prompt.new_tensor(written)]), len(prompt)
        else:
            yield from ((piece, 1) for piece in tokens.split(limit) if len(piece) > 1)


@torch.no_grad()
def _rows(pair: ModelPair, tokens: torch.Tensor, first: int, settings: MeasurementSettings) -> list[torch.Tensor]:
    """Processed scores of draft and target at the positions of tokens[first:]: fp32 [L - first, V] each."""
    warp: Any = LogitsProcessorList()
    if settings.temperature != 1:
        warp.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warp.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warp.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warp.append(MinPLogitsWarper(settings.min_p))
    models: tuple[Model, Model] = (pair.assistant_model, pair.model)
    rows = [m(tokens[None], use_cache=False).logits[0, first - 1 : -1] for m in models]
    rows = [warp(tokens[None], x.float()).cpu() for x in rows]
    V = max(x.shape[1] for x in rows)  # vocabularies of one tokenizer may be padded to different sizes
    return [torch.nn.functional.pad(x, (0, V - x.shape[1]), value=-math.inf) for x in rows]


def _figures(
    p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, rules: Sequence[Rule]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rows p, q float64 [n, V] and the text's tokens [n, 1]: figures of the rules [R, 6, n], mean KL of the interpolations
    [W, n], and the probability that draft and target give the tokens [2, n]."""
    positions = law.Positions(p, q)
    of_token = torch.stack([x.gather(1, token)[:, 0] for x in (p, q)])
    p, q = positions.p, positions.q
    # Where the text's tokens stand in the columns that are left; one that is not there has probability 0.
    place = torch.searchsorted(positions.columns, token).clamp(max=p.shape[1] - 1)
    absent = positions.columns[place] != token
    figures = []
    for rule in rules:
        emitted, accepted = positions.law(rule)
        nll = -emitted.gather(1, place).masked_fill(absent, 0)[:, 0].log()
        of_rule: list[Any] = [accepted, *law.divergences(emitted, q), nll]
        figures.append(torch.stack(of_rule))
    interpolations: list[Any] = [law.kl(w * q + (1 - w) * p, q) for w in WEIGHTS]
    return torch.stack(figures), torch.stack(interpolations), of_token


def _summary(curves: Curves, done: list[Chunk], complete: bool) -> Frontier:
    positions: Counter[int] = Counter()
    for chunk in done:
        positions[chunk.piece] += chunk.of_token.shape[1]
    lengths = list(positions.values())
    figures = torch.cat([chunk.figures for chunk in done], dim=-1)
    interpolations = torch.cat([chunk.interpolations for chunk in done], dim=-1).mean(1)
    of_token = torch.cat([chunk.of_token for chunk in done], dim=-1)
    scored = (of_token > 0).all(0)
    p, q = of_token[:, scored]
    points = []
    names = [(curve, rule) for curve, rules in curves.items() for rule in rules]
    for (curve, rule), of_rule in zip(names, figures, strict=True):
        means, nll = of_rule[:5].mean(1).tolist(), of_rule[5, scored]
        gain = -q.log() - nll
        w = _matched_weight(interpolations, means[1])
        points.append(
            Point(
                curve,
                _written(rule),
                rule.name,
                next(iter(given(rule).values()), None),
                **dict(zip(MEANS, means, strict=True)),
                acceptance_error=_standard_error(of_rule[0]),
                kl_error=_standard_error(of_rule[1]),
                tokens_per_forward=_tokens_per_forward(of_rule[0].split(lengths)),
                nll=nll.mean().item(),
                nll_gain=gain.mean().item(),
                nll_gain_error=_standard_error(gain),
                nll_interpolation=None if w is None else -(w * q + (1 - w) * p).log().mean().item(),
            )
        )
    return Frontier(
        points=points,
        positions=sum(lengths),
        scored=len(q),
        documents=len(lengths),
        complete=complete,
        draft_kl=interpolations[0].item(),
        target_nll=-q.log().mean().item(),
        draft_nll=-p.log().mean().item(),
    )


def _standard_error(values: torch.Tensor) -> float:
    """Of the mean of independent values; NaN if there is one alone, or an infinite one."""
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _tokens_per_forward(acceptances: Sequence[torch.Tensor]) -> list[float | None]:
    """See `Point`. acceptances: [L] of each document. Each product of acceptances is averaged over its windows."""
    expected: list[float | None] = []
    total, products = 1.0, list(acceptances)
    for m in range(MAX_DRAFTED):
        products = [x[: len(a) - m] for x, a in zip(products, acceptances, strict=True) if len(a) > m]
        if not products:
            return expected + [None] * (MAX_DRAFTED - m)
        total += torch.cat(products).mean().item()
        expected.append(total)
        acceptances = [a for a in acceptances if len(a) > m]
        products = [x[:-1] * a[m + 1 :] for x, a in zip(products, acceptances, strict=True)]
    return expected


def _matched_weight(kls: torch.Tensor, kl: float) -> float | None:
    """The w at which the interpolations, whose KL at `WEIGHTS` is given, have that KL; None if none has."""
    if not (kls.isfinite().all() and kl <= kls[0]):
        return None
    # A divergence is quadratic around w = 1, so that its root is nearly linear there.
    return float(np.interp(math.sqrt(max(kl, 0)), kls.clamp(min=0).sqrt().flip(0), WEIGHTS[::-1]))


def _written(rule: Rule) -> str:
    """A rule as it is written in Python."""
    return f"{type(rule).__name__}({', '.join(f'{name}={value!r}' for name, value in given(rule).items())})"


def _rounded(value: Any) -> Any:
    """Numbers with nine digits, None for those that are not finite; in dicts and lists."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None
