"""flash-attn's two functions in plain torch, so that models with flash attention 2 run on any device and in float64."""

import torch
from transformers import modeling_flash_attention_utils as utils


def attend(q, k, v, scale, causal, window, softcap):
    """One text: q [Tq, heads, D], k and v [Tk, kv heads, D]; causal at the bottom right, as flash attention is."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = back < 0 if causal else torch.zeros_like(back, dtype=torch.bool)
    if window[0] >= 0:
        hidden = hidden | (back > window[0])
    # A query that sees nothing gets 0.
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False
):
    rows = zip(q, k, v, strict=True)
    return torch.stack([attend(*row, softmax_scale, causal, window_size, softcap) for row in rows])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    q, k, v = (x.split(ends.diff().tolist()) for x, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k)))
    rows = zip(q, k, v, strict=True)
    return torch.cat([attend(*row, softmax_scale, causal, window_size, softcap) for row in rows])


def install(monkeypatch):
    """Make these what transformers takes for flash attention 2."""
    functions = (flash_attn_func, flash_attn_varlen_func, utils._pad_input, utils._unpad_input)
    if hasattr(utils, "_flash_with_kvcache_fn"):
        functions = (*functions[:2], None, *functions[2:])
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
