"""`verify`: accept or reject drafted tokens against the target, and draw the next token. Checks, then a backend."""

import torch

from . import backends, ops
from .contract import (
    INDEX_DTYPES,
    Inputs,
    Logits,
    Probs,
    VerifyOutput,
    check_call,
    check_device,
    check_output,
    check_tensor,
    new_output,
)
from .definition import MAX_DRAFT_TOKENS
from .rules import resolve_rule
from .sampling import RowStats, Sampling


@torch.no_grad()
def verify(
    target_probs,
    draft_probs,
    draft_token_ids,
    rule,
    *,
    seed,
    offset,
    cu_draft_tokens=None,
    max_draft_tokens=None,
    budget=None,
    out=None,
    scratch=None,
    backend=None,
) -> VerifyOutput:
    """Verify the drafted tokens of a batch and draw the token that follows them, in one launch on a GPU.

    Token n of a draft, drawn from p, is accepted iff u * p(n) < h(n), h being the rule's; the first rejection is replaced
    by a token from norm((h - p)+); a draft accepted whole is followed by a bonus token from the target's last row
    (Leviathan et al. 2023, arXiv 2211.17192; Cactus: arXiv 2604.04987).

    Rows are probabilities in fp32, bf16 or fp16, of any stride but contiguous in the vocabulary; target and draft may
    differ in dtype and in padding of the vocabulary (the shorter is 0 beyond its end). They need not sum to exactly 1, but
    no entry may be above 1.01: logits are bad input. Inputs are never written to. Look at `valid` of what comes back, or
    call `raise_if_invalid()`. An engine's loop is in docs/engine.md.

    Args:
        target_probs: [B, m + 1, V], or flat [N + B, V]: m_b + 1 rows for each request, the bonus row last.
        draft_probs: [B, m, V] or flat [N, V], what each drafted token was drawn from; None: one-hot drafts.
        draft_token_ids: int32 or int64 [B, m] or flat [N]. An id of -1 ends its request's draft there: a token is drawn
            from the target row at that position.
        rule: a `Rule` or its name (docs/rules.md). One with statistics of the target's rows, or solved for row pairs, takes
            launches of its own on a GPU. `Block` takes two in all; an invalid request emits nothing under it, unless its
            whole draft was accepted.
        seed: int64 [B], the random stream of each request; or an int, which gives request r the stream (seed, r).
        offset: int64 [B] or an int: rows that each request has drafted or verified so far. Never use one for two calls
            of `verify`: advance it by m_b + 1 after each, whatever was accepted. The draws of a round's drafts (`draw`, at
            offset + j) and its verification (at offset) share it: their words are apart. For `Coupled` it is the number of
            tokens before, and advances by the tokens emitted.
        cu_draft_tokens: int32 or int64 [B + 1], prefix sums of m_b (0 is legal) for the flat layout, the first of them 0;
            rows beyond the last request are not looked at. None: padded.
        max_draft_tokens: int, at least every m_b (a request with more is invalid); needed with `cu_draft_tokens`, else m.
            At most 64.
        budget: float64 [B], nats that each request may still spend, >= 0: subtract `spent` from it after each call. Then the
            log-likelihood ratio of a whole text to the target is at most what it had at the start (docs/rules.md). For rules
            that keep the target's proportions: SpS, Cactus, AdaptiveCactus, Capped, Interpolation. None: no budget.
        out: a `VerifyOutput` to write to; None: allocated.
        scratch: `new_scratch(B, V, device)`, needed under a CUDA graph; None: kept by the launcher. `Coupled` draws
            from every row of the target: as many as those in place of B.
        backend: "triton", "torch", or None: triton on a GPU, torch elsewhere.

    Raises:
        TypeError, ValueError: wrong types, shapes, dtypes or devices, before any work. Bad values are not looked at here,
            which would wait for the device: they make their request's `valid` False, and no other request changes.
        RuntimeError: the backend asked for is not to be had.
    """
    rule = resolve_rule(rule)
    batch_size, m = _layout(draft_token_ids, cu_draft_tokens, max_draft_tokens)
    draft = None if draft_probs is None else Probs(draft_probs)
    inputs = Inputs(
        Probs(target_probs), draft, draft_token_ids, rule, seed, offset, cu_draft_tokens, m, batch_size, budget=budget
    )  # fmt: skip
    return _run(inputs, out, scratch, backend)


@torch.no_grad()
def verify_from_logits(
    target_logits,
    draft_logits,
    draft_token_ids,
    rule,
    *,
    seed,
    offset,
    sampling=None,
    draft_sampling=None,
    draft_stats=None,
    draft_probs=None,
    bonus_token_ids=None,
    row_map=None,
    cu_draft_tokens=None,
    max_draft_tokens=None,
    budget=None,
    out=None,
    scratch=None,
    backend=None,
) -> VerifyOutput:
    """`verify` from raw logits: no softmax is written. On a GPU two launches; with top-k or top-p three.

    The first launch reduces rows to statistics (`RowStats`), by which the second makes probabilities as it reads. What is
    not said here is as in `verify`. On triton, rules with statistics, or solved for row pairs, write the
    probabilities after all, and take the padded layout alone.

    Args:
        target_logits: [B, m + 1, V], or flat [N + B, V], fp32, bf16 or fp16.
        draft_logits: [B, m, V] or flat [N, V], what each drafted token was drawn from; None: one-hot drafts, or `draft_probs`.
        sampling: a `Sampling`: what the target's logits stand for; None: temperature 1, nothing dropped. A request of
            temperature 0 is greedy.
        draft_sampling: the same for the draft's logits; None: that of the target.
        draft_stats: the `RowStats` that `sample` gave for the drafted rows, [B, m] or flat [N] like the rows: they are not
            reduced again, and `draft_sampling` is in them.
        draft_probs: probabilities in place of `draft_logits`, of the same shape.
        bonus_token_ids: int32 or int64 [B], the token that follows a draft accepted whole, drawn by the caller: then the
            target has no bonus rows, [B, m, V] or flat [N, V].
        row_map: int32 or int64 [B]: draft rows (and `draft_stats`) are [slots, K, V], K >= m, those of request b in slot
            row_map[b], whatever the layout of the rest.
        scratch: `new_scratch(B, V, device, rows=2 * m + 1)`, needed under a CUDA graph; None: kept here.
            With `Coupled`, `new_scratch(R, V, device)` for the R rows of the target.

    Raises:
        TypeError, ValueError, RuntimeError: as `verify`; also both or neither of what excludes or needs each other.
    """
    sampling = Sampling() if sampling is None else sampling
    draft = _draft_rows(draft_logits, draft_probs, draft_stats, draft_sampling, sampling, row_map)
    rule = resolve_rule(rule)
    batch_size, m = _layout(draft_token_ids, cu_draft_tokens, max_draft_tokens)
    inputs = Inputs(
        Logits(target_logits, sampling), draft, draft_token_ids, rule, seed, offset, cu_draft_tokens, m, batch_size,
        bonus_token_ids=bonus_token_ids, row_map=row_map, budget=budget,
    )  # fmt: skip
    return _run(
        inputs, out, scratch, backend, ("target_logits", "draft_logits" if draft_probs is None else "draft_probs")
    )


def _draft_rows(logits, probs, stats, draft_sampling, sampling, row_map) -> Probs | Logits | None:
    """What the draft was given by, of the arguments of `verify_from_logits`."""
    if probs is not None:
        for name, value in (
            ("draft_logits", logits),
            ("draft_stats", stats),
            ("draft_sampling", draft_sampling),
        ):
            if value is not None:
                raise ValueError(
                    f"draft_probs and {name} are both given: give draft_probs, or draft_logits with the rest"
                )
        return Probs(probs)
    if logits is None:
        if stats is not None or draft_sampling is not None or row_map is not None:
            raise ValueError("draft_stats, draft_sampling and row_map belong to draft rows: pass draft_logits")
        return None
    if stats is None:
        return Logits(logits, sampling if draft_sampling is None else draft_sampling)
    if draft_sampling is not None:
        raise ValueError("draft_stats hold the draft's sampling already: leave draft_sampling out")
    if not isinstance(stats, RowStats):
        raise TypeError(f"draft_stats must be a RowStats, got {type(stats).__name__}")
    return Logits(logits, stats)


def _layout(draft_token_ids, cu_draft_tokens, max_draft_tokens):
    """The number of requests, and of tokens the longest draft may have."""
    flat = cu_draft_tokens is not None
    check_tensor("draft_token_ids", draft_token_ids, 1 if flat else 2, INDEX_DTYPES)
    if flat:
        check_tensor("cu_draft_tokens", cu_draft_tokens, 1, INDEX_DTYPES)
        if isinstance(max_draft_tokens, bool) or not isinstance(max_draft_tokens, int) or max_draft_tokens < 0:
            raise TypeError(f"cu_draft_tokens needs max_draft_tokens, an int >= 0; got {max_draft_tokens!r}")
        batch_size, m = len(cu_draft_tokens) - 1, max_draft_tokens
        if batch_size < 0:
            raise ValueError("cu_draft_tokens must have shape [B + 1], got [0]")
    else:
        batch_size, m = draft_token_ids.shape
        if max_draft_tokens not in (None, m):
            raise ValueError(f"max_draft_tokens is {max_draft_tokens}, but the padded draft_token_ids have m = {m}")
    if m > MAX_DRAFT_TOKENS:
        raise ValueError(f"at most {MAX_DRAFT_TOKENS} drafted tokens a request, got {m}: verify them in shorter drafts")
    return batch_size, m


def _run(inputs, out, scratch, backend, names=("target_probs", "draft_probs")) -> VerifyOutput:
    """Check what both entry points share, then run a backend. names: of the target's and the draft's rows."""
    check_call(inputs, names)
    if torch.compiler.is_compiling():
        if out is not None or scratch is not None:
            raise ValueError("out and scratch are not taken while torch.compile traces: it plans memory itself")
        if inputs.budget is not None:
            raise ValueError("a budget is not taken while torch.compile traces: call verify outside of it")
        return VerifyOutput(*ops.call_verify(inputs, backend))
    if out is None:
        out = new_output(inputs)
    else:
        check_output(out, inputs)
    check_device(inputs.device, *inputs.tensors, out.token_ids, out.num_accepted, out.valid, out.spent, scratch)
    return backends.run(inputs, out, scratch, backend)
