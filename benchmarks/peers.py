"""Other ways to do the same job, as plain as their authors wrote them: what the benchmarks compare with."""

import torch


def dense_verify(target_probs, draft_probs, draft_token_ids, delta):
    """Cactus the dense way: h and the residual of every row are materialised, and a token is drawn for every row.

    target_probs [B, m + 1, V], draft_probs [B, m, V], draft_token_ids int64 [B, m]. Returns token ids [B, m + 1], -1
    beyond the tokens emitted. This is what the paper's code does for a batch, written in torch operations.
    """
    B, m, V = draft_probs.shape
    q = target_probs[:, :m]
    n = draft_token_ids[..., None]
    q_n, p_n = q.gather(2, n), draft_probs.gather(2, n)
    h_n = (q_n + (2 * delta * q_n * (1 - q_n)).sqrt()).clamp(max=1)
    h = (q * ((1 - h_n) / (1 - q_n))).scatter(2, n, h_n)
    accepted = torch.rand(B, m, 1) * p_n < h_n
    residual = (h - draft_probs).clamp(min=0)
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-38)
    residual[..., 0] += (
        residual.sum(-1) == 0
    ).float()  # multinomial refuses rows without mass, which accepted rows may be
    recovered = torch.multinomial(residual.view(-1, V), 1).view(B, m)
    bonus = torch.multinomial(target_probs[:, m], 1)
    num_accepted = accepted[..., 0].long().cumprod(1).sum(1, keepdim=True)
    drawn = torch.cat([recovered, bonus], 1).gather(1, num_accepted)
    j = torch.arange(m + 1)
    token_ids = torch.nn.functional.pad(draft_token_ids, (0, 1), value=-1)
    return torch.where(j < num_accepted, token_ids, torch.where(j == num_accepted, drawn, -1))


def transformers_verify(target_logits, draft_logits, draft_token_ids):
    """transformers' sampled assisted generation, one request: logits [m + 1, V] and [m, V], ids [m]. Returns the tokens kept."""
    from transformers.generation.utils import _speculative_sampling

    m = len(draft_token_ids)
    return _speculative_sampling(draft_token_ids[None], draft_logits[None], m, target_logits[None])


def draft_always(config, num_assistant_tokens):
    """Make transformers' assisted generation draft a fixed number of tokens a round. config: the draft's generation config."""
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_assistant_tokens, "constant"
    config.assistant_confidence_threshold = 0.0
