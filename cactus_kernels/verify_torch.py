"""Verification in torch: the reference for the kernel, and the fast path on a CPU.

It reads one row pair of each request in full, whatever the number of drafted tokens. All is done on the host, to which entries
and rows of a GPU are copied: there it waits for the device.
"""

import functools

import numpy as np
import torch

from . import clip, numpy_language, philox, race_torch, row_statistics, rules
from .rows_torch import COLUMNS, GROUP, LogitRows, ProbRows, Settings, reduced

# What a token is drawn from: the target row; the residual (h - p)+; or h without the drafted token, where rounding or
# bad input left no residual.
TARGET, RESIDUAL, REST = range(3)


def verify(inputs, out, scratch=None):
    """Write the tokens of `inputs` (checked by `verify.verify`) to `out` (a `VerifyOutput`)."""
    B, V, m = inputs.batch_size, inputs.vocab_size, inputs.max_draft_tokens
    seed, offset = philox.streams(inputs.seed, inputs.offset, B)
    strengths, bad_request = _strengths(inputs)
    num_drafted, first, bad_index = _spans(inputs)
    ids = n = _drafted_tokens(inputs, first, num_drafted)
    target, draft = _target_rows(inputs, num_drafted, first), _draft_rows(inputs, n, first)
    stat = row_statistics.compute(inputs.rule.statistics, target, n >= 0)
    if inputs.rule.solved is not None:
        stat = clip.compute(inputs.rule, target, draft, n, (n >= 0) & (inputs.rule.solved == "drafted"), strengths)

    body = recovery = _numpy_body(inputs.rule.h)
    if inputs.budget is not None:
        recovery = _numpy_body(rules.within(body))
        bad_request |= ~(inputs.budget.cpu().numpy() >= 0)

    # 1. q_n and p_n of the drafted tokens: [B, m + 1], the last column being the end of every draft.
    request, j = np.arange(B)[:, None], np.arange(m + 1)
    q_n = target.at(request, j, n)
    p_n = np.ones_like(q_n) if draft is None else draft.at(request, j, n)
    bad = (n < -1) | (n >= max(V, inputs.draft_vocab_size)) | (bad_request | bad_index)[:, None]
    # A bonus token that is given has no row.
    bad |= target.bad_at(request, j, q_n) & ((j < num_drafted[:, None]) | (inputs.bonus_token_ids is None))
    if draft is not None:
        bad |= draft.bad_at(request, j, p_n) & (n >= 0)
    for s in stat or ():
        bad |= np.isnan(s) & (n >= 0)
    q_n, p_n = np.minimum(q_n, np.float32(1)), np.minimum(p_n, np.float32(1))

    # 2. Accept until the first token that is rejected, bad or not there.
    row = philox.counter_row(offset[:, None], j)
    u = philox.uniform(*philox.philox(seed[:, None], 0, philox.ACCEPT, *row))
    with np.errstate(all="ignore"):  # bad values
        h_n = body(q_n, q_n, p_n, True, stat, *(_of(s, slice(None)) for s in strengths))
        if inputs.budget is not None:
            spends, left, cap = _within(inputs.budget, h_n, q_n, p_n, n)
            h_n, stat = np.minimum(h_n, q_n * cap), (*(stat or ()), cap)
        accepted = (u * p_n < h_n) & (n >= 0) & ~bad
    stop = (~accepted).argmax(1)
    if inputs.budget is not None:
        out.spent.copy_(torch.from_numpy(np.where(j < stop[:, None], np.minimum(spends, left), 0).sum(1) / rules.UNIT))
    request = request[:, 0]
    valid = ~bad[request, stop]
    n, q_n, p_n = ids[request, stop], q_n[request, stop], p_n[request, stop]

    if inputs.rule.solved == "rejected":
        where = (j == stop[:, None]) & (ids >= 0) & valid[:, None]
        stat = clip.compute(inputs.rule, target, draft, ids, where, strengths)

    # 3. The weights of the one row pair that a token is drawn from, summed chunk by chunk, and the race.
    def draw(kind, r):
        """Draw for requests r, whose token comes from weights of one kind; for those without a residual, from the rest."""
        of_r = stat and tuple(s[r, stop[r]] for s in stat)
        weights, fine = _weights(
            kind, target, draft, r, stop[r], (n[r], q_n[r], p_n[r]), inputs.rule, recovery, of_r, strengths
        )
        sums = chunk_sums(weights)
        some = (sums != 0).any(1)
        token[r] = race_torch.race(sums, weights, [x[r] for x in exponentials])
        valid[r] &= fine & (some | (kind == RESIDUAL))
        if kind == RESIDUAL and not some.all():
            draw(REST, r[~some & fine])

    chunk_sums = race_torch.float_chunk_sums if inputs.sampling else race_torch.chunk_sums
    exponentials = race_torch.noise(seed, philox.counter_row(offset, stop), inputs.purposes, V)
    token = np.zeros(B, dtype=np.int64)
    given = np.zeros(B, dtype=bool)
    if inputs.bonus_token_ids is not None:
        given = valid & (stop == num_drafted)
        token[given] = inputs.bonus_token_ids.cpu().numpy()[given]
        valid &= ~given | ((token >= 0) & (token < V))
    for kind, requests in ((TARGET, valid & (n < 0) & ~given), (RESIDUAL, valid & (n >= 0))):
        for r in _groups(requests, max(1, GROUP // V)):
            draw(kind, r)

    # 4. The accepted tokens, the drawn one, then -1.
    ids[j >= stop[:, None]] = -1
    ids[request[valid], stop[valid]] = token[valid]
    for to, values in ((out.token_ids, ids), (out.num_accepted, stop), (out.valid, valid)):
        to.copy_(torch.from_numpy(values))


def _weights(kind, target, draft, request, position, drafted, rule, body, stat, strengths):
    """The weights of requests, fp32 [R, V], 0 at the drafted token (n, its q and p); and which rows are not bad [R]."""
    n, q_n, p_n = drafted
    q = target.whole(request, position)
    bad = target.bad_whole(q)
    if kind == TARGET:
        return q, ~bad
    V, p = q.shape[1], None
    if kind == RESIDUAL and draft is not None and rule.subtracts_draft:
        p = draft.whole(request, position)[:, :V]
        bad |= draft.bad_whole(p)
        if p.shape[1] < V:
            p = torch.nn.functional.pad(p, (0, V - p.shape[1]))
    strengths = [_of(s, request) for s in strengths]
    stat = stat and tuple(s[:, None] for s in stat)
    w = body(q.numpy(), q_n[:, None], p_n[:, None], False, stat, *strengths)
    w = torch.from_numpy(w.copy() if p is None else np.maximum(w - p.numpy(), np.float32(0)))
    inside = np.flatnonzero(n < V)
    w[inside, n[inside]] = 0
    return w, ~bad


def _within(budget, h_n, q_n, p_n, drafted):
    """What each position would spend, what is left before it, both int64 [B, m + 1], and the cap that makes, fp32.

    budget: float64 [B]. drafted: int64 [B, m + 1], -1 where nothing is drafted.
    """
    spends = np.where(drafted >= 0, _numpy_body(rules.spend)(h_n, q_n, p_n), 0)
    whole = (np.minimum(budget.cpu().numpy(), rules.MOST) * rules.UNIT).astype(np.int64)
    left = np.maximum(whole[:, None] - (spends.cumsum(1) - spends), 0)
    return spends, left, _numpy_body(rules.cap)(left)


@functools.cache
def _numpy_body(body):
    """The body of a rule over numpy arrays."""
    return rules.bind(body, numpy_language)


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
        bad = (slot < 0) | (slot >= len(inputs.draft))
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
    rows, has_bonus = inputs.target, inputs.bonus_token_ids is None

    def index(request, position):
        if first is None:
            return request, position.clip(max=rows.shape[1] - 1)
        return ((first[request] + request * has_bonus + position).clip(max=len(rows) - 1),)

    if inputs.sampling is None:
        return ProbRows(rows, index)
    counts = np.arange(inputs.max_draft_tokens + 1) < num_drafted[:, None] + has_bonus
    return _logit_rows(rows, index, counts, inputs.sampling)


def _draft_rows(inputs, n, first):
    """None where drafts are one-hot or there is none."""
    rows = inputs.draft
    if rows is None or not inputs.max_draft_tokens or 0 in rows.shape[:-1]:
        return None
    row_map = None if inputs.row_map is None else _host(inputs.row_map).clip(0, len(rows) - 1)

    def index(request, position):
        if row_map is not None:
            return row_map[request], position.clip(max=rows.shape[1] - 1)
        if first is None:
            return request, position.clip(max=rows.shape[1] - 1)
        return ((first[request] + position).clip(max=len(rows) - 1),)

    if inputs.draft_stats is not None:
        return LogitRows(rows, index, _host(inputs.draft_stats.packed, np.float32), index)
    if inputs.draft_sampling is None:
        return ProbRows(rows, index)
    return _logit_rows(rows, index, n >= 0, inputs.draft_sampling)


def _logit_rows(rows, index, counts, sampling):
    """Rows of logits with the statistics of those that count, bool array [B, m + 1]."""
    request, position = counts.nonzero()
    stats = np.full((*counts.shape, COLUMNS), np.nan, dtype=np.float32)
    stats[request, position] = reduced(ProbRows(rows, index), request, position, Settings(sampling, len(counts)))
    return LogitRows(rows, index, stats, lambda request, position: (request, position))
