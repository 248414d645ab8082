"""Verification in torch: the reference for the kernel, and the fast path on a CPU.

It reads one row pair of each request in full, whatever the number of drafted tokens. On a GPU it waits for the device.
"""

import torch

from . import philox, race_torch

MAX_PROB = 1.01  # probabilities above this are bad input; between 1 and this they are rounding
GROUP = 1 << 18  # row elements handled at once: enough to amortise an operation, few enough for the cache

# What a token is drawn from: the target row; the residual (h - p)+; or h without the drafted token, where rounding or
# bad input left no residual.
TARGET, RESIDUAL, REST = range(3)


class Rows:
    """Rows of probabilities, addressed by request and position. Padded [B, m, V], or flat [N, V] with `first` [B]."""

    def __init__(self, probs, first):
        self.probs, self.first, self.vocab_size = probs, first, probs.shape[-1]

    def whole(self, request, position):
        """fp32 [R, V]; request and position int64 [R]."""
        if len(request) == 1:  # a view
            index = [int(i) for i in self._index(request, position)]
            return self.probs[tuple(index)][None].float()
        return self.probs[self._index(request, position)].float()

    def at(self, request, position, token):
        """fp32 entries, 0 where the token is not in this vocabulary; int64 arguments broadcast."""
        inside = (token >= 0) & (token < self.vocab_size)
        values = self.probs[(*self._index(request, position), token.clamp(0, self.vocab_size - 1))]
        return torch.where(inside, values.float(), 0.0)

    def _index(self, request, position):
        if self.first is None:
            return request, position
        # Past a request's own rows entries are masked, but must lie somewhere.
        return ((self.first[request] + position).clamp(max=self.probs.shape[0] - 1),)


def verify(inputs, out, scratch=None):
    """Write the tokens of `inputs` (checked by `verify.verify`) to `out` (a `VerifyOutput`)."""
    if inputs.cu_draft_tokens is None and not inputs.max_draft_tokens:
        return draw(inputs, out)
    B, V, device = inputs.batch_size, inputs.vocab_size, inputs.target.device
    seed, offset = _per_request(inputs)
    request = torch.arange(B, device=device)
    num_drafted, first, bad_request = _spans(inputs)
    target = Rows(inputs.target, None if first is None else first + request)
    draft = None if inputs.draft is None else Rows(inputs.draft, first)
    strengths = [s[:, None] if isinstance(s, torch.Tensor) else s for s in inputs.rule.strengths]

    # 1. Gather q_n and p_n of the drafted tokens: [B, m + 1], the last column being the end of every draft.
    m = inputs.max_draft_tokens if inputs.draft_token_ids.numel() else 0
    j = torch.arange(m, device=device)
    ids = n = _drafted_tokens(inputs, first, num_drafted, m)
    bad = (n < -1) | (n >= max(V, inputs.draft_vocab_size)) | bad_request[:, None]
    q_n = p_n = torch.zeros(n.shape, device=device)
    stop = torch.zeros(B, dtype=torch.int64, device=device)
    if m:
        q_n = target.at(request[:, None], j, n[:, :m])
        p_n = torch.ones_like(q_n) if draft is None else draft.at(request[:, None], j, n[:, :m])
        both = torch.stack([q_n, p_n])
        bad[:, :m] |= bad_prob(both).any(0)
        q_n, p_n = torch.nn.functional.pad(both.clamp(max=1), (0, 1))

        # 2. Accept until the first token that is rejected, bad or not there.
        h_n = inputs.rule.h(q_n, q_n, p_n, True, None, *strengths)
        row = philox.counter_row(offset[:, None], torch.arange(m + 1, device=device))
        u = philox.uniform(*philox.philox(seed[:, None], 0, philox.ACCEPT, *row))
        accepted = (u * p_n < h_n) & (n >= 0) & ~bad
        stop = (~accepted).int().argmax(1)
    valid = ~bad[request, stop]
    n, q_n, p_n = n[request, stop], q_n[request, stop], p_n[request, stop]
    rejected = n >= 0

    # 3. Sum the weights of the one row pair that a token is drawn from, chunk by chunk.
    def weights(kind, r, tokens=None):
        """Weights of requests r: of whole rows [R, V], and which have bad entries; or of `tokens` [R, K], with 0 at n."""
        at = request[r], stop[r]
        q = target.whole(*at) if tokens is None else target.at(*(x[:, None] for x in at), tokens)
        bad = bad_row(q) if tokens is None else None
        if kind == TARGET:
            return q, bad
        of_r = [s[r] if isinstance(s, torch.Tensor) else s for s in strengths]
        w = inputs.rule.h(q, q_n[r, None], p_n[r, None], False, None, *of_r)
        if kind == RESIDUAL and draft is not None:
            p = draft.whole(*at)[:, :V] if tokens is None else draft.at(*(x[:, None] for x in at), tokens)
            bad = bad | bad_row(p) if tokens is None else None
            k = p.shape[1]
            w = (w - p if k == w.shape[1] else torch.cat([w[:, :k] - p, w[:, k:]], dim=1)).clamp_(min=0)
        return w if tokens is None else torch.where((tokens == n[r, None]) | (tokens >= V), 0.0, w), bad

    sums = torch.zeros((B, race_torch.num_chunks(V)), dtype=torch.int64, device=device)

    def scan(kind, requests):
        for r in _groups(requests, B, max(1, GROUP // V)):
            w, bad = weights(kind, r)
            s = race_torch.chunk_sums(w)
            if kind != TARGET:
                # Integers: taking the drafted token's weight off is the same as never adding it.
                k = n[r, None].clamp(max=V - 1)
                s.scatter_add_(1, k // race_torch.CHUNK, -(w.gather(1, k) * race_torch.ONE).long() * (n[r, None] < V))
            sums[r] = s
            valid[r] &= ~bad

    kinds = {TARGET: (valid & ~rejected).nonzero().squeeze(1), RESIDUAL: (valid & rejected).nonzero().squeeze(1)}
    for kind, requests in kinds.items():
        scan(kind, requests)
    some = (sums != 0).any(1)
    if not some.all():
        no_residual = valid & rejected & ~some
        kinds = {TARGET: kinds[TARGET], RESIDUAL: (valid & rejected & some).nonzero().squeeze(1)}
        kinds[REST] = no_residual.nonzero().squeeze(1)
        scan(REST, kinds[REST])
        valid &= (sums != 0).any(1)

    # 4. The race between chunks, then between the tokens of the winning chunk.
    def token_weights(tokens):
        w = torch.zeros(tokens.shape, device=device)
        for kind, requests in kinds.items():
            for r in _groups(requests, B, B):
                w[r] = weights(kind, r, tokens[r])[0]
        return w

    noise = race_torch.noise(seed, philox.counter_row(offset, stop), inputs.purposes, V)
    token = race_torch.race(sums, token_weights, noise)

    # 5. The accepted tokens, the drawn one, then -1.
    k = torch.arange(out.token_ids.shape[1], device=device)
    ids = torch.nn.functional.pad(ids, (0, len(k) - m - 1), value=-1).masked_fill(k >= stop[:, None], -1)
    ids = torch.where((k == stop[:, None]) & valid[:, None], token[:, None], ids)
    out.token_ids.copy_(ids)
    out.num_accepted.copy_(stop)
    out.valid.copy_(valid)


def draw(inputs, out):
    """`verify` where no request has drafts, padded: one token from each row, with few operations."""
    rows, V = inputs.target[:, 0].float(), inputs.vocab_size
    groups = rows.split(max(1, GROUP // V))
    sums = torch.cat([race_torch.chunk_sums(w) for w in groups])
    _, _, bad = _spans(inputs)
    valid = ~(bad | torch.cat([bad_row(w) for w in groups])) & (sums != 0).any(1)

    def token_weights(tokens):
        return rows.gather(1, tokens.clamp(max=V - 1)).masked_fill(tokens >= V, 0.0)

    token = race_torch.race(sums, token_weights, inputs.noise or draw_noise(inputs, 1)[0])
    out.token_ids.copy_(torch.where(valid, token, -1)[:, None])
    out.num_accepted.zero_()
    out.valid.copy_(valid)


def draw_noise(inputs, rows):
    """The noise of `draw` for the rows offset, offset + 1, … of each request: a list of what `race_torch.noise` gives."""
    B = inputs.batch_size
    seed, offset = _per_request(inputs)
    position = (offset + torch.arange(rows, device=offset.device)[:, None]).view(-1)
    noise = race_torch.noise(seed.repeat(rows), philox.counter_row(position, 0), inputs.purposes, inputs.vocab_size)
    return list(zip(*(x.split(B) for x in noise), strict=True))


def bad_prob(x):
    """True where a probability is NaN, infinite, negative or above 1.01."""
    return ~((x >= 0) & (x <= MAX_PROB))


def bad_row(x):
    """Which rows of x [R, K] hold a bad probability: bool [R]."""
    return ~((x.amin(1) >= 0) & (x.amax(1) <= MAX_PROB))


def _groups(requests, batch_size, size):
    """Indices of requests, at most `size` at a time; a slice where they are the whole batch, which costs no copies."""
    if not len(requests):
        return ()
    return (slice(None),) if len(requests) == batch_size <= size else requests.split(size)


def _per_request(inputs):
    """Seed and offset of every request, int64 [B]."""
    B, device = inputs.batch_size, inputs.target.device
    seed, offset = inputs.seed, inputs.offset
    if isinstance(seed, int):
        seed = philox.request_seeds(seed, B, device)
    if isinstance(offset, int):
        offset = torch.full((B,), offset, dtype=torch.int64, device=device)
    return seed, offset


def _spans(inputs):
    """Tokens drafted [B] int64, the first flat row [B] int64 (None if padded), and requests whose numbers are bad [B]."""
    B, device = inputs.batch_size, inputs.target.device
    bad = torch.zeros(B, dtype=torch.bool, device=device)
    for s in inputs.rule.strengths:
        if isinstance(s, torch.Tensor):
            bad |= ~((s >= 0) & (s < float("inf")))
    if inputs.cu_draft_tokens is None:
        return torch.full((B,), inputs.max_draft_tokens, device=device), None, bad
    start, end = inputs.cu_draft_tokens[:-1].long(), inputs.cu_draft_tokens[1:].long()
    disorder = (start < 0) | (end < start) | (end > len(inputs.draft_token_ids))
    disorder |= end - start > inputs.max_draft_tokens
    start, end = start.masked_fill(disorder, 0), end.masked_fill(disorder, 0)
    return end - start, start, bad | disorder


def _drafted_tokens(inputs, first, num_drafted, m):
    """Drafted ids int64 [B, m + 1], -1 beyond each draft."""
    j = torch.arange(m, device=num_drafted.device)
    if first is None:
        ids = inputs.draft_token_ids[:, :m]
    else:
        at = (first[:, None] + j).clamp(max=max(len(inputs.draft_token_ids) - 1, 0))
        ids = inputs.draft_token_ids[at]
    return torch.nn.functional.pad(torch.where(j < num_drafted[:, None], ids.long(), -1), (0, 1), value=-1)
