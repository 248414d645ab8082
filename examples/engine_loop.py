"""Verification in a toy engine: requests join and leave a flat, ragged batch, each with its own number of drafted tokens."""

from types import SimpleNamespace as Request

import torch

from cactus_kernels import SpS, draw, verify

V = 50
table = torch.randn(V, V, generator=torch.Generator().manual_seed(0))  # stands for both models: logits after each token
waiting = [
    Request(text=[7], seed=11, drafts=4, length=20, offset=0),
    Request(text=[3, 9], seed=12, drafts=1, length=12, offset=0),
    Request(text=[5], seed=13, drafts=2, length=30, offset=0),
]
running = []
while waiting or running:
    running += [waiting.pop(0)] if waiting else []  # one request joins before each round
    ids, draft_rows, contexts = [], [], []
    for request in running:
        contexts.append(request.text[-1])
        for j in range(request.drafts):
            draft_rows.append((0.7 * table[contexts[-1]]).softmax(-1))
            seed, offset = torch.tensor([request.seed]), request.offset + j
            ids.append(draw(draft_rows[-1][None], seed=seed, offset=offset).token_ids.item())
            contexts.append(ids[-1])
    target_rows = table[contexts].softmax(-1)  # [N + B, V]: one forward pass of the target
    seed, offset, drafts = (torch.tensor([getattr(r, x) for r in running]) for x in ("seed", "offset", "drafts"))
    ends = torch.nn.functional.pad(drafts.cumsum(0), (1, 0)).int()
    ragged = {"cu_draft_tokens": ends, "max_draft_tokens": 4}
    out = verify(target_rows, torch.stack(draft_rows), torch.tensor(ids), SpS(), seed=seed, offset=offset, **ragged)
    out.raise_if_invalid()
    for request, row in zip(running, out.token_ids.tolist(), strict=True):
        request.text += [token for token in row if token >= 0]
        request.offset += request.drafts + 1  # whatever was accepted
        if len(request.text) >= request.length:
            print(f"seed {request.seed}:", *request.text[: request.length])
    running = [request for request in running if len(request.text) < request.length]
