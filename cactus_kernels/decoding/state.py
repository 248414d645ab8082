"""What processors and criteria remember of a text: who may remember anything, and copies of those.

An object of the caller's may count its calls or keep what it was shown. It is right after a call for each token of one text,
in order. So each row has its own, and what is only scored, and may never come out, is shown to copies.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StopStringCriteria,
)
from transformers.generation import logits_process as hf

from .arguments import Arguments

# Their answer is one of the text and the scores alone, whatever they were asked before. A subclass may remember something.
STATELESS = (
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.TemperatureLogitsWarper,
    hf.RepetitionPenaltyLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.TopPLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.NoRepeatNGramLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.PrefixConstrainedLogitsProcessor,  # what it calls is a function of the text by what `generate` says of it
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.LogitNormalization,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    hf.WatermarkLogitsProcessor,  # its generator is seeded anew in every call
    MaxLengthCriteria,
    MaxTimeCriteria,
    EosTokenCriteria,
    StopStringCriteria,
)
# What an object may hold that copies of it share: costly to copy, and no state of a text.
SHARED = (torch.nn.Module, PreTrainedTokenizerBase)


def remembers(given: Any) -> bool:
    """Whether a processor or a criterion may hold state."""
    return type(given) not in STATELESS


def copied(given: Sequence[Any]) -> list[Any]:
    """Copies of processors and criteria; what they share with one another the copies share too. Others stay what they are."""
    shared = [each for each in given if not remembers(each)]
    for each in given:
        shared += [value for value in getattr(each, "__dict__", {}).values() if isinstance(value, SHARED)]
    return copy.deepcopy(list(given), {id(each): each for each in shared})


def by_row(processors: Sequence[Any], criteria: Sequence[Any], rows: int) -> list[tuple[list[Any], list[Any]]]:
    """A caller's processors and criteria for each row: the objects themselves for the first, copies for the others."""
    given = [*processors, *criteria]
    each_row = [given, *(copied(given) for _ in range(1, rows))]
    return [(row[: len(processors)], row[len(processors) :]) for row in each_row]


def check_copies(arguments: Arguments, rows: int) -> None:
    """Raises ValueError, naming it, for an object of the caller's that remembers, has to be copied and cannot be."""
    # A row alone keeps every token that its criteria are shown.
    copies = ("logits_processor", "stopping_criteria") if rows > 1 else ("logits_processor",)
    for name in copies:
        for each in getattr(arguments, name) or ():
            try:
                copied([each])
            except Exception as error:  # whatever a class raises that refuses
                raise ValueError(
                    f"{type(each).__name__} in {name} cannot be copied ({error}), and what it remembers could not follow "
                    f"its text: give it a __deepcopy__ that shares what is no state"
                ) from error
