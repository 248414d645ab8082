"""Where a row's new tokens end: at EOS, or where a criterion of the caller says so."""

from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .prepared import Prepared, eos_ids


class Stopping:
    """What ends a row, checked token by token on its own text without padding."""

    def __init__(self, prepared: Prepared, callers):
        """callers: the caller's criteria, which may be among the prepared ones, whose own for length and EOS are replaced."""
        self.eos = set(eos_ids(prepared.generation_config))
        own = [
            c
            for c in prepared.stopping_criteria
            if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria)) and not any(c is given for given in callers)
        ]
        self.criteria = own + list(callers)

    def cut(self, text, tokens):
        """How many of `tokens` a row keeps, and whether it ends with them.

        text: int64 [L], the row's text with the new tokens at its end. tokens: list of ints.
        """
        before = len(text) - len(tokens)
        for k, token in enumerate(tokens, 1):
            if token in self.eos or any(bool(c(text[None, : before + k], None)) for c in self.criteria):
                return k, True
        return len(tokens), False


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
