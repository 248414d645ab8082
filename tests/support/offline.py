"""The kernels compiled for GPUs that are not here: registers, spills, widths of loads, rounding.

    python tests/support/offline.py sm_90            # figures of every kernel for one target, as a line of JSON
    python tests/support/offline.py                  # the table of docs/kernels.md

What is compiled is what the launchers launch, so the specialisations are the real ones: a stand-in for the driver names the
target, and a launch stops at the compiled kernel. In a process of its own, since the interpreter is chosen when triton is
imported, with a cache of its own, since what is to be measured is this source.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from cactus_kernels import Cactus, RowStats, SampleOutput, Sampling, VerifyOutput, contract
from cactus_kernels.contract import Inputs, Logits, Probs, RowInputs
from cactus_kernels.rules import AdaptiveCactus, Block, Mentored, Optimal, Rule, SpS, TopK, Typical, m

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# V and the stride of its drawing. Strides that are a multiple of 16 bytes are read 16 bytes at a time.
LAYOUTS = {"aligned": (151_936, 151_936), "odd, padded": (50_257, 50_264), "odd": (50_257, 50_257)}
KERNELS = {
    "verify_kernel": "kernels.verify",
    "stops_kernel": "kernels.judge",
    "rows_kernel": "kernels.rows",
    "entropy_kernel": "kernels.statistics",
    "kth_largest_kernel": "kernels.statistics",
    "clip_kernel": "kernels.clip",
    "block_sums_kernel": "kernels.block",
    "block_kernel": "kernels.block",
}

# Rules with a kernel of their own.
RULES = {
    "Typical": Typical(),
    "TopK": TopK(10),
    "Optimal by cap": Optimal(cap=1.5),
    "Optimal by price": Optimal(price=2.0),
    "Mentored": Mentored(0.1),
    "Block": Block(),
}


def figures(target):
    """{case: {kernel: figures}} of a target, from a process that compiles them; skips where a tool is missing."""
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if TARGETS[target][0] == "cuda" and not all((tools / tool).exists() for tool in ("cuobjdump", "nvdisasm", "ptxas")):
        pytest.skip(f"this triton package has no cuobjdump, nvdisasm or ptxas in {tools}")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        env["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, __file__, target]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if "ROCm linker" in done.stderr:
        pytest.skip("this triton package has no linker for AMD GPUs: it expects that of a ROCm installation")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def column(found):
    """Registers of a thread in drawing aligned / odd, {(kernel, what it is of): text}. found: figures of a target's cases."""
    cells = {}
    for case, kernels in found.items():
        if not case.endswith(", aligned"):
            continue
        what = case.removesuffix(", aligned")
        for kernel in kernels:
            if kernel != "verify_kernel" or not what.startswith(tuple(RULES)):
                pair = [found[f"{what}, {side}"][kernel]["registers"] for side in ("aligned", "odd")]
                cells[kernel, what] = f"{pair[0]} / {pair[1]}"
    return cells


def table(columns):
    """columns: {target: what `column` gives}."""
    lines = [["kernel", "of", *columns], ["---"] * (2 + len(columns))]
    for key in next(iter(columns.values())):
        lines.append([*key, *(cells[key] for cells in columns.values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class Mixture(Rule):
    """A rule of a user's own, with two strengths."""

    name = "mixture"

    @staticmethod
    def accept(q_n, p_n, stat, a, b):
        return m.maximum(q_n, a * p_n)

    @staticmethod
    def recover(q, q_n, h_n, stat, a, b):
        return q * m.div_rn(b, 2.0)

    strengths = (0.5, torch.ones(2))


class Fixed(Rule):
    """A rule of a user's own, without a strength."""

    name = "fixed"
    keeps_proportions = True

    @staticmethod
    def accept(q_n, p_n, stat):
        return m.minimum(1.5 * q_n, 1.0)

    @staticmethod
    def recover(q, q_n, h_n, stat):
        return q


def packed(target, draft, *others, sampling=None, draft_sampling=None, draft_stats=None, **named):
    """`Inputs` of tensors: logits where there is a sampling."""
    by = draft_sampling or draft_stats
    return Inputs(
        Logits(target, sampling) if sampling else Probs(target),
        None if draft is None else Logits(draft, by) if by else Probs(draft), *others, **named,
    )  # fmt: skip


def ways():
    """Inputs of other kinds, by name: what the interpreter takes and the compiler may refuse."""
    numbers, few = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 3, 3], dtype=torch.int32)
    V = 50_257
    q, p, ids = torch.zeros(2, 4, V), torch.zeros(2, 3, V), torch.zeros(2, 3, dtype=torch.int64)
    padded = {"target": q, "draft": p, "draft_token_ids": ids, "rule": SpS(), "seed": numbers, "offset": numbers}
    padded |= {"cu_draft_tokens": None, "max_draft_tokens": 3, "batch_size": 2}
    flat = padded | {"target": q.view(-1, V)[:5], "draft": p[0], "draft_token_ids": ids[0], "cu_draft_tokens": few}
    each = Sampling(torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(2), torch.zeros(2))
    return {
        "flat": packed(**flat),
        "flat, one-hot, int64 sums, int32 ids": packed(
            **flat | {"draft": None, "cu_draft_tokens": few.long(), "draft_token_ids": ids[0].int()}
        ),
        "int seed and offset": packed(**padded | {"seed": 2**40, "offset": 1}),
        "small int seed": packed(**padded | {"seed": 1, "offset": -(2**63)}),
        "a strength for each request": packed(**padded | {"rule": Cactus(torch.ones(2))}),
        "a rule of ones own": packed(**padded | {"rule": Mixture()}),
        "the KL form": packed(**padded | {"rule": Cactus(0.5, "kl")}),
        "a statistic": packed(**padded | {"rule": AdaptiveCactus(torch.ones(2))}),
        "two statistics, flat": packed(**flat | {"rule": Typical()}),
        "solved where rejected": packed(**padded | {"rule": Optimal(cap=torch.full((2,), 1.5))}),
        "a budget": packed(**padded | {"rule": AdaptiveCactus(0.5), "budget": torch.ones(2).double()}),
        "a budget, no strength": packed(**padded | {"rule": Fixed(), "budget": torch.ones(2).double()}),
        "two dtypes and two sizes": packed(**padded | {"target": q[..., :50_000].bfloat16()}),
        "no drafts": contract.inputs_of_rows(q[:, 0], 5, numbers),
        "a whole draft, flat, one-hot": packed(**flat | {"draft": None, "rule": Block()}),
        "a whole draft, from logits, with the caller's bonus tokens": packed(
            **flat | {"target": q[0, :3], "draft_token_ids": ids[0].int(), "sampling": Sampling(torch.ones(2)), "offset": 0}
            | {"bonus_token_ids": numbers.int(), "draft_sampling": Sampling(torch.ones(2)), "rule": Block()}
            | {"draft": p, "row_map": numbers.int()}
        ),
        "one token, one request": packed(
            **padded | {"target": q[:1, :2, :1], "draft": p[:1, :1, :1], "draft_token_ids": ids[:1, :1]}
            | {"seed": numbers[:1], "offset": numbers[:1], "max_draft_tokens": 1, "batch_size": 1}
        ),
        "64 drafts": packed(
            **padded | {"target": torch.zeros(2, 65, 3000), "draft": torch.zeros(2, 64, 3000)}
            | {"draft_token_ids": torch.zeros(2, 64, dtype=torch.int64), "max_draft_tokens": 64}
        ),
        "from logits, flat, settings for each request": packed(**flat | {"sampling": each, "draft_sampling": each}),
        "from logits, probabilities of the draft by slot, bonus tokens given": packed(
            **padded | {"target": q[:, :3], "sampling": Sampling(0.0), "row_map": numbers, "bonus_token_ids": numbers}
        ),
        "from logits, the draft's statistics given": packed(
            **flat | {"sampling": Sampling(), "draft_stats": RowStats(torch.zeros(3, 8))}
        ),
        "from logits, as vLLM's model runner V1 has them": packed(
            **flat | {"target": q[0, :3], "draft_token_ids": ids[0].int(), "sampling": Sampling(torch.ones(2)), "offset": 0}
            | {"bonus_token_ids": numbers.int()}
        ),
        "from logits, as vLLM's model runner V2 has them": packed(
            **flat | {"target": flat["target"].bfloat16(), "draft": p.bfloat16(), "sampling": Sampling(torch.ones(2))}
            | {"draft_sampling": Sampling(torch.ones(2)), "row_map": numbers.int()}
        ),
    }  # fmt: skip


def cases(target):
    """{case: Inputs or RowInputs}, every kernel in every dtype and layout that it is compiled for; on sm_90 `ways` too."""
    numbers = torch.zeros(2, dtype=torch.int64)
    found = {}
    for dtype_name, dtype in DTYPES.items():
        for layout, (V, stride) in LAYOUTS.items():
            q, p = (torch.zeros(2, k, stride, dtype=dtype)[..., :V] for k in (5, 4))
            batch = q, p, torch.zeros(2, 4, dtype=torch.int64), Cactus(0.5), numbers, numbers, None, 4, 2
            name = f"{dtype_name}, {layout}"
            found[f"probabilities, {name}"] = packed(*batch)
            if layout == "odd, padded":
                continue
            cut = Sampling(0.7, top_k=20, top_p=0.9, min_p=0.1)
            found[f"logits, {name}"] = packed(*batch, sampling=cut, draft_sampling=cut)
            found[f"a draw, {name}"] = RowInputs(q[:, 0], cut, True, numbers, numbers)
            if dtype_name == "fp32":
                for label, rule in RULES.items():
                    found[f"{label}, {name}"] = packed(*batch[:3], rule, *batch[4:])
    return found | (ways() if target == "sm_90" else {})


def compile_all(target):
    """{case: {kernel: figures}} for one target, in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from cactus_kernels.kernels import block as kernel_block
    from cactus_kernels.kernels import rows as kernel_rows
    from cactus_kernels.kernels import verify as kernel_verify

    class Driver:
        def get_current_target(self):
            return GPUTarget(*TARGETS[target])

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    class Kernel:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                compiled = self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
                launched[self.name + (", cutting" if kwargs.get("CUT") else "")] = compiled

            return launch

    driver.set_active(Driver())
    for name, module in KERNELS.items():
        module = importlib.import_module(f"cactus_kernels.{module}")
        setattr(module, name, Kernel(name, getattr(module, name)))
    found = {}
    for case, inputs in cases(target).items():
        launched = {}
        if isinstance(inputs, RowInputs):
            B = len(inputs.logits)
            out = SampleOutput(torch.zeros(B, dtype=torch.int64), torch.zeros(B), RowStats.empty(B, device="cpu"))
            kernel_rows.row_stats(inputs, out)
        else:
            B, width = inputs.batch_size, inputs.max_draft_tokens + 1
            ids = torch.zeros(B, width, dtype=inputs.draft_token_ids.dtype)
            out = VerifyOutput(ids, torch.zeros(B, dtype=torch.int32), torch.zeros(B).bool(), torch.zeros(B).double())
            (kernel_block if inputs.rule.whole_draft else kernel_verify).verify(inputs, out, None)
        found[case] = {name: of(kernel.asm) for name, kernel in launched.items()}
    return found


def of(asm):
    """Figures of a compiled kernel."""
    return of_amd(asm["amdgcn"]) if "amdgcn" in asm else of_nvidia(asm)


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
    # The loads of verification's streaming loops are those that are first to leave the cache (EF).
    loads = re.findall(r"LDG\.E\S*", sass)
    streaming = [load for load in loads if ".EF" in load]
    return {
        "registers": int(registers),
        "spilled bytes": int(stack) + int(local),
        "wide loads": sum(load.endswith(".128") for load in loads),
        "wide streaming loads": sum(load.endswith(".128") for load in streaming),
        "narrow streaming loads": sum(not load.endswith(".128") for load in streaming),
        "inexact": re.findall(r"\S*(?:fma|\.ftz|div\.full|\.approx)\S*", asm["ptx"]),
    }


def of_amd(assembly):
    wide = len(re.findall(r"(?:global|buffer)_load_dwordx4\b", assembly))
    return {
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", assembly)[1]),
        "spilled bytes": int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", assembly)[1]),
        "wide loads": wide,
        "wide streaming loads": wide,
        "narrow streaming loads": 0,  # nothing tells them from the masked loads
        "inexact": [],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(json.dumps(compile_all(sys.argv[1])))
    else:
        print(table({target: column(figures(target)) for target in TARGETS}), end="")
