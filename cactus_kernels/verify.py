"""`verify`: accept or reject drafted tokens against the target, and draw the next token. Checks, then a backend."""

from dataclasses import dataclass

import torch

from . import philox, verify_torch
from .rules import Rule, resolve_rule

MAX_DRAFT_TOKENS = 64
PROB_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class VerifyOutput:
    """What verification decided.

    Attributes:
        token_ids: [B, max_draft_tokens + 1], dtype of the draft ids: the accepted tokens, one recovered or bonus token,
            then -1. The tokens emitted are those >= 0.
        num_accepted: int32 [B], drafted tokens accepted.
        valid: bool [B], False where a value that counts was bad; such a request emits only what it accepted before.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor
    valid: torch.Tensor

    def raise_if_invalid(self) -> None:
        """Raise ValueError naming the invalid requests. Waits for the device."""
        if not self.valid.all():
            requests = (~self.valid).nonzero().squeeze(1).tolist()
            at = self.num_accepted[requests].tolist()
            raise ValueError(
                f"bad values in requests {requests} at drafted positions {at}: probabilities must be finite, in [0, 1] "
                "and not all 0, ids inside the vocabulary, strengths finite and >= 0, prefix sums in order"
            )


@dataclass(frozen=True)
class Inputs:
    """One checked batch, padded ([B, ...] tensors, `cu_draft_tokens` None) or flat. Shapes are those of `verify`."""

    target: torch.Tensor
    draft: torch.Tensor | None
    draft_token_ids: torch.Tensor
    rule: Rule
    seed: int | torch.Tensor
    offset: int | torch.Tensor
    cu_draft_tokens: torch.Tensor | None
    max_draft_tokens: int
    batch_size: int
    purposes: tuple = (philox.PICK_CHUNK, philox.PICK_TOKEN)
    noise: tuple | None = None  # random words of a draw made before, `verify_torch.draw_noise`

    @property
    def vocab_size(self):
        return self.target.shape[-1]

    @property
    def draft_vocab_size(self):
        return self.vocab_size if self.draft is None else self.draft.shape[-1]


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
        rule: a `Rule`, or "sps" or "cactus".
        seed: int64 [B], the random stream of each request; or an int, which gives request r the stream (seed, r).
        offset: int64 [B] or an int: rows that each request has drafted or verified so far. Never use one for two calls
            of `verify`: advance it by m_b + 1 after each, whatever was accepted. The draws of a round's drafts (`draw`, at
            offset + j) and its verification (at offset) share it: their words are apart.
        cu_draft_tokens: int32 or int64 [B + 1], prefix sums of m_b (0 is legal) for the flat layout, the first of them 0;
            rows beyond the last request are not looked at. None: padded.
        max_draft_tokens: int, at least every m_b (a request with more is invalid); needed with `cu_draft_tokens`, else m.
            At most 64.
        out: a `VerifyOutput` to write to; None: allocated.
        scratch: `verify_triton.new_scratch(B, device)`, needed under a CUDA graph; None: kept by the launcher.
        backend: "triton", "torch", or None: triton on a GPU, torch elsewhere.

    Raises:
        TypeError, ValueError: wrong types, shapes, dtypes or devices, before any work. Bad values are not looked at here,
            which would wait for the device: they make their request's `valid` False, and no other request changes.
        RuntimeError: the backend asked for is not to be had.
    """
    rule = resolve_rule(rule)
    flat = cu_draft_tokens is not None
    _check_tensor("target_probs", target_probs, 2 if flat else 3, PROB_DTYPES)
    _check_tensor("draft_token_ids", draft_token_ids, 1 if flat else 2, (torch.int32, torch.int64))
    if draft_probs is not None:
        _check_tensor("draft_probs", draft_probs, 2 if flat else 3, PROB_DTYPES)
    if flat:
        _check_tensor("cu_draft_tokens", cu_draft_tokens, 1, (torch.int32, torch.int64))
        if isinstance(max_draft_tokens, bool) or not isinstance(max_draft_tokens, int) or max_draft_tokens < 0:
            raise TypeError(f"cu_draft_tokens needs max_draft_tokens, an int >= 0; got {max_draft_tokens!r}")
        batch_size, m = len(cu_draft_tokens) - 1, max_draft_tokens
        if batch_size < 0:
            raise ValueError("cu_draft_tokens must have shape [B + 1], got [0]")
        rows = len(draft_token_ids)
        expected = {"target_probs": (rows + batch_size,), "draft_probs": (rows,)}
    else:
        batch_size, m = draft_token_ids.shape
        if max_draft_tokens not in (None, m):
            raise ValueError(f"max_draft_tokens is {max_draft_tokens}, but the padded draft_token_ids have m = {m}")
        expected = {"target_probs": (batch_size, m + 1), "draft_probs": (batch_size, m)}
    if m > MAX_DRAFT_TOKENS:
        raise ValueError(f"at most {MAX_DRAFT_TOKENS} drafted tokens a request, got {m}: verify them in shorter drafts")
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if probs is not None and tuple(probs.shape[:-1]) != expected[name]:
            wanted = ", ".join(map(str, expected[name]))
            raise ValueError(
                f"{name} must have shape [{wanted}, V] beside draft_token_ids of shape {tuple(draft_token_ids.shape)}, "
                f"got {tuple(probs.shape)}"
            )
    inputs = Inputs(
        target_probs, draft_probs, draft_token_ids, rule, seed, offset, cu_draft_tokens, m, batch_size
    )  # fmt: skip
    return run(inputs, out, scratch, backend)


def run(inputs, out, scratch, backend) -> VerifyOutput:
    """Check what every entry point shares (rows, seeds, strengths, devices, output), then run a backend."""
    device, B = inputs.target.device, inputs.batch_size
    for name, probs in (("target_probs", inputs.target), ("draft_probs", inputs.draft)):
        if probs is not None and probs.shape[-1] == 0:
            raise ValueError(f"{name} has an empty vocabulary: shape {tuple(probs.shape)}")
        if probs is not None and probs.shape[-1] > 1 and probs.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {probs.stride()}")
    for name, value in (("seed", inputs.seed), ("offset", inputs.offset)):
        if isinstance(value, torch.Tensor):
            _check_tensor(name, value, 1, (torch.int64,), (B,))
        elif isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int or an int64 tensor [B], got {type(value).__name__}")
        elif not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} must fit in 64 bits, got {value}")
    for strength in inputs.rule.strengths:
        if isinstance(strength, torch.Tensor):
            _check_tensor(f"the strength of {inputs.rule.name}", strength, 1, (torch.float32,), (B,))
    if out is None:
        out = VerifyOutput(
            torch.empty((B, inputs.max_draft_tokens + 1), dtype=inputs.draft_token_ids.dtype, device=device),
            torch.empty(B, dtype=torch.int32, device=device),
            torch.empty(B, dtype=torch.bool, device=device),
        )
    else:
        if not isinstance(out, VerifyOutput):
            raise TypeError(f"out must be a VerifyOutput, got {type(out).__name__}")
        ids = inputs.draft_token_ids.dtype
        _check_tensor("out.token_ids", out.token_ids, 2, (ids,), (B, inputs.max_draft_tokens + 1))
        _check_tensor("out.num_accepted", out.num_accepted, 1, (torch.int32,), (B,))
        _check_tensor("out.valid", out.valid, 1, (torch.bool,), (B,))
    tensors = (inputs.draft, inputs.draft_token_ids, inputs.cu_draft_tokens, inputs.seed, inputs.offset)
    for tensor in (*tensors, *inputs.rule.strengths, out.token_ids, out.num_accepted, out.valid, scratch):
        if isinstance(tensor, torch.Tensor) and tensor.device != device:
            raise ValueError(f"all tensors must be on the target's device {device}, got one on {tensor.device}")
    implementation = choose_backend(backend, device)
    if B:
        implementation(inputs, out, scratch)
    return out


def choose_backend(backend, device):
    """The function that runs a batch on `device`. Raises RuntimeError where the backend cannot be had."""
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend must be 'triton', 'torch' or None, got {backend!r}")
    if backend == "torch" or (backend is None and device.type != "cuda"):
        return verify_torch.verify
    try:
        from . import verify_triton
    except ImportError as error:
        raise RuntimeError("triton is not installed: install it, or pass backend='torch'") from error
    if device.type == "cpu" and not verify_triton.INTERPRETED:
        raise RuntimeError(
            "backend='triton' runs on CPU tensors only in the interpreter: set TRITON_INTERPRET=1 before importing "
            "triton, or pass backend='torch'"
        )
    return verify_triton.verify


def _check_tensor(name, tensor, dim, dtypes, shape=None):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}: cast it first")
    if tensor.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {tuple(tensor.shape)}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
