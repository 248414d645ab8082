"""What leaves the loop beside the tokens: their scores, and streams of them."""

import torch


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
        self.rows = {name: [[] for _ in range(batch_size)] for name in self.asked}

    def put(self, logits, scores, emitted):
        """logits, scores: [B, K, V], the target's at the places of the emitted tokens. emitted: a list for each row."""
        for name, values in (("logits", logits), ("scores", scores)):
            if self.asked[name]:
                for row, value, tokens in zip(self.rows[name], values, emitted, strict=True):
                    if tokens:
                        value = value[: len(tokens)].float().clone()
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

    def put(self, emitted, remaining):
        """emitted: new tokens of each row, lists. remaining: tokens each row may still get, 0 once it has ended."""
        for row, each in list(self.open.items()):
            for token in emitted[row]:
                each.put(torch.tensor([token]))
            if not remaining[row]:
                self.open.pop(row).end()
