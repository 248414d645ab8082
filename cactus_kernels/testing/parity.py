"""Backends compared on one case of `verify`, bit for bit."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..backends import choose_backend
from ..contract import Probs, VerifyOutput
from ..rules import Rule
from ..verification import verify
from .fuzz import Case, describe

POISON = -77  # in outputs before a run: what is not written shows

Place = tuple[str, str]  # a backend and a device


def best_backend(device: torch.device) -> str:
    """Triton where it runs, the interpreter included: that is what is to be checked."""
    try:
        return choose_backend("triton", device)
    except RuntimeError:
        return "torch"


def difference(
    case: Case, first: Place = ("torch", "cpu"), second: Place = ("triton", "cpu"), **options: Any
) -> str | None:
    """What differs between two places on one case, in words, or None. `options` are for the second run."""
    expected = run_case(case, *first)
    got = run_case(case, *second, **options)
    for name in ("num_accepted", "valid", "token_ids", "spent"):
        a, b = getattr(expected, name), getattr(got, name)
        if a is None:
            continue
        a, b = a.cpu(), b.cpu()
        if not torch.equal(a, b):
            r = (a != b).reshape(len(a), -1).any(1).nonzero()[0].item()
            return (
                f"{name} of request {r}: {a[r].tolist()} by {' on '.join(first)}, {b[r].tolist()} by {' on '.join(second)}"
                f" ({describe(case)})"
            )
    return None


def run_case(case: Case, backend: str, device: torch.device | str = "cpu", **options: Any) -> VerifyOutput:
    """The `VerifyOutput` of one case on a device, written over poison."""
    case = {name: to_device(value, device) for name, value in case.items()}
    ids, cu = case["draft_token_ids"], case.get("cu_draft_tokens")
    B, width = (len(ids), ids.shape[1]) if cu is None else (len(cu) - 1, case["max_draft_tokens"])
    out = VerifyOutput(
        torch.full((B, width + 1), POISON, dtype=ids.dtype, device=device),
        torch.full((B,), POISON, dtype=torch.int32, device=device),
        torch.ones(B, dtype=torch.bool, device=device),
        torch.full((B,), POISON, dtype=torch.float64, device=device) if "budget" in case else None,
    )
    return verify(**case, out=out, backend=backend, **options)


def to_device(value: Any, device: torch.device | str) -> Any:
    """A tensor on a device with the strides and the alignment it had, or a rule with its strength there."""
    if isinstance(value, (Rule, Probs)) and is_dataclass(value):
        return type(value)(*(to_device(getattr(value, field.name), device) for field in fields(value)))
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value.to(device) if isinstance(value, torch.Tensor) else value
    end = value.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((end,), (1,), 0).to(device).as_strided(value.shape, value.stride(), value.storage_offset())
