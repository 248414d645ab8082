"""The interpreter that the tests run kernels in: it finds every access outside a tensor, and computes what triton's does."""

import itertools

import pytest
import torch
from support import interpreter
from support.logit_cases import fuzzed_batch

from cactus_kernels import Mentored, Sampling, TopK, row_stats, sample, verify, verify_from_logits
from cactus_kernels.testing.fuzz import fuzz_case
from cactus_kernels.testing.parity import run_case

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreter.installed(), reason=interpreter.header()),
]


@triton.jit
def _element(pointer, at):
    return tl.load(pointer + at)


@triton.jit
def access_kernel(out, tensors, at, limit, KIND: tl.constexpr, COUNT: tl.constexpr):
    i = at + tl.arange(0, COUNT)
    x = tensors[0]
    if KIND == "load":
        tl.store(out + tl.arange(0, COUNT), tl.load(x + i))
    elif KIND == "masked load":
        tl.store(out + tl.arange(0, COUNT), tl.load(x + i, mask=i < limit, other=7))
    elif KIND == "scalar load":
        tl.store(out, _element(x, at))
    elif KIND == "store":
        tl.store(x + i, i)
    elif KIND == "masked store":
        tl.store(x + i, i, mask=i < limit)
    elif KIND == "atomic_add":
        tl.atomic_add(x + i, i)
    elif KIND == "atomic_max":
        tl.atomic_max(x + i, i, mask=i < limit)
    elif KIND == "atomic_xchg":
        tl.atomic_xchg(x + at, 5)
    elif KIND == "atomic_cas":
        tl.atomic_cas(x + at, 5, 6)
    elif KIND == "either":
        tl.store(out + tl.arange(0, COUNT), tl.load(tl.where(i < limit, x + i, tensors[1] + i)))


KINDS = {
    "load": "load", "masked load": "load", "scalar load": "load", "store": "store", "masked store": "store",
    "atomic_add": "atomic", "atomic_max": "atomic", "atomic_xchg": "atomic", "atomic_cas": "atomic",
}  # fmt: skip
SCALAR = ("scalar load", "atomic_xchg", "atomic_cas")


def access(kind, at, tensors, limit=1000, count=4):
    out = torch.zeros(count, dtype=torch.int64)
    access_kernel[(1,)](out, tensors, at, limit, KIND=kind, COUNT=count)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_beyond(kind):
    """What lies behind is there, and stays as it is; masked elements do not count; the last element is no error."""
    for dtype in (torch.int64, torch.int32):
        held = torch.zeros(40, dtype=dtype)
        x = held[20:30]
        last = 9 if kind in SCALAR else 6
        access(kind, last, (x,))
        before = held.clone()
        with pytest.raises(interpreter.OutsideTensor) as caught:
            access(kind, last + 1, (x,))
        said = str(caught.value)
        assert said.startswith(
            f"access_kernel: a {KINDS[kind]} of {1 if kind in SCALAR else 4} elements, 1 of them up to"
        )
        assert f"{x.element_size()} bytes beyond its end: a tensor {str(dtype).removeprefix('torch.')} [10]" in said
        with pytest.raises(interpreter.OutsideTensor, match=f"{2 * x.element_size()} bytes before its start"):
            access(kind, -2, (x,))
        assert torch.equal(held, before)
        if kind in ("masked load", "masked store", "atomic_max"):
            access(kind, last + 1, (x,), limit=10)


def test_another_tensor_is_no_excuse():
    """A pointer into the tensor next to its own; one that may point to either of two is checked against both."""
    held = torch.arange(20)
    halves = held[:8], held[12:]
    with pytest.raises(interpreter.OutsideTensor, match="48 bytes beyond"):
        access("load", 10, halves)
    assert access("either", 2, halves, limit=4).tolist() == [2, 3, 16, 17]
    with pytest.raises(interpreter.OutsideTensor, match=r"2 of them up to \d+ bytes beyond"):
        access("either", 6, halves, limit=8)  # the second half has no elements 8 and 9
    with pytest.raises(interpreter.OutsideTensor, match="beyond"):
        access("either", 6, halves, limit=100)


def test_empty_tensors_and_strides():
    with pytest.raises(interpreter.OutsideTensor, match=r"8 bytes beyond its end: a tensor int64 \[0, 5\]"):
        access("scalar load", 0, (torch.zeros(0, 5, dtype=torch.int64),))
    x = torch.arange(30).view(5, 6)[:, :3]  # its last element is the 27th
    assert access("scalar load", 26, (x,))[0] == 26
    with pytest.raises(interpreter.OutsideTensor, match="8 bytes beyond"):
        access("scalar load", 27, (x,))


def test_after_an_error_the_next_launch_runs():
    x = torch.arange(4)
    with pytest.raises(interpreter.OutsideTensor):
        access("load", 1, (x,))
    assert access("load", 0, (x,)).tolist() == [0, 1, 2, 3]


def test_accesses_are_counted():
    before = interpreter.accesses.copy()
    access("masked load", 2, (torch.zeros(4, dtype=torch.int64),), limit=4)
    access("atomic_add", 0, (torch.zeros(4, dtype=torch.int64),))
    assert interpreter.accesses - before == {"load": 2, "store": 4, "atomic": 4}


@triton.jit
def to_fp32_kernel(out, x, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


def test_bf16_becomes_fp32_by_its_bits():
    """All of them. Triton's interpreter converts 254 denormals to other numbers, and all else alike."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out, theirs = torch.empty(2, 2**16)
    to_fp32_kernel[(1,)](out, x, COUNT=2**16)
    with interpreter.stock():
        to_fp32_kernel[(1,)](theirs, x, COUNT=2**16)
    expected = x.view(torch.int16).to(torch.int32) << 16
    assert torch.equal(out.view(torch.int32), expected)
    denormal = (expected & 0x7F800000 == 0) & (expected & 0x7FFFFF != 0)
    assert torch.equal(theirs.view(torch.int32)[~denormal], expected[~denormal])


def numbers(x):
    """The tensors of what a call returned, as bits."""
    found = [getattr(x, name, None) for name in ("token_ids", "num_accepted", "valid", "spent", "probs", "packed")]
    found = [t for t in found if t is not None] + (numbers(x.stats) if getattr(x, "stats", None) is not None else [])
    found = [t[..., :7] if t.shape[-1:] == (8,) else t for t in found]  # the last of a row's numbers is unused
    return [t.view(torch.int32) if t.dtype == torch.float32 else t for t in found]


def calls():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 3, 1500, generator=generator)
    for seed in (7,):
        yield f"case {seed}", lambda seed=seed: run_case(fuzz_case(seed), "triton")
    for truncated in (False, True):
        case, _ = fuzzed_batch(np.random.default_rng(3), truncated)
        yield f"logits, {truncated}", lambda case=case: verify_from_logits(**case, backend="triton")
    sampling = Sampling(0.7, top_k=9, top_p=0.8, min_p=0.01)
    yield "draw", lambda: sample(logits[0], seed=1, offset=2, sampling=sampling, entropy=True, backend="triton")
    yield "statistics", lambda: row_stats(logits[0].half(), entropy=True, backend="triton")
    probs = (2 * logits).softmax(-1)[..., :40].contiguous()
    probs /= probs.sum(-1, keepdim=True)
    rows = probs, probs[:, :2].flip(0), torch.randint(0, 40, (2, 2), generator=generator)
    for rule in (Mentored(0.1), TopK(3)):
        yield rule.name, lambda rule=rule: verify(*rows, rule, seed=0, offset=0, backend="triton")


def test_results_are_those_of_the_stock_interpreter():
    for name, call in calls():
        ours = numbers(call())
        with interpreter.stock():
            count = interpreter.accesses.copy()
            theirs = numbers(call())
            assert interpreter.accesses == count  # it was the stock one
        assert ours and all(torch.equal(a, b) for a, b in itertools.zip_longest(ours, theirs)), name


def test_what_does_not_fit_is_said(monkeypatch):
    from triton.runtime import interpreter as theirs

    replacements = interpreter._replacements(theirs)
    assert interpreter._misfit(replacements) is None
    with monkeypatch.context() as patch:
        patch.delattr(theirs.InterpreterBuilder, "create_atomic_cas")
        assert "has no InterpreterBuilder.create_atomic_cas" in interpreter._misfit(replacements)
    with monkeypatch.context() as patch:
        patch.setattr(theirs, "_implicit_cvt", lambda value, types: None)
        assert "takes ('value',), not ('arg',)" in interpreter._misfit(replacements)
