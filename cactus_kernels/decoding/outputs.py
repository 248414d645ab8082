"""What leaves the loop beside the tokens: their scores, streams of them, and of their text."""

from collections.abc import Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from .batch import Emitted
from .scorer import Scored

CONTEXT = 5  # tokens of the prompt that a first new token is decoded with: some tokenizers drop a leading space else


class TokenScores:
    """Logits and scores of the emitted tokens, kept where the generation config asks for them."""

    def __init__(self, generation_config, batch_size, warpers):
        """warpers: the processors that the loop leaves to its sampler, and scores are to show."""
        self.warpers = warpers
        asked = generation_config.return_dict_in_generate
        self.asked = {
            "logits": bool(asked and generation_config.output_logits),
            "scores": bool(asked and generation_config.output_scores),
        }
        self.rows: dict[str, list[list[torch.Tensor]]] = {name: [[] for _ in range(batch_size)] for name in self.asked}

    def put(self, scored: Scored, emitted: Sequence[Emitted]) -> None:
        """A round: the target's scores at the places of the emitted tokens, and these."""
        for name, values in (("logits", scored.logits), ("scores", scored.scores)):
            if self.asked[name]:
                for row, value, got in zip(self.rows[name], values, emitted, strict=True):
                    if got.token_ids:
                        value = value[: len(got.token_ids)].float().clone()
                        row.append(self.warpers(None, value) if name == "scores" else value)

    def logits(self):
        return self._by_token("logits")

    def scores(self):
        return self._by_token("scores")

    def _by_token(self, name):
        """As `generate` returns them: for each new token fp32 [B, V], zeros after a row's end; None if not asked for."""
        if not self.asked[name]:
            return None
        rows = [torch.cat(row) for row in self.rows[name]]
        return torch.nn.utils.rnn.pad_sequence(rows).unbind()


class Streams:
    """A streamer for a batch of one row, or one for each row of a batch; each gets the prompt, the tokens and the end."""

    def __init__(self, streamer, input_ids, prompts):
        """streamer: what the caller gave. input_ids: int64 [B, P]; prompts: the rows without padding."""
        several = isinstance(streamer, (list, tuple))
        self.open = dict(enumerate(streamer if several else [] if streamer is None else [streamer]))
        for row, each in self.open.items():
            each.put((prompts[row][None] if several else input_ids).cpu())

    def put(self, emitted: Sequence[Emitted], remaining: list[int]) -> None:
        """A round. remaining: tokens each row may still get, 0 once it has ended."""
        for row, each in list(self.open.items()):
            for token in emitted[row].token_ids:
                each.put(torch.tensor([token], dtype=torch.int64, device="cpu"))
            if not remaining[row]:
                self.open.pop(row).end()


class TextStream(BaseStreamer):
    """Passes text on as its tokens come, a character of several tokens only once it is whole.

    Args:
        tokenizer: its special tokens are left out.
        write: called with each new piece of text, a str that is not empty. The prompt is not passed on.
    """

    def __init__(self, tokenizer, write):
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        self.has_prompt, self.start, self.read = False, 0, 0

    def put(self, value):
        """The prompt's ids, then new ones; int64, any shape."""
        tokens = value.flatten().tolist()
        if not self.has_prompt:
            self.ids, self.has_prompt = tokens, True
            self.start, self.read = max(0, len(tokens) - CONTEXT), len(tokens)
            return
        for token in tokens:
            self.ids.append(token)
            self._pass_on(whole=True)

    def end(self):
        self._pass_on(whole=False)

    def _pass_on(self, whole):
        # Texts of tokens do not simply add up: what is new is what the text of a few tokens has gained.
        before, now = self._decode(self.ids[self.start : self.read]), self._decode(self.ids[self.start :])
        if whole and now.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        if len(now) > len(before):
            self.write(now[len(before) :])
        self.start, self.read = self.read, len(self.ids)

    def _decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
