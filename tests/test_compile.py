"""The kernels compiled offline, for GPUs that are not here: registers, spills, widths of loads, rounding.

What is compiled is what the launcher launches, so the specialisations are the real ones: a stand-in for the driver names
the target, and the launch stops at the compiled kernel. In a process of its own, since the interpreter is chosen when
triton is imported, with a cache of its own, since what is to be measured is this source.
"""

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
REGISTERS = 72  # on sm_90, for triton 3.9 and later: earlier ones reduce 64-bit sums by other instructions


def version():
    return tuple(int(x) for x in importlib.metadata.version("triton").split(".")[:2])


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
    for name, kernel in compiled(target).items():
        # The compiler may give up a register of the contiguous odd rows, outside the loops, for one more block at once.
        allowed = 16 if name.endswith("odd") else 0
        if version() >= (3, 9):
            assert kernel["spilled bytes"] <= allowed, (name, kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_aligned_rows_are_read_16_bytes_at_a_time(target, compiled):
    kernels = compiled(target)
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
    assert {name: k["registers"] for name, k in compiled("sm_90").items() if k["registers"] > REGISTERS} == {}


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm")])
def test_every_operation_is_rounded_on_its_own(target, compiled):
    """No fused multiply-add, no approximate division or root, no denormals flushed: else devices differ in last bits."""
    for name, kernel in compiled(target).items():
        assert kernel["inexact"] == [], (name, kernel)


def compile_all(target):
    """Figures of every kernel for one target, in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from cactus_kernels import Cactus, VerifyOutput, verify_triton
    from cactus_kernels.verify import Inputs

    class Driver:
        def get_current_target(self):
            return GPUTarget(*TARGETS[target])

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                self.compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)

            return launch

    driver.set_active(Driver())
    kernel, verify_triton.verify_kernel = verify_triton.verify_kernel, Kernel()
    B, m = 2, 4
    numbers = torch.zeros(B, dtype=torch.int64)
    out = VerifyOutput(
        torch.zeros(B, m + 1, dtype=torch.int64), torch.zeros(B, dtype=torch.int32), torch.zeros(B).bool()
    )
    figures = {}
    for dtype_name, dtype in DTYPES.items():
        for layout, (V, stride) in LAYOUTS.items():
            rows = [torch.zeros(B, k, stride, dtype=dtype)[..., :V] for k in (m + 1, m)]
            ids = torch.zeros(B, m, dtype=torch.int64)
            inputs = Inputs(*rows, ids, Cactus(0.5), numbers, numbers, None, m, B)
            verify_triton.verify(inputs, out, numbers.new_zeros(B, 2))
            asm = verify_triton.verify_kernel.compiled.asm
            figures[f"{dtype_name}, {layout}"] = of_amd(asm["amdgcn"]) if "amdgcn" in asm else of_nvidia(asm)
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
