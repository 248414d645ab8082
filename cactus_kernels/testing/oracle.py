"""A whole case of `verify` by the reference, request by request: what every backend must give, bit for bit."""

import torch

from .. import philox, reference
from ..contract import VerifyOutput
from ..definition import DRAFT_CHUNK, DRAFT_TOKEN
from ..rules import Rule, resolve_rule
from .fuzz import Case


def verified(case: Case) -> VerifyOutput:
    """What `verify` gives for arguments on the CPU, as in `fuzz_case`."""
    ids, cu, budget = case["draft_token_ids"], case.get("cu_draft_tokens"), case.get("budget")
    B, m = ids.shape if cu is None else (len(cu) - 1, case["max_draft_tokens"])
    out = VerifyOutput(
        torch.full((B, m + 1), -1, dtype=ids.dtype, device="cpu"),
        torch.zeros(B, dtype=torch.int32, device="cpu"),
        torch.zeros(B, dtype=torch.bool, device="cpu"),
        None if budget is None else torch.zeros(B, dtype=torch.float64, device="cpu"),
    )
    seeds, offsets = philox.streams(case["seed"], case["offset"], B)
    for b in range(B):
        rows = _rows(case, b)
        if rows is None:  # prefix sums out of order
            continue
        rule = _rule_of(resolve_rule(case.get("rule", "cactus")), b)
        left = None if budget is None or rule.lossless else budget[b].item()
        stream = {"seed": int(seeds[b]), "offset": int(offsets[b])}
        if rule.whole_draft == "coupled":
            size = max(x.shape[-1] for x in (case["target_probs"], case["draft_probs"]) if x is not None)
            tokens, accepted, valid, spent = coupled(rows[0], rows[2], size, **stream)
        else:
            tokens, accepted, valid, spent = reference.verify(*rows, rule, **stream, budget=left)
        out.token_ids[b, : len(tokens)] = torch.tensor(tokens, dtype=ids.dtype, device="cpu")
        out.num_accepted[b], out.valid[b] = accepted, valid
        if out.spent is not None:
            out.spent[b] = spent
    return out


def coupled(target, token_ids, size, *, seed, offset):
    """`Coupled` for one request, as `reference.verify`: the target's own draw at every position, kept while it equals the draft.

    target: fp32 [m + 1, V]. size: the larger of both vocabularies.
    """
    tokens: list[int] = []
    for n, q in zip([*token_ids, -1], target, strict=False):
        at = seed, (offset + len(tokens)) % 2**64
        drawn = [] if reference.bad(q) else reference.draw(q, at, (DRAFT_CHUNK, DRAFT_TOKEN))
        if not drawn or not -1 <= n < size:
            return tokens, len(tokens), False, 0.0
        if n != drawn[0]:
            return [*tokens, *drawn], len(tokens), True, 0.0
        tokens += drawn
    raise AssertionError("-1 ends the draft")


def _rows(case: Case, b: int) -> tuple[torch.Tensor, torch.Tensor | None, list[int]] | None:
    """Target rows, draft rows and drafted tokens of a request; None where its prefix sums are out of order."""
    target, draft, ids = case["target_probs"].float(), case["draft_probs"], case["draft_token_ids"]
    draft, cu = None if draft is None else draft.float(), case.get("cu_draft_tokens")
    if cu is None:
        return target[b], None if draft is None else draft[b], ids[b].tolist()
    start, end = int(cu[b]), int(cu[b + 1])
    if start < 0 or end < start or end > len(ids) or end - start > case["max_draft_tokens"]:
        return None
    rows = None if draft is None else draft[start:end]
    return target[start + b : end + b + 1], rows, ids[start:end].tolist()


def _rule_of(rule: Rule, b: int) -> Rule:
    """A rule with its strengths for one request."""
    one = Rule()
    for name in Rule.__annotations__:
        if hasattr(rule, name):
            setattr(one, name, getattr(rule, name))
    one.strengths = tuple(s[b].item() if isinstance(s, torch.Tensor) else s for s in rule.strengths)
    return one
