"""Verification of `Block` on the host: row pairs are read from the end of the draft down to where something is kept."""

import numpy as np
import torch

from .. import philox, rules
from ..definition import ACCEPT, BLOCK_SHIFT, ONE
from ..rules import block
from ..rules.languages import numpy_language
from . import race
from .reduce import GROUP
from .rows import bad_prob
from .verify import _groups, _Positions

_chance_with, _residual, _keeps = (
    rules.bind(f, numpy_language) for f in (block.chance_with, block.residual, block.keeps)
)


def verify(inputs, out):
    """Write the tokens of `inputs` (checked `contract.Inputs`) to `out` (a `VerifyOutput`).

    An invalid request emits nothing, unless all of its draft was accepted: before that, no token of it was.
    """
    chains = _Chains(inputs)
    chains.search()
    chains.follow()
    stop, valid, ids = chains.stop, chains.valid, chains.positions.drafted
    stop[~valid & ~chains.whole] = 0
    ids[np.arange(ids.shape[1]) >= stop[:, None]] = -1
    ids[np.flatnonzero(valid), stop[valid]] = chains.token[valid]
    for to, values in ((out.token_ids, ids), (out.num_accepted, stop), (out.valid, valid)):
        to.copy_(torch.from_numpy(values))


class _Chains:
    """The chains of each request.

    Attributes:
        length: drafted tokens [B]. chance, u: P of the chains of 0 .. m tokens, 0 beyond the draft, and the coins [B, m + 1].
        whole: where all of the draft is accepted [B]. stop: how many tokens are kept, at most so far [B].
        valid, token: of the token drawn [B].
    """

    def __init__(self, inputs):
        B, m = inputs.batch_size, inputs.max_draft_tokens
        self.inputs, self.positions = inputs, _Positions(inputs)
        positions, j, request = self.positions, np.arange(m + 1), np.arange(B)
        length = self.length = (positions.drafted == -1).argmax(1)
        q_n, p_n = self._pairs()
        drafted = j[:m] < length[:, None]
        bad = (positions.bad & (j <= length[:, None])).any(1) | ((bad_prob(q_n) | bad_prob(p_n)) & drafted).any(1)
        self.chance = np.ones((B, m + 1), dtype=np.float32)
        q_n, p_n = np.where(drafted, np.minimum(q_n, np.float32(1)), np.float32(0)), np.minimum(p_n, np.float32(1))
        with np.errstate(all="ignore"):  # bad values
            for i in range(m):
                self.chance[:, i + 1] = _chance_with(self.chance[:, i], q_n[:, i], p_n[:, i])
        counters = philox.counter_row(positions.offset[:, None], j)
        words = philox.philox(positions.seed[:, None], 0, ACCEPT, *counters)
        self.u = np.roll(philox.uniform(*words), 1, axis=1)  # that of i tokens is the last one's
        self.valid, self.token = ~bad, np.zeros(B, dtype=np.int64)
        self.whole = ~bad & ((length == 0) | (self.u[request, length] < self.chance[request, length]))
        # Chains of no chance are not kept, whatever their rows hold.
        self.stop = np.where(self.whole, length, np.minimum(length - 1, (self.chance > 0).sum(1) - 1))

    def _pairs(self):
        """q and p of the drafted tokens, fp32 [B, m]."""
        B, m, positions = self.inputs.batch_size, self.inputs.max_draft_tokens, self.positions
        q_n, p_n = np.zeros((B, m), dtype=np.float32), np.ones((B, m), dtype=np.float32)
        if self.length.any():
            at = np.arange(B)[:, None], np.arange(m)[None], positions.drafted[:, :m]
            q_n = positions.target.at(*at)
            if positions.draft is not None:
                p_n = positions.draft.at(*at)
        return q_n, p_n

    def search(self):
        """The longest chain that is kept of drafts that are not accepted whole, and the draw after it."""
        going = self.valid & ~self.whole
        while going.any():
            for r in self._groups(going):
                i, P = self.stop[r], self.chance[r, self.stop[r]]
                weights, fine = _weights(self.positions, P, r, i)
                sums = race.chunk_sums(weights)
                Z = (sums >> BLOCK_SHIFT).sum(1).astype(np.float32) * np.float32(2**BLOCK_SHIFT / ONE)
                found = fine & ((i == 0) | _keeps(self.u[r, i], P, Z))
                some = found & (sums != 0).any(1)
                self._draw(r[some], weights[torch.from_numpy(some)], sums[some])
                self._draw(r[found & ~some], _rest(self.positions, r[found & ~some]))
                self.valid[r[~fine]] = False
                going[r[found | ~fine]] = False
                self.stop[r[fine & ~found]] -= 1

    def follow(self):
        """The token after drafts that are accepted whole."""
        given, inputs = np.zeros(len(self.whole), dtype=bool), self.inputs
        if inputs.bonus_token_ids is not None:
            given = self.whole & (self.length == self.positions.num_drafted)
            self.token[given] = inputs.bonus_token_ids.cpu().numpy()[given]
            self.valid &= ~given | ((self.token >= 0) & (self.token < inputs.vocab_size))
        for r in self._groups(self.whole & ~given):
            weights = self.positions.target.whole(r, self.stop[r])
            self._draw(r, weights)
            self.valid[r] &= ~self.positions.target.bad_whole(weights)

    def _draw(self, r, weights, sums=None):
        """A token for requests r, from weights fp32 [R, V] and their chunk sums; invalid where they are 0."""
        if len(r):
            sums = race.chunk_sums(weights) if sums is None else sums
            positions, V = self.positions, self.inputs.vocab_size
            row = philox.counter_row(positions.offset[r], self.stop[r])
            self.token[r] = race.race(sums, weights, race.noise(positions.seed[r], row, self.inputs.purposes, V))
            self.valid[r] = (sums != 0).any(1)

    def _groups(self, requests):
        return _groups(requests, max(1, GROUP // self.inputs.vocab_size))


def _weights(positions, chance, request, position):
    """The residuals of requests at positions, fp32 [R, V], and which row pairs are not bad [R]."""
    q = positions.target.whole(request, position)
    bad = positions.target.bad_whole(q)
    if positions.draft is None:
        n = positions.drafted[request, position]
        p = np.arange(q.shape[1]) == n[:, None]
    else:
        p = positions.draft.whole(request, position)[:, : q.shape[1]]
        bad |= positions.draft.bad_whole(p)
        p = torch.nn.functional.pad(p, (0, q.shape[1] - p.shape[1])).numpy()
    with np.errstate(all="ignore"):  # bad values
        return torch.from_numpy(_residual(chance[:, None], q.numpy(), p.astype(np.float32, copy=False))), ~bad


def _rest(positions, request):
    """For a first row pair without a residual, by rounding or bad input: the target's row without n, fp32 [R, V]."""
    weights = positions.target.whole(request, 0 * request).clone()
    n = positions.drafted[request, 0]
    inside = np.flatnonzero(n < weights.shape[1])
    weights[inside, n[inside]] = 0
    return weights
