"""The kernels compiled offline (see `offline`), fp32 and bf16 for sm_90 here, every target, dtype and layout in the slow tier."""

import importlib.metadata
import re
from functools import cache
from pathlib import Path

import offline
import pytest

# Of a vocabulary that takes many splits: one iteration of verification reads a lane's 8 entries of a row at once, in two
# loops: of the row pair after a rejection, of the target's row alone.
WIDE_LOADS = {"fp32": 6, "bf16": 3, "fp16": 3}
REGISTERS = (
    80  # of verification on sm_90, for triton 3.9 and later: earlier ones reduce 64-bit sums by other instructions
)
DOCS = Path(__file__).parents[1] / "docs/kernels.md"

pytestmark = pytest.mark.xdist_group("compile")  # one process compiles

compiled = cache(offline.figures)
TARGETS = [pytest.param("sm_90", "brief", id="sm_90, brief")]
TARGETS += [pytest.param(target, "", id=target, marks=pytest.mark.slow) for target in offline.TARGETS]


def version():
    return tuple(int(x) for x in importlib.metadata.version("triton").split(".")[:2])


def kernels(target, brief):
    """(case, kernel's name, figures) of all."""
    found = compiled(target, *([brief] if brief else []))
    return [(case, name, figures) for case, named in found.items() for name, figures in named.items()]


@pytest.mark.parametrize(("target", "brief"), TARGETS)
def test_nothing_is_spilled(target, brief):
    if version() < (3, 9):
        pytest.skip("holds from triton 3.9 on")
    assert [k for k in kernels(target, brief) if k[2]["spilled bytes"]] == []


@pytest.mark.parametrize(("target", "brief"), TARGETS)
def test_aligned_rows_are_read_16_bytes_at_a_time(target, brief):
    nvidia, seen = target.startswith("sm"), set()
    for case, name, figures in kernels(target, brief):
        if not re.search(r"(fp32|bf16|fp16), (aligned|odd, padded|odd)$", case):
            continue  # one of `offline.ways`
        seen.add(name)
        odd = case.endswith(", odd")
        if nvidia or "cutting" not in name:  # masked loads of a cut stay narrow for AMD
            assert (figures["wide loads"] > 0) != odd, (case, name, figures)
        if name == "verify_kernel" and case.startswith(("probabilities", "logits")):
            expected = 0 if odd else WIDE_LOADS[case.split(", ")[1]]
            wide = figures["wide streaming loads"]  # for AMD the masked ones count, which are wide where 16 divides V
            assert wide == expected if nvidia else wide >= expected, (case, figures)
            assert figures["narrow streaming loads"] == 0 or odd, (case, figures)
    assert seen == {*offline.KERNELS, "rows_kernel, cutting"}


def test_registers():
    if version() < (3, 9):
        pytest.skip("holds from triton 3.9 on")
    verifying = {case: f["registers"] for case, name, f in kernels("sm_90", "brief") if name == "verify_kernel"}
    assert {case: registers for case, registers in verifying.items() if registers > REGISTERS} == {}
    assert max(r for case, r in verifying.items() if case.startswith("probabilities")) <= 64


@pytest.mark.parametrize(("target", "brief"), [t for t in TARGETS if t.values[0].startswith("sm")])
def test_every_operation_on_probabilities_is_rounded_on_its_own(target, brief):
    """No fused multiply-add, no approximate division or root, no denormals flushed: else devices differ in last bits.

    Where there are logits there is exp, which is approximate.
    """
    if version() < (3, 6):
        pytest.skip("before triton 3.6 sqrt_rn flushes denormals")
    exact = [
        k for k in kernels(target, brief) if "logits" not in k[0] and k[1] in offline.KERNELS and k[1] != "rows_kernel"
    ]
    assert {k[1] for k in exact} == offline.KERNELS.keys() - {"rows_kernel"}
    assert [k for k in exact if k[2]["inexact"]] == []


def test_every_way_of_calling_compiles():
    """The interpreter takes what the compiler refuses, such as a name that changes its type in a branch."""
    assert offline.ways().keys() < compiled("sm_90", "brief").keys()


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_the_compiler_gives():
    page = DOCS.read_text()
    documented = re.search(r"triton (\d+\.\d+\.\d+)", page)[1]
    if importlib.metadata.version("triton") != documented:
        pytest.skip(f"the table is that of triton {documented}")
    table = offline.table({target: compiled(target) for target in offline.TARGETS})
    assert table in page, f"python tests/offline.py gives\n{table}"
