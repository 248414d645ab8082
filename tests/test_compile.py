"""The kernels compiled offline, for GPUs that are not here: registers, spills, widths of loads, rounding.

What is compiled is what the launcher launches, so the specialisations are the real ones: a stand-in for the driver names
the target, and the launch stops at the compiled kernel. In a process of its own, since the interpreter is chosen when
triton is imported, with a cache of its own, since what is to be measured is this source.
"""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from cactus_kernels import Cactus, VerifyOutput, rows
from cactus_kernels.rules import AdaptiveCactus, Mentored, Optimal, Rule, SpS, TopK, Typical, m
from cactus_kernels.verify import Inputs

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# V and the stride of its rows. Strides that are a multiple of 16 bytes are read 16 bytes at a time.
LAYOUTS = {"aligned": (151_936, 151_936), "odd, padded": (50_257, 50_264), "odd": (50_257, 50_257)}
# Of a vocabulary that takes many splits: one iteration reads a lane's 8 entries of a row at once, in two loops: of the row
# pair after a rejection, of the target's row alone.
WIDE_LOADS = {"fp32": 6, "bf16": 3, "fp16": 3}
REGISTERS = 72  # on sm_90, for triton 3.9 and later: earlier ones reduce 64-bit sums by other instructions (3.6: 76)


def version():
    return tuple(int(x) for x in importlib.metadata.version("triton").split(".")[:2])


def measured(kernels):
    return {name: kernel for name, kernel in kernels.items() if name not in WAYS and name not in STATISTICS}


@pytest.fixture(scope="module")
def compiled():
    """A function: what the kernels of a target look like, {dtype, layout: figures}; each target is compiled once."""
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    found = {}

    def compile_for(target):
        if TARGETS[target][0] == "cuda" and not all(
            (tools / tool).exists() for tool in ("cuobjdump", "nvdisasm", "ptxas")
        ):
            pytest.skip(f"this triton package has no cuobjdump, nvdisasm or ptxas in {tools}")
        if target not in found:
            env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            with tempfile.TemporaryDirectory() as cache:
                env["TRITON_CACHE_DIR"] = cache
                command = [sys.executable, __file__, target]
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
            if "ROCm linker" in done.stderr:
                pytest.skip("this triton package has no linker for AMD GPUs: it expects that of a ROCm installation")
            assert done.returncode == 0, done.stderr[-3000:]
            found[target] = json.loads(done.stdout.splitlines()[-1])
        return found[target]

    return compile_for


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(target, compiled):
    for name, kernel in measured(compiled(target)).items():
        if version() >= (3, 9):
            assert kernel["spilled bytes"] == 0, (name, kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_aligned_rows_are_read_16_bytes_at_a_time(target, compiled):
    kernels = measured(compiled(target))
    assert len(kernels) == len(DTYPES) * len(LAYOUTS)
    for name, kernel in kernels.items():
        dtype, layout = name.split(", ", 1)
        expected = 0 if layout == "odd" else WIDE_LOADS[dtype]
        if target.startswith("sm"):
            assert kernel["wide streaming loads"] == expected, (name, kernel)
        else:  # masked loads are wide too where V is a multiple of 16
            assert kernel["wide streaming loads"] >= expected, (name, kernel)
        assert kernel["narrow streaming loads"] == 0 or layout == "odd", (name, kernel)


def test_registers(compiled):
    if version() < (3, 9):
        pytest.skip("holds from triton 3.9 on")
    assert {name: k["registers"] for name, k in measured(compiled("sm_90")).items() if k["registers"] > REGISTERS} == {}


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm")])
def test_every_operation_is_rounded_on_its_own(target, compiled):
    """No fused multiply-add, no approximate division or root, no denormals flushed: else devices differ in last bits."""
    if version() < (3, 6):
        pytest.skip("before triton 3.6 sqrt_rn flushes denormals")
    for name, kernel in compiled(target).items():
        assert kernel["inexact"] == [], (name, kernel)


def test_every_way_of_calling_compiles(compiled):
    """The interpreter takes what the compiler refuses, such as a name that changes its type in a branch."""
    kernels = compiled("sm_90")
    assert len(kernels) == len(LAYOUTS) * len(DTYPES) + len(WAYS) + len(STATISTICS)


class Mixture(Rule):
    """A rule of a user's own, with two strengths."""

    name = "mixture"

    @staticmethod
    def h(q, q_n, p_n, is_drafted, stat, a, b):
        return m.where(is_drafted, m.maximum(q_n, a * p_n), q * m.div_rn(b, 2.0))

    strengths = (0.5, torch.ones(2))


def ways():
    """Inputs of other kinds, by name."""
    numbers, few = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 3, 3], dtype=torch.int32)
    V = 50_257
    q, p, ids = torch.zeros(2, 4, V), torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.int64)
    padded = {"target": q, "draft": p, "draft_token_ids": ids, "rule": SpS(), "seed": numbers, "offset": numbers}
    padded |= {"cu_draft_tokens": None, "max_draft_tokens": 3, "batch_size": 2}
    flat = padded | {"target": q.view(-1, V)[:5], "draft": p[0], "draft_token_ids": ids[0], "cu_draft_tokens": few}
    return {
        "flat": Inputs(**flat),
        "flat, one-hot, int64 sums, int32 ids": Inputs(
            **flat | {"draft": None, "cu_draft_tokens": few.long(), "draft_token_ids": ids[0].int()}
        ),
        "int seed and offset": Inputs(**padded | {"seed": 2**40, "offset": 1}),
        "small int seed": Inputs(**padded | {"seed": 1, "offset": -(2**63)}),
        "a strength for each request": Inputs(**padded | {"rule": Cactus(torch.ones(2))}),
        "a rule of ones own": Inputs(**padded | {"rule": Mixture()}),
        "the KL form": Inputs(**padded | {"rule": Cactus(0.5, "kl")}),
        "a statistic": Inputs(**padded | {"rule": AdaptiveCactus(torch.ones(2))}),
        "two statistics, flat": Inputs(**flat | {"rule": Typical()}),
        "the k-th largest": Inputs(**padded | {"rule": TopK(10), "target": q.bfloat16()}),
        "solved where rejected": Inputs(**padded | {"rule": Optimal(cap=torch.full((2,), 1.5))}),
        "solved where drafted, flat": Inputs(**flat | {"rule": Optimal(price=2.0)}),
        "solved for a divergence": Inputs(**padded | {"rule": Mentored(0.1), "draft": None}),
        "a budget": Inputs(**padded | {"rule": AdaptiveCactus(0.5), "budget": torch.ones(2).double()}),
        "two dtypes and two sizes": Inputs(**padded | {"target": q[..., :50_000].bfloat16()}),
        "no drafts": rows._inputs(q[:, 0], 5, numbers),
        "one token, one request": Inputs(
            **padded | {"target": q[:1, :2, :1], "draft": p[:1, :1, :1], "draft_token_ids": ids[:1, :1]}
            | {"seed": numbers[:1], "offset": numbers[:1], "max_draft_tokens": 1, "batch_size": 1}
        ),
        "64 drafts": Inputs(
            **padded | {"target": torch.zeros(2, 65, 3000), "draft": torch.zeros(2, 64, 3000)}
            | {"draft_token_ids": torch.zeros(2, 64, dtype=torch.int64), "max_draft_tokens": 64}
        ),
    }  # fmt: skip


WAYS = ways()
# Kernels that run before verification, and their modules.
STATISTICS = {
    "entropy_kernel": "row_statistics_triton",
    "kth_largest_kernel": "row_statistics_triton",
    "clip_kernel": "clip_triton",
}


def compile_all(target):
    """Figures of every kernel for one target, in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from cactus_kernels import verify_triton

    class Driver:
        def get_current_target(self):
            return GPUTarget(*TARGETS[target])

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    class Kernel:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                self.compiled = self.kernel.run(*args, grid=grid, warmup=True, **kwargs)

            return launch

    driver.set_active(Driver())
    verify_triton.verify_kernel = Kernel(verify_triton.verify_kernel)
    statistics = {}
    for name, module in STATISTICS.items():
        module = importlib.import_module(f"cactus_kernels.{module}")
        statistics[name] = Kernel(getattr(module, name))
        setattr(module, name, statistics[name])
    numbers = torch.zeros(2, dtype=torch.int64)
    batches = {}
    for dtype_name, dtype in DTYPES.items():
        for layout, (V, stride) in LAYOUTS.items():
            q, p = (torch.zeros(2, k, stride, dtype=dtype)[..., :V] for k in (5, 4))
            ids = torch.zeros(2, 4, dtype=torch.int64)
            batches[f"{dtype_name}, {layout}"] = Inputs(q, p, ids, Cactus(0.5), numbers, numbers, None, 4, 2)
    figures = {}
    for name, inputs in (batches | (WAYS if target == "sm_90" else {})).items():
        B, width = inputs.batch_size, inputs.max_draft_tokens + 1
        ids = torch.zeros(B, width, dtype=inputs.draft_token_ids.dtype)
        out = VerifyOutput(ids, torch.zeros(B, dtype=torch.int32), torch.zeros(B).bool(), torch.zeros(B).double())
        verify_triton.verify(inputs, out, verify_triton.new_scratch(B, "cpu"))
        asm = verify_triton.verify_kernel.compiled.asm
        figures[name] = of_amd(asm["amdgcn"]) if "amdgcn" in asm else of_nvidia(asm)
    for name, kernel in statistics.items():
        if target == "sm_90":
            figures[name] = of_nvidia(kernel.compiled.asm)
    return figures


def of_nvidia(asm):
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", usage).groups()
    # The loads of the streaming loops are those that are first to leave the cache (EF).
    streaming = re.findall(r"LDG\.E\.EF\S*", sass)
    wide = [load for load in streaming if load.endswith(".128")]
    return {
        "registers": int(registers),
        "spilled bytes": int(stack) + int(local),
        "wide streaming loads": len(wide),
        "narrow streaming loads": len(streaming) - len(wide),
        "inexact": re.findall(r"\S*(?:fma|\.ftz|div\.full|\.approx)\S*", asm["ptx"]),
    }


def of_amd(assembly):
    return {
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", assembly)[1]),
        "spilled bytes": int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", assembly)[1]),
        "wide streaming loads": len(re.findall(r"(?:global|buffer)_load_dwordx4\b", assembly)),
        "narrow streaming loads": 0,  # nothing tells them from the masked loads
        "inexact": [],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compile_all(sys.argv[1])))
