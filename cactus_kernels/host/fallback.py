"""A legal token for invalid requests, in torch; see `plugins.vllm.fallback`."""

import torch


def fill_invalid(out, target_logits, cu_draft_tokens, has_bonus, count):
    """See `plugins.vllm.fallback.fill_invalid`; waits for the device."""
    for b in (~out.valid).nonzero().squeeze(1).tolist():
        stop, start = int(out.num_accepted[b]), int(cu_draft_tokens[b])
        out.token_ids[b, stop] = 0
        if stop < int(cu_draft_tokens[b + 1]) - start + has_bonus:
            row = target_logits[start + b * has_bonus + stop].float()
            out.token_ids[b, stop] = row.masked_fill(~row.isfinite(), -torch.inf).argmax()
        count += 1
