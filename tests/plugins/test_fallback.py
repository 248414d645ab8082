"""`fill_invalid`: the tokens of requests whose values were bad, and no others."""

import os
import subprocess
import sys

import pytest
import torch

from cactus_kernels import SpS, verify_from_logits
from cactus_kernels.plugins.vllm.fallback import fill_invalid

V = 4999  # more than one block of the kernel, and a part
NAN, INF = float("nan"), float("inf")


def batch(device, has_bonus, dtype):
    """Five requests with 2, 0, 3, 1 and 2 drafted tokens: bad rows at positions 1, -, 0, bonus, and nothing finite at 0."""
    lengths = [2, 0, 3, 1, 2]
    cu = torch.tensor([0, 2, 2, 5, 6, 8], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8 + 5 * has_bonus, V, generator=generator)
    start = [int(cu[b]) + b * has_bonus for b in range(5)]
    ids = torch.randint(V, (8,), generator=generator)
    for b in (0, 3):  # drafted tokens that are surely accepted where their row is good
        for j in range(lengths[b]):
            rows[start[b] + j] = -INF
            rows[start[b] + j, ids[int(cu[b]) + j]] = 0.0
    rows[start[0] + 1] = torch.randn(V, generator=generator)
    rows[start[0] + 1, [7, 4000]] = 50.0
    rows[start[0] + 1, [3, 4998]] = torch.tensor([NAN, INF])
    rows[start[2], 4997], rows[start[2], 0] = 60.0, INF
    rows[start[4]] = NAN
    expected = {0: (1, 7), 2: (0, 4997), 4: (0, 0)}
    bonus = torch.tensor([1, 2, 3, V, 5], dtype=torch.int32)
    if has_bonus:
        rows[start[3] + 1, :3] = torch.tensor([NAN, 9.0, -INF])
        rows[start[3] + 1, 4998] = 70.0
        expected[3] = (1, 4998)
    else:
        expected[3] = (1, 0)
    return rows.to(device, dtype), cu, ids.int().to(device), None if has_bonus else bonus.to(device), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_bonus", [True, False], ids=["bonus rows", "bonus tokens"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_invalid_requests_get_the_arg_max_of_the_finite_logits(backend, has_bonus, dtype, device):
    rows, cu, ids, bonus, expected = batch(device, has_bonus, dtype)
    before = rows.clone()
    out = verify_from_logits(
        rows, None, ids, SpS(), seed=1, offset=0, bonus_token_ids=bonus, cu_draft_tokens=cu, max_draft_tokens=3,
        backend=backend,
    )  # fmt: skip
    assert (~out.valid).nonzero().squeeze(1).tolist() == sorted(expected)
    tokens, count = out.token_ids.clone(), torch.tensor([40], device=device)
    fill_invalid(out, rows, cu, has_bonus, count, backend)
    for b, (stop, token) in expected.items():
        assert out.num_accepted[b] == stop
        tokens[b, stop] = token
    assert torch.equal(out.token_ids, tokens)
    assert ((out.token_ids >= 0).sum(1) == out.num_accepted + 1).all()
    assert count.item() == 40 + len(expected)
    assert torch.equal(rows.view(torch.uint8), before.view(torch.uint8))


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from cactus_kernels import VerifyOutput
from cactus_kernels.kernels import fallback as fallback_triton


class Driver:
    get_current_target = lambda self: GPUTarget({target})
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0


class Kernel:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: print(sorted(self.kernel.run(*args, grid=grid, warmup=True, **kwargs).asm))


driver.set_active(Driver())
fallback_triton.fill_kernel = Kernel(fallback_triton.fill_kernel)
zeros = torch.zeros(2, dtype=torch.int32)
for dtype, has_bonus in ((torch.float32, True), (torch.bfloat16, False)):
    out = VerifyOutput(torch.zeros(2, 4, dtype=torch.int64), zeros, zeros.bool())
    fallback_triton.fill_invalid(out, torch.zeros(8, 50_257, dtype=dtype), torch.zeros(3).int(), has_bonus, zeros[:1].long())
"""


@pytest.mark.parametrize("target", ["'cuda', 90, 32", "'hip', 'gfx942', 64"], ids=["sm_90", "gfx942"])
def test_the_kernel_compiles(target, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(target=target)], capture_output=True, text=True, env=environment
    )
    if "ROCm linker" in done.stderr:
        pytest.skip("this triton package has no linker for AMD GPUs: it expects that of a ROCm installation")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cubin" if "cuda" in target else "hsaco") == 2
