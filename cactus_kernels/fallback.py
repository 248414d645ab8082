"""What an engine is given for requests that verification found invalid: a legal token, and a count of them."""

import torch

from .inputs import choose_backend


@torch.no_grad()
def fill_invalid(out, target_logits, cu_draft_tokens, has_bonus, count, backend=None):
    """Give each invalid request one token where it has stopped: the arg max of the finite target logits there.

    Its lowest id on ties; id 0 where no logit is finite, or where the row is that of a bonus token that was given. On a GPU one
    launch, which reads no row where all is valid.

    Args:
        out: the `VerifyOutput` of `verify_from_logits`; its token_ids are written to, [b, num_accepted[b]] of invalid b.
        target_logits, cu_draft_tokens: as given there, flat: [N, V] or [N + B, V], and [B + 1].
        has_bonus: whether the target has bonus rows.
        count: int64 [1], the number of invalid requests is added to it.
        backend: as in `verify`.
    """
    if choose_backend(backend, target_logits.device) == "triton":
        from .fallback_triton import fill_invalid as fill

        return fill(out, target_logits, cu_draft_tokens, has_bonus, count)
    for b in (~out.valid).nonzero().squeeze(1).tolist():
        stop, start = int(out.num_accepted[b]), int(cu_draft_tokens[b])
        out.token_ids[b, stop] = 0
        if stop < int(cu_draft_tokens[b + 1]) - start + has_bonus:
            row = target_logits[start + b * has_bonus + stop].float()
            out.token_ids[b, stop] = row.masked_fill(~row.isfinite(), -torch.inf).argmax()
        count += 1
