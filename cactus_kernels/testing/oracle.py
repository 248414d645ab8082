"""A whole case of `verify` by the reference, request by request: what every backend must give, bit for bit."""

import numpy as np
import torch

from .. import philox, reference
from ..contract import VerifyOutput
from ..definition import ACCEPT, BLOCK_SHIFT, CHUNK, DRAFT_CHUNK, DRAFT_TOKEN, ONE
from ..rules import Rule, resolve_rule
from ..rules import block as rules
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
        elif rule.whole_draft == "block":
            tokens, accepted, valid, spent = block(*rows, **stream)
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


def block(target, draft, token_ids, *, seed, offset):
    """`Block` for one request, as `reference.verify`, from the definition in its docstring.

    An invalid request emits nothing, unless all of its draft was accepted: before that, no token of it was.
    """
    length, V = [*token_ids, -1].index(-1), target.shape[1]
    if draft is None:
        draft = torch.from_numpy(np.float32(np.arange(V) == np.array(token_ids)[:, None]))
        size = V
    else:
        size = max(V, draft.shape[1])
    bad, chances = (reference.bad, [torch.ones((), dtype=torch.float32, device="cpu")])
    target, draft = (torch.nn.functional.pad(rows, (0, size - rows.shape[1])) for rows in (target, draft))
    for n, q, p in zip(token_ids[:length], target, draft, strict=False):
        if not 0 <= n < size or bad(q[n]) or bad(p[n]):
            return [], 0, False, 0.0
        chances.append(rules.chance_with(chances[-1], q[n].clamp(max=1), p[n].clamp(max=1)))
    for i in range(length, -1, -1):
        at, chance = (seed, (offset + i) % 2**64), chances[i]
        u = philox.uniform(*reference.words((seed, (offset + i - 1) % 2**64), 0, ACCEPT))[0]
        q = target[i, :V]
        if i == length:
            if length and not u < chance:
                continue
            token = [] if bad(q) else reference.draw(q, at)
            return [*token_ids[:i], *token], i, bool(token), 0.0
        if chance == 0:
            continue
        p = draft[i, :V]
        if bad(q) or bad(p):
            return [], 0, False, 0.0
        w = rules.residual(chance, q, p)
        units = sum(int((chunk * ONE).long().sum()) >> BLOCK_SHIFT for chunk in w.split(CHUNK))
        total = torch.tensor(units, dtype=torch.int64, device="cpu").float() * (2**BLOCK_SHIFT / ONE)
        if i == 0 or rules.keeps(u, chance, total):
            rest = torch.where(torch.arange(V, dtype=torch.int64, device="cpu") == token_ids[i], 0.0, q)
            token = reference.draw(w, at) or reference.draw(rest, at)
            return ([*token_ids[:i], *token], i, True, 0.0) if token else ([], 0, False, 0.0)
    raise AssertionError("a chain of no tokens is kept")


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
