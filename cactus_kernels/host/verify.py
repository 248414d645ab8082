"""Verification on the host: the backend "torch", fast on a CPU.

It reads one row pair of each request in full, whatever the number of drafted tokens. All is done on the host, to which entries
and rows of a GPU are copied: there it waits for the device.
"""

import functools

import numpy as np
import torch

from .. import philox, rules
from ..contract import Logits
from ..definition import ACCEPT, RESIDUAL, REST, TARGET
from ..rules.languages import numpy_language
from . import clip, race, statistics
from .reduce import GROUP
from .rows import Place, bad_prob, rows_of

AT_ONCE = 1 << 18  # elements of target rows that are read before it is seen whether the next ones are needed


def verify(inputs, out, scratch=None):
    """Write the tokens of `inputs` (checked `contract.Inputs`) to `out` (a `VerifyOutput`)."""
    B, V = inputs.batch_size, inputs.vocab_size
    positions = _Positions(inputs)
    stop = positions.judge()
    request = np.arange(B)
    ids, n = positions.drafted, positions.drafted[request, stop]
    valid = ~positions.bad[request, stop]
    if inputs.budget is not None:
        out.spent.copy_(torch.from_numpy(positions.spent(stop)))
    rejected = np.flatnonzero(valid & (n >= 0))
    if inputs.rule.solves and inputs.rule.solves.where_rejected and len(rejected):
        positions.solve(rejected, stop[rejected])
        valid[rejected] &= ~np.isnan(positions.stat[:, rejected, stop[rejected]]).any(0)

    # The weights of the one row pair that a token is drawn from, summed chunk by chunk, and the race.
    def draw(kind, r):
        """Draw for requests r, whose token comes from weights of one kind; for those without a residual, from the rest."""
        weights, fine = positions.weights(kind, r, stop[r])
        sums = race.chunk_sums(weights)
        some = (sums != 0).any(1)
        token[r] = race.race(sums, weights, [x[r] for x in exponentials])
        valid[r] &= fine & (some | (kind == RESIDUAL))
        if kind == RESIDUAL and not some.all():
            draw(REST, r[~some & fine])

    exponentials = race.noise(positions.seed, philox.counter_row(positions.offset, stop), inputs.purposes, V)
    token = np.zeros(B, dtype=np.int64)
    given = np.zeros(B, dtype=bool)
    if inputs.bonus_token_ids is not None:
        given = valid & (stop == positions.num_drafted)
        token[given] = inputs.bonus_token_ids.cpu().numpy()[given]
        valid &= ~given | ((token >= 0) & (token < V))
    for kind, requests in ((TARGET, valid & (n < 0) & ~given), (RESIDUAL, valid & (n >= 0))):
        for r in _groups(requests, max(1, GROUP // V)):
            draw(kind, r)

    # The accepted tokens, the drawn one, then -1.
    ids[np.arange(ids.shape[1]) >= stop[:, None]] = -1
    ids[request[valid], stop[valid]] = token[valid]
    for to, values in ((out.token_ids, ids), (out.num_accepted, stop), (out.valid, valid)):
        to.copy_(torch.from_numpy(values))


class _Positions:
    """What is known of each drafted position and of the end of each draft: arrays [B, m + 1]."""

    def __init__(self, inputs):
        B, shape = inputs.batch_size, (inputs.batch_size, inputs.max_draft_tokens + 1)
        rule = self.rule = inputs.rule
        self.solves_drafted = rule.solves is not None and not rule.solves.where_rejected
        self.inputs = inputs
        self.seed, self.offset = philox.streams(inputs.seed, inputs.offset, B)
        self.strengths, bad_request = _strengths(inputs)
        self.num_drafted, first, bad_index = _spans(inputs)
        self.drafted = _drafted_tokens(inputs, first, self.num_drafted)
        self.target = _target_rows(inputs, self.num_drafted, first)
        self.draft = _draft_rows(inputs, self.drafted, first)
        if inputs.budget is not None:
            budget = inputs.budget.cpu().numpy()
            bad_request |= ~(budget >= 0)
            with np.errstate(invalid="ignore"):
                self.budget = (np.minimum(budget, rules.MOST) * rules.UNIT).astype(np.int64)
            self.spends = np.zeros(shape, dtype=np.int64)

        self.q_n, self.h_n = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
        beyond = max(inputs.vocab_size, inputs.draft_vocab_size)
        self.bad = (self.drafted < -1) | (self.drafted >= beyond) | (bad_request | bad_index)[:, None]
        # The statistics that the rule names, or b and c: 1 where they are not known.
        self.stat = np.ones((len(rule.statistics) + 2 * (rule.solves is not None), *shape), dtype=np.float32)

    def judge(self):
        """The first position of each request whose token is rejected, bad or not there: int64 [B].

        Rows that have to be read whole are read up to there, and a few more where that costs less than to look.
        """
        inputs, (B, columns) = self.inputs, self.drafted.shape
        j = np.arange(columns)
        u = philox.uniform(*philox.philox(self.seed[:, None], 0, ACCEPT, *philox.counter_row(self.offset[:, None], j)))
        reads_rows = isinstance(inputs.target, Logits) or self.rule.statistics or self.solves_drafted
        stop, request, start = np.zeros(B, dtype=np.int64), np.arange(B), 0
        while len(request):
            end = min(columns, start + max(1, AT_ONCE // (inputs.vocab_size * len(request)))) if reads_rows else columns
            at = request[:, None], j[None, start:end]
            accepted = self._accepted(at, u[at])
            stop[request] = start + np.where(accepted.all(1), end - start, (~accepted).argmax(1))
            request, start = request[stop[request] == end], end
        return stop

    def _accepted(self, at, u):
        """Which tokens are accepted at positions, judged after all before them: bool [R, C]; at: int64 [R, 1] and [1, C]."""
        inputs = self.inputs
        request, j = at
        n = self.drafted[at]
        drafted = n >= 0
        q_n = self.target.at(request, j, n)
        # A bonus token that is given has no row.
        bad = self.bad[at] | bad_prob(q_n) & ((j < self.num_drafted[request]) | (inputs.bonus_token_ids is None))
        p_n = np.ones_like(q_n)
        if self.draft is not None:
            p_n = self.draft.at(request, j, n)
            bad |= bad_prob(p_n) & drafted
        q_n, p_n = np.minimum(q_n, np.float32(1)), np.minimum(p_n, np.float32(1))
        asked = drafted
        if self.solves_drafted:  # c is at least 1
            asked = drafted & ~bad & ~(u * p_n < q_n)
        stat = self._statistics(at, asked)
        for s in stat or ():
            bad |= np.isnan(s) & drafted
        with np.errstate(all="ignore"):  # bad values
            h_n = _numpy(self.rule.accept)(q_n, p_n, stat, *(_of(s, request[:, 0]) for s in self.strengths))
            if inputs.budget is not None:
                h_n = self._within_budget(at, h_n, q_n, p_n)
            accepted = (u * p_n < h_n) & drafted & (n < inputs.vocab_size) & ~bad
        self.q_n[at], self.h_n[at], self.bad[at] = q_n, h_n, bad
        return accepted

    def _statistics(self, at, asked):
        """What the rule reads of whole rows, those of positions that are asked for: a tuple of fp32 [R, C]; None if nothing."""
        names = self.rule.statistics
        if not len(self.stat):
            return None
        request, j = (x[asked] for x in np.broadcast_arrays(*at))
        if names:
            self.stat[: len(names), request, j] = statistics.compute(names, self.target, request, j)
        elif self.solves_drafted:
            self.solve(request, j)
        return tuple(s[at] for s in self.stat)

    def solve(self, request, j):
        """Solve for b and c at positions, int64 [R] each."""
        what, strength = self.rule.solves
        strength = _of(self.strengths[strength], request)
        self.stat[:2, request, j] = clip.compute(
            what, self.target, self.draft, request, j, self.drafted[request, j], strength
        )

    def _within_budget(self, at, h_n, q_n, p_n):
        """h_n within what is left of the budgets; notes what each position would spend."""
        request, _ = at
        spends = np.where(self.drafted[at] >= 0, _numpy(rules.spend)(h_n, q_n, p_n), 0)
        before = self.spends[request[:, 0]].sum(1, keepdims=True)
        self.spends[at] = spends
        left = np.maximum(self.budget[request] - before - (spends.cumsum(1) - spends), 0)
        return np.minimum(h_n, q_n * _numpy(rules.cap)(left))

    def spent(self, stop):
        """Nats that the tokens before `stop` spent: float64 [B]."""
        spends = np.where(np.arange(self.spends.shape[1]) < stop[:, None], self.spends, 0)
        left = np.maximum(self.budget[:, None] - (spends.cumsum(1) - spends), 0)
        return np.minimum(spends, left).sum(1) / rules.UNIT

    def weights(self, kind, request, position):
        """The weights of requests, fp32 [R, V], 0 at the drafted token; and which rows are not bad [R]."""
        n, q_n, h_n = (x[request, position] for x in (self.drafted, self.q_n, self.h_n))
        q = self.target.whole(request, position)
        bad = self.target.bad_whole(q)
        if kind == TARGET:
            return q, ~bad
        V, p = q.shape[1], None
        if kind == RESIDUAL and self.draft is not None and self.rule.subtracts_draft:
            p = self.draft.whole(request, position)[:, :V]
            bad |= self.draft.bad_whole(p)
            if p.shape[1] < V:
                p = torch.nn.functional.pad(p, (0, V - p.shape[1]))
        strengths = [_of(s, request) for s in self.strengths]
        stat = tuple(s[:, None] for s in self.stat[:, request, position]) if len(self.stat) else None
        with np.errstate(all="ignore"):  # q_n may be 0
            w = _numpy(self.rule.recover)(q.numpy(), q_n[:, None], h_n[:, None], stat, *strengths)
            if self.inputs.budget is not None:  # the mass that h_n lost to the cap
                w = np.maximum(w, q.numpy() * _numpy(rules.room)(q_n, h_n)[:, None])
        if p is None:
            w = w.copy()
        else:
            w = w - p.numpy()
            np.maximum(w, np.float32(0), out=w)
        inside = np.flatnonzero(n < V)
        w[inside, n[inside]] = 0
        return torch.from_numpy(w), ~bad


@functools.cache
def _numpy(function):
    """A function of a rule over numpy arrays."""
    return rules.bind(function, numpy_language)


def _groups(requests, size):
    """The indices where `requests` [B] is True, at most `size` at a time."""
    indices = np.flatnonzero(requests)
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _of(strength, requests):
    """A strength of some requests: the number, or an array [R, 1]."""
    return strength[requests, None] if isinstance(strength, np.ndarray) else strength


def _host(x, dtype=np.int64):
    return x.cpu().numpy().astype(dtype, copy=False)


def _strengths(inputs):
    """The rule's strengths, numbers or fp32 arrays [B], and which requests have bad ones: bool array [B]."""
    strengths = [_host(s, np.float32) if isinstance(s, torch.Tensor) else s for s in inputs.rule.strengths]
    bad = np.zeros(inputs.batch_size, dtype=bool)
    for s in strengths:
        if isinstance(s, np.ndarray):
            bad |= ~((s >= 0) & (s < np.inf))
    return strengths, bad


def _spans(inputs):
    """Tokens drafted, int64 array [B]; the first flat row of each request [B] (None if padded); whose indices are bad [B]."""
    B, m = inputs.batch_size, inputs.max_draft_tokens
    bad = np.zeros(B, dtype=bool)
    if inputs.row_map is not None:
        slot = _host(inputs.row_map)
        bad = (slot < 0) | (slot >= len(inputs.draft.values))
    if inputs.cu_draft_tokens is None:
        return np.full(B, m), None, bad
    cu = _host(inputs.cu_draft_tokens)
    start, end = cu[:-1], cu[1:]
    disorder = (start < 0) | (end < start) | (end > len(inputs.draft_token_ids)) | (end - start > m)
    return np.where(disorder, 0, end - start), np.where(disorder, 0, start), bad | disorder


def _drafted_tokens(inputs, first, num_drafted):
    """Drafted ids, int64 array [B, m + 1], -1 beyond each draft; a copy."""
    ids, j = _host(inputs.draft_token_ids), np.arange(inputs.max_draft_tokens + 1)
    n = np.full((inputs.batch_size, len(j)), -1, dtype=np.int64)
    if first is None:
        n[:, :-1] = ids
        return n
    inside = j < num_drafted[:, None]
    n[inside] = ids[(first[:, None] + j)[inside]]
    return n


def _target_rows(inputs, num_drafted, first):
    has_bonus = inputs.bonus_token_ids is None
    place = Place(first, has_bonus=has_bonus)
    return rows_of(inputs.target, place, np.arange(inputs.max_draft_tokens + 1) < num_drafted[:, None] + has_bonus)


def _draft_rows(inputs, n, first):
    """None where drafts are one-hot or there is none."""
    draft = inputs.draft
    if draft is None or not inputs.max_draft_tokens or 0 in draft.values.shape[:-1]:
        return None
    slots = None if inputs.row_map is None else _host(inputs.row_map).clip(0, len(draft.values) - 1)
    return rows_of(draft, Place(None if slots is not None else first, slots=slots), n >= 0)
