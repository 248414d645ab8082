"""Where a row's new tokens end: at EOS, or where a criterion of the caller says so."""

import sys

from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .prepared import Prepared, eos_ids
from .processors import Processors


class Stopping:
    """What ends a row, checked token by token on its own text without padding."""

    def __init__(self, prepared: Prepared, callers, processors: Processors):
        """callers: for each row a list of the caller's criteria, which may be among the prepared ones for the first row;
        the prepared ones for length and EOS are replaced."""
        self.eos = set(eos_ids(prepared.generation_config))
        self.processors = processors
        own = [
            c
            for c in prepared.stopping_criteria
            if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria)) and not any(c is given for given in callers[0])
        ]
        self.by_row = [own + _reminders(prepared) + row for row in callers]

    def cut(self, row: int, text, tokens, logits):
        """How many of `tokens` a row keeps, and whether it ends with them. Its processors and criteria remember those.

        text: int64 [L], the row's text with the new tokens at its end. tokens: list of ints.
        logits: [m + 1, V], the target's where the tokens stand.
        """
        before = len(text) - len(tokens)
        for k, token in enumerate(tokens, 1):
            if k > 1:
                self.processors.follow(row, text[None, : before + k - 1], logits[k - 1 : k])
            # All of them: each is to see every token.
            ends = [bool(c(text[None, : before + k], None)) for c in self.by_row[row]]
            if token in self.eos or any(ends):
                return k, True
        return len(tokens), False


def _reminders(prepared):
    """transformers' own warning, once a row has come past the length that its config names, where it may come so far."""
    limits = {c.max_position_embeddings for c in prepared.stopping_criteria if type(c) is MaxLengthCriteria}
    most = prepared.new_tokens + prepared.input_ids.shape[1] - 1
    return [MaxLengthCriteria(sys.maxsize, n) for n in limits if n is not None and n < most]


def callers_criteria(prepared, generation_config):
    """The stopping criteria among those that `generate` prepared that the generation config does not ask for."""
    eos = sorted(eos_ids(generation_config))

    def asked_for(c):
        return (
            (type(c) is MaxLengthCriteria and c.max_length == generation_config.max_length)
            or (type(c) is MaxTimeCriteria and c.max_time == generation_config.max_time)
            or (type(c) is EosTokenCriteria and sorted(c.eos_token_id.tolist()) == eos)
        )

    return [c for c in prepared if not asked_for(c)]
