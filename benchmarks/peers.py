"""Other ways to do the same job, as plain as their authors wrote them: what the benchmarks compare with.

`dense_verify` and `transformers_verify` run wherever the benchmarks do. The calls of FlashInfer, SGLang and vLLM were written
from their documentation and sources (vLLM: 0.16 to 0.33) and have not been run yet. Upstream Cactus is a patch of vLLM 0.7.3
and no module, so it is not among them.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

PROBS, LOGITS = "probabilities", "logits"


@dataclass(frozen=True)
class Peer:
    """A verification by others.

    Attributes:
        name, module: what it is called, and the module that has to be there.
        target, draft: what its rows are, PROBS or LOGITS. Of probabilities it is given fp32.
        make: from draft_token_ids int64 [B, m] and the Cactus delta (only `dense_verify` has use for it), a call of
            target rows [B, m + 1, V] and draft rows [B, m, V]. What it sets up before is not timed.
    """

    name: str
    module: str
    target: str
    draft: str
    make: Callable

    @property
    def is_installed(self) -> bool:
        parents = [self.module[:i] for i, c in enumerate(self.module) if c == "."]
        return all(importlib.util.find_spec(name) is not None for name in [*parents, self.module])


def dense_verify(target_probs, draft_probs, draft_token_ids, delta):
    """Cactus the dense way: h and the residual of every row are materialised, and a token is drawn for every row.

    target_probs [B, m + 1, V], draft_probs [B, m, V], draft_token_ids int64 [B, m], all on one device. Returns token ids
    [B, m + 1], -1 beyond the tokens emitted. This is what the paper's code does for a batch, written in torch operations.
    """
    B, m, V = draft_probs.shape
    device = target_probs.device
    q = target_probs[:, :m]
    n = draft_token_ids[..., None]
    q_n, p_n = q.gather(2, n), draft_probs.gather(2, n)
    h_n = (q_n + (2 * delta * q_n * (1 - q_n)).sqrt()).clamp(max=1)
    h = (q * ((1 - h_n) / (1 - q_n))).scatter(2, n, h_n)
    accepted = torch.rand(B, m, 1, device=device) * p_n < h_n
    residual = (h - draft_probs).clamp(min=0)
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-38)
    residual[..., 0] += (
        residual.sum(-1) == 0
    ).float()  # multinomial refuses rows without mass, as accepted rows may be
    recovered = torch.multinomial(residual.view(-1, V), 1).view(B, m)
    bonus = torch.multinomial(target_probs[:, m], 1)
    num_accepted = accepted[..., 0].long().cumprod(1).sum(1, keepdim=True)
    drawn = torch.cat([recovered, bonus], 1).gather(1, num_accepted)
    j = torch.arange(m + 1, device=device)
    token_ids = torch.nn.functional.pad(draft_token_ids, (0, 1), value=-1)
    return torch.where(j < num_accepted, token_ids, torch.where(j == num_accepted, drawn, -1))


def transformers_verify(target_logits, draft_logits, draft_token_ids):
    """transformers' sampled assisted generation, one request: logits [m + 1, V] and [m, V], ids [m]. Returns the tokens kept."""
    from transformers.generation.utils import _speculative_sampling

    m = len(draft_token_ids)
    # Its first releases with major version 5 ask besides whether the candidate has ended.
    more = (False,) if "is_done_candidate" in inspect.signature(_speculative_sampling).parameters else ()
    return _speculative_sampling(draft_token_ids[None], draft_logits[None], m, target_logits[None], *more)


def _dense(ids, delta):
    return lambda target, draft: dense_verify(target, draft, ids, delta)


def _transformers(ids, delta):
    return lambda target, draft: [transformers_verify(*request) for request in zip(target, draft, ids, strict=True)]


def _flashinfer(ids, delta):
    from flashinfer.sampling import chain_speculative_sampling

    ids = ids.int()
    return lambda target, draft: chain_speculative_sampling(draft, ids, target)


def _sglang(ids, delta):
    """A chain as a tree: node 0 is the last token of the text. It takes no draft rows: the draft counts as one-hot."""
    from sgl_kernel import tree_speculative_sampling_target_only

    (B, m), device = ids.shape, ids.device
    candidates = torch.nn.functional.pad(ids, (1, 0))
    index = torch.arange(B * (m + 1), device=device).view(B, m + 1)
    next_token = torch.arange(1, m + 2, device=device).repeat(B, 1)
    next_token[:, m] = -1
    next_sibling = torch.full_like(next_token, -1)

    def call(target, draft):
        out = [torch.full(shape, -1, dtype=torch.int32, device=device) for shape in ((B * (m + 1),), (B, m + 1), (B,))]
        coins = [torch.rand(shape, device=device) for shape in ((B, m + 1), (B,))]
        tree_speculative_sampling_target_only(
            *out, candidates, index, next_token, next_sibling, *coins, target, torch.zeros_like(target)
        )
        return out

    return call


def _vllm_v1(ids, delta):
    """The copy of the drafted rows is its sampler's own; bonus tokens are given, drawn before."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    (B, m), device = ids.shape, ids.device
    flat = ids.flatten().int()
    cu = torch.arange(1, B + 1, dtype=torch.int32, device=device) * m
    bonus = torch.zeros(B, 1, dtype=torch.int32, device=device)
    settings = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.ones(B, device=device),
        top_k=None,
        top_p=None,
        generators={},
    )

    def call(target, draft):
        V = target.shape[-1]
        rows = target[:, :m].reshape(-1, V).float()
        return rejection_sample(flat, [m] * B, m, cu, draft.reshape(-1, V), rows, bonus, settings)

    return call


def _vllm_v2(ids, delta):
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    (B, m), device = ids.shape, ids.device
    drafted = torch.nn.functional.pad(ids, (1, 0)).flatten()
    cu = torch.arange(B + 1, dtype=torch.int32, device=device) * (m + 1)
    slots = torch.arange(B, dtype=torch.int32, device=device)
    slot_of_row = slots.repeat_interleave(m + 1)
    steps = torch.arange(m + 1, dtype=torch.int32, device=device).repeat(B)
    positions, temperature, seed = steps.long(), torch.ones(B, device=device), slots.long()

    def call(target, draft):
        rows = target.view(-1, target.shape[-1])
        return rejection_sample(rows, draft, drafted, cu, positions, slots, slot_of_row, steps, temperature, seed, m)

    return call


PEERS = (
    Peer("dense torch", "torch", PROBS, PROBS, _dense),
    Peer("transformers", "transformers", LOGITS, LOGITS, _transformers),
    Peer("FlashInfer", "flashinfer", PROBS, PROBS, _flashinfer),
    Peer("SGLang", "sgl_kernel", PROBS, PROBS, _sglang),
    Peer("vLLM V1", "vllm", LOGITS, PROBS, _vllm_v1),
    Peer("vLLM V2", "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils", LOGITS, LOGITS, _vllm_v2),
)


def truncate(logits, sampling):
    """Logits [..., V] with the temperature, top-k and top-p of a `Sampling` of numbers, by transformers' processors."""
    from transformers.generation import logits_process as hf

    rows = hf.TemperatureLogitsWarper(float(sampling.temperature))(None, logits.flatten(0, -2))
    if sampling.top_k:
        rows = hf.TopKLogitsWarper(sampling.top_k)(None, rows)
    if sampling.top_p < 1:
        rows = hf.TopPLogitsWarper(sampling.top_p)(None, rows)
    return rows.view_as(logits)


def exponential_race(probs):
    """One token from each row of probabilities [B, V]: the race that engines write in torch, one random number for each entry."""
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def draft_always(config, num_assistant_tokens):
    """Make transformers' assisted generation draft a fixed number of tokens a round. config: the draft's generation config."""
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_assistant_tokens, "constant"
    config.assistant_confidence_threshold = 0.0
