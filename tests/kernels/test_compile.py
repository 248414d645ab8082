"""The kernels compiled offline (see `support.offline`) for every target, dtype and layout."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from support import offline

# Of a vocabulary that takes many splits: one iteration of verification reads a lane's 8 entries of a row at once, in two
# loops: of the row pair after a rejection, of the target's row alone.
WIDE_LOADS = {"fp32": 6, "bf16": 3, "fp16": 3}
REGISTERS = 80  # of verification on sm_90, from triton 3.9 on: earlier ones reduce 64-bit sums by other instructions
DOCS = Path(__file__).parents[2] / "docs/kernels.md"

VERSION = tuple(int(x) for x in importlib.metadata.version("triton").split(".")[:2])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", offline.TARGETS)
def test_what_becomes_of_every_kernel(target):
    found = offline.figures(target)
    check(target, found)
    if target == "sm_90":
        # The interpreter takes what the compiler refuses, such as a name that changes its type in a branch.
        assert offline.ways().keys() < found.keys()
    if target == "sm_90" and VERSION >= (3, 9):
        verifying = {case: of["verify_kernel"]["registers"] for case, of in found.items() if "verify_kernel" in of}
        assert {case: registers for case, registers in verifying.items() if registers > REGISTERS} == {}
        assert max(r for case, r in verifying.items() if case.startswith("probabilities")) <= 64
    page = DOCS.read_text()
    documented = re.search(r"triton (\d+\.\d+\.\d+)", page)[1]
    if importlib.metadata.version("triton") != documented:
        pytest.skip(f"all but the table of docs/kernels.md, which is that of triton {documented}, passed")
    lines = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    titles = next(line for line in lines if line[:2] == ["kernel", "of"])
    told = {tuple(line[:2]): line[titles.index(target)] for line in lines if len(line) == len(titles)}
    column = offline.column(found)
    assert {key: told.get(key) for key in column} == column, "python tests/support/offline.py makes the table"


def check(target, found):
    """found: {case: {kernel: figures}}."""
    kernels = [(case, name, figures) for case, named in found.items() for name, figures in named.items()]
    if VERSION >= (3, 9):
        assert [k for k in kernels if k[2]["spilled bytes"]] == []
    check_loads(target, kernels)
    if target.startswith("sm") and VERSION >= (3, 6):  # before, sqrt_rn flushes denormals
        check_rounding(kernels)


def check_loads(target, kernels):
    """Aligned rows are read 16 bytes at a time; `stops_kernel` reads entries of them."""
    nvidia, seen = target.startswith("sm"), set()
    for case, name, figures in kernels:
        if not re.search(r"(fp32|bf16|fp16), (aligned|odd, padded|odd)$", case):
            continue  # one of `offline.ways`
        seen.add(name)
        odd = case.endswith(", odd")
        if name != "stops_kernel" and (nvidia or "cutting" not in name):  # masked loads of a cut stay narrow for AMD
            assert (figures["wide loads"] > 0) != odd, (case, name, figures)
        if name == "verify_kernel" and case.startswith(("probabilities", "logits")):
            expected = 0 if odd else WIDE_LOADS[case.split(", ")[1]]
            wide = figures["wide streaming loads"]  # for AMD the masked ones count, which are wide where 16 divides V
            assert wide == expected if nvidia else wide >= expected, (case, figures)
            assert figures["narrow streaming loads"] == 0 or odd, (case, figures)
    assert seen == {*offline.KERNELS, "rows_kernel, cutting"}


def check_rounding(kernels):
    """From probabilities every operation is rounded on its own: no fused multiply-add, no approximate division or root, no
    denormals flushed, else devices differ in last bits. Where there are logits there is exp, which is approximate."""
    exact = [k for k in kernels if "logits" not in k[0] and k[1] in offline.KERNELS and k[1] != "rows_kernel"]
    assert {k[1] for k in exact} == offline.KERNELS.keys() - {"rows_kernel"}
    assert [k for k in exact if k[2]["inexact"]] == []
