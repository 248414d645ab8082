"""What an engine is given for requests that verification found invalid: a legal token, and a count of them."""

import torch

from ...backends import choose_backend
from ...host import fallback


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
        from ...kernels.fallback import fill_invalid as fill
    else:
        fill = fallback.fill_invalid
    fill(out, target_logits, cu_draft_tokens, has_bonus, count)
