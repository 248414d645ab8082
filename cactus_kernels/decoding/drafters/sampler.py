"""The draws of a draft model, one token after another."""

import torch

from ... import definition
from ...backends import choose_backend
from ...drawing import sample
from ...host import draw as host_draw
from ...host.reduce import Settings
from ...sampling import RowStats
from .drafts import DraftRows

WORDS_AHEAD = 1 << 16  # random words made at once for rows to come: enough to amortise an operation


class DraftSampler:
    """`sample` for the drafts of a round, one after another, which keeps the rows that they were drawn from.

    In torch they are kept as probabilities, which its softmax gives at the price of a sum, and the random words of several
    rows are made at once, since a thousand cost little more than one.
    """

    def __init__(self, seed, sampling, count, backend=None):
        """seed: int64 [B]. count: most drafts of a round. sampling, backend: as in `sample`."""
        self.seed, self.sampling, self.count, self.backend = seed, sampling, count, backend
        self.in_torch, self.on_host = choose_backend(backend, seed.device) == "torch", seed.device.type == "cpu"
        self.settings = Settings.of(sampling, len(seed)) if self.in_torch else None
        self.rows: torch.Tensor | None = None  # [B, count, V], probabilities or logits

    def start(self, offset, m):
        """Begin a round of m drafts. offset: int64 [B], of the first draft."""
        self.offset, self.m, self.noise, self.stats = offset, m, {}, []

    def draw(self, logits, j):
        """Token j of the round, int64 [B], drawn as `sample(logits, seed=seed, offset=offset + j, ...)` does. logits: [B, V]."""
        B, V = logits.shape
        if self.rows is None:
            self.rows = logits.new_empty((B, self.count, V), dtype=torch.float32 if self.in_torch else None)
        rows = self.rows[:, j]
        if not self.in_torch:
            rows.copy_(logits)
            drawn = sample(logits, seed=self.seed, offset=self.offset + j, sampling=self.sampling, backend=self.backend)
            self.stats.append(drawn.stats)
            return drawn.token_ids
        if j not in self.noise:
            ahead = max(1, min(self.m - j, WORDS_AHEAD // (B * (definition.num_chunks(V) + definition.CHUNK))))
            self.noise = dict(enumerate(host_draw.draft_noise(self.seed, self.offset + j, B, V, ahead), j))
        probs = rows if self.on_host else torch.empty((B, V), dtype=torch.float32, device="cpu")
        token_ids = torch.from_numpy(host_draw.draw_from_probs(logits, self.settings, self.noise[j], probs))
        if self.on_host:
            return token_ids
        rows.copy_(probs)
        return token_ids.to(logits.device)

    def drawn_from(self) -> DraftRows:
        """What the tokens of the round were drawn from."""
        assert self.rows is not None  # a round draws at least one token
        rows = self.rows[:, : self.m]
        if self.in_torch:
            return DraftRows(probs=rows)
        return DraftRows(logits=rows, stats=RowStats.stack(self.stats))
