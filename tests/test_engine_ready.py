"""What a serving engine relies on: launches, no waiting, no allocation, traffic, offsets past 2^31, operators of torch."""

import functools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cactus_kernels import (
    Cactus,
    RowStats,
    SampleOutput,
    Sampling,
    VerifyOutput,
    new_scratch,
    ops,
    row_stats,
    sample,
    verify,
    verify_from_logits,
)

triton = pytest.importorskip("triton")
race_triton = pytest.importorskip("cactus_kernels.kernels.race")
from cactus_kernels.kernels import rows as kernel_rows  # noqa: E402 (it needs triton)
from cactus_kernels.kernels import verify as kernel_verify  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not race_triton.INTERPRETED, reason="looks into the interpreter"),
]


class Counted:
    """Stands in for a kernel: counts its launches, and runs it unless told not to."""

    def __init__(self, kernel, runs=True):
        self.kernel, self.runs, self.grids = kernel, runs, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid] if self.runs else lambda *args, **kwargs: None


@pytest.fixture
def launches(monkeypatch):
    """A function: which kernels, (rows, verify), a call launches how often."""

    def count(call, runs=True):
        rows, verification = Counted(kernel_rows.rows_kernel, runs), Counted(kernel_verify.verify_kernel, runs)
        with monkeypatch.context() as patch:
            patch.setattr(kernel_rows, "rows_kernel", rows)
            patch.setattr(kernel_verify, "verify_kernel", verification)
            call()
        return len(rows.grids), len(verification.grids)

    return count


def batch(B=2, m=3, V=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(B, m + 1, V, generator=generator)
    d = x[:, :m] + torch.randn(B, m, V, generator=generator)
    ids = d.argmax(-1)
    return x.to(dtype), d.to(dtype), ids


def test_launches(launches):
    x, d, ids = batch()
    common = {"draft_token_ids": ids, "rule": Cactus(0.5), "seed": 1, "offset": 0, "backend": "triton"}
    logits = functools.partial(verify_from_logits, x, d, **common)
    stats = RowStats(row_stats(d.flatten(0, 1)).packed.view(2, 3, 8))
    assert launches(lambda: verify(x.softmax(-1), d.softmax(-1), **common)) == (0, 1)
    assert launches(logits) == (1, 1)
    assert launches(lambda: logits(draft_stats=stats)) == (1, 1)
    assert launches(lambda: logits(sampling=Sampling(0.7, min_p=0.1))) == (1, 1)
    assert launches(lambda: logits(sampling=Sampling(top_k=5))) == (2, 1)
    assert launches(lambda: logits(draft_sampling=Sampling(top_p=0.9))) == (2, 1)
    draw = functools.partial(sample, x[:, 0], seed=1, offset=0, backend="triton")
    assert launches(draw) == (1, 0)
    assert launches(lambda: draw(sampling=Sampling(top_k=5, top_p=0.9))) == (2, 0)


class NoAllocation(TorchDispatchMode):
    """Raises where an operation of torch makes memory or waits for values: all that is left are views."""

    ALLOWED = ("view", "slice", "as_strided", "select", "alias", "detach", "expand", "unsqueeze")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name not in self.ALLOWED:
            raise AssertionError(f"{func} was called")
        return func(*args, **(kwargs or {}))


def outputs(B, m):
    return VerifyOutput(
        torch.zeros(B, m + 1, dtype=torch.int64), torch.zeros(B, dtype=torch.int32), torch.zeros(B, dtype=torch.bool)
    )


@pytest.mark.parametrize("truncated", [False, True])
def test_no_memory_is_made_and_nothing_is_waited_for(truncated, launches):
    """With out and scratch given, everything on the host is views and launches. A value read on the host (`item`), a copy or an
    allocation would be an operation of torch."""
    B, m, V = 2, 3, 5000
    x, d, ids = batch(B, m, V)
    seed, offset, delta = torch.arange(B), torch.zeros(B, dtype=torch.int64), torch.full((B,), 0.5)
    sampling = Sampling(torch.ones(B), min_p=0.1)
    if truncated:
        sampling = Sampling(torch.ones(B), torch.full((B,), 5, dtype=torch.int32), torch.full((B,), 0.9))
    rule, out = Cactus(delta), outputs(B, m)
    drawn = SampleOutput(torch.zeros(B, dtype=torch.int64), torch.zeros(B), RowStats(torch.zeros(B, 8)))
    probs = x.softmax(-1), d.softmax(-1)
    common = {"seed": seed, "offset": offset, "out": out, "backend": "triton"}
    for_rows = new_scratch(B, V, "cpu")
    for_probs = new_scratch(B, V, "cpu")
    for_logits = new_scratch(B, V, "cpu", rows=2 * m + 1)

    def calls():
        with NoAllocation():
            sample(x[:, 0], seed=seed, offset=offset, sampling=sampling, out=drawn, scratch=for_rows, backend="triton")
            verify(*probs, ids, rule, scratch=for_probs, **common)
            verify_from_logits(x, d, ids, rule, sampling=sampling, scratch=for_logits, **common)

    assert launches(calls, runs=False) == ((4, 2) if truncated else (2, 2))
    with pytest.raises(AssertionError, match="was called"), NoAllocation():  # what would be caught
        seed.sum().item()


def test_grids_depend_on_shapes_alone(launches, monkeypatch):
    grids = []
    for scale in (0.1, 30.0):
        x, d, ids = batch(B=3, m=2, V=9000)
        rows, verification = Counted(kernel_rows.rows_kernel, False), Counted(kernel_verify.verify_kernel, False)
        monkeypatch.setattr(kernel_rows, "rows_kernel", rows)
        monkeypatch.setattr(kernel_verify, "verify_kernel", verification)
        sampling = Sampling(torch.full((3,), scale), torch.full((3,), int(scale), dtype=torch.int32))
        verify_from_logits(scale * x, d, ids, "cactus", seed=0, offset=0, sampling=sampling, backend="triton")
        monkeypatch.undo()
        grids.append((rows.grids, verification.grids))
    assert grids[0] == grids[1]


def test_scratch_is_small():
    """Peak temporaries of B = 128, m = 4, V = 151,936 with the draft's statistics given: at most 1 MiB."""
    B, m, V = 128, 4, 151_936
    scratch = new_scratch(B, V, "meta", rows=m + 1)
    assert sum(t.numel() * t.element_size() for t in (scratch.zeros, scratch.words, scratch.stats)) <= 2**20


def test_scratch_of_the_wrong_kind_or_size_is_refused():
    x, d, ids = batch()
    for scratch, error, says in (
        (torch.zeros(2, 2), TypeError, "new_scratch"), (new_scratch(1, 50, "cpu", rows=7), ValueError, "too small")
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            verify_from_logits(x, d, ids, "sps", seed=0, offset=0, scratch=scratch, backend="triton")


@pytest.fixture
def traffic(monkeypatch):
    """A function: how many elements of some tensors a call loads in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    def count(call, *tensors):
        spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        loaded = np.zeros(len(spans), dtype=np.int64)
        load = InterpreterBuilder.create_masked_load

        def counting(self, pointers, mask, *rest):
            for i, (start, end) in enumerate(spans):
                loaded[i] += ((pointers.data >= start) & (pointers.data < end) & mask.data).sum()
            return load(self, pointers, mask, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(InterpreterBuilder, "create_masked_load", counting)
            call()
        return loaded.tolist()

    return count


@pytest.mark.slow
def test_row_elements_loaded(traffic):
    B, m, V = 1, 4, 151_936
    x, d, _ = batch(B, m, V, torch.bfloat16)
    ids = (d - x[:, :m]).argmax(-1)  # rejected at once, so that a row pair is scanned
    common = {"draft_token_ids": ids, "rule": "sps", "seed": 1, "offset": 0, "backend": "triton"}
    q, p = x.softmax(-1).float(), d.softmax(-1).float()
    loaded = sum(traffic(lambda: verify(q, p, **common), q, p))
    assert 2 * V <= loaded <= 1.02 * 2 * V, loaded / V
    stats = RowStats(row_stats(d.flatten(0, 1)).packed.view(B, m, 8))
    loaded = sum(traffic(lambda: verify_from_logits(x, d, draft_stats=stats, **common), x, d))
    assert loaded <= 1.1 * (m + 3) * V, loaded / V
    # What truncation adds, for each of the m + 1 rows: the chunks that can hold the cut-off, read a few times from cache.
    sampling = Sampling(0.6, top_k=20, top_p=0.95)
    cut = sum(traffic(lambda: verify_from_logits(x, d, draft_stats=stats, sampling=sampling, **common), x, d))
    print(f"from logits {loaded / V:.2f} V, with top-k 20 and top-p .95 {cut / V:.2f} V")
    assert cut > loaded


def test_offsets_of_rows_are_64_bit(tmp_path):
    """vLLM #46560: row times V overflowed 32 bits. Here rows lie 3 * 2^30 elements apart in a sparse file: a 32-bit offset would
    read elsewhere."""
    V, stride = 1500, 3 * 2**30
    held = np.memmap(tmp_path / "rows", dtype=np.int16, mode="w+", shape=(2 * stride + V,))  # a sparse file
    storage = torch.from_numpy(held).view(torch.bfloat16)
    x, _, ids = batch(B=3, m=0, V=V, dtype=torch.bfloat16)
    far = torch.as_strided(storage, (3, 1, V), (stride, V, 1))
    far.copy_(x)
    for backend in ("torch", "triton"):
        near_out = sample(x[:, 0], seed=1, offset=0, backend=backend)
        far_out = sample(far[:, 0], seed=1, offset=0, backend=backend)
        assert torch.equal(near_out.token_ids, far_out.token_ids)
        a = verify_from_logits(x, None, ids, "sps", seed=1, offset=0, backend=backend)
        b = verify_from_logits(far, None, ids, "sps", seed=1, offset=0, backend=backend)
        assert torch.equal(a.token_ids, b.token_ids)


def test_operators_pass_opcheck():
    x, d, ids = batch(B=2, m=2, V=20)
    from cactus_kernels.contract import Inputs, Logits

    numbers = torch.zeros(2, dtype=torch.int64)
    inputs = Inputs(
        Logits(x, Sampling(0.7, top_k=5)), Logits(d, Sampling()), ids, Cactus(torch.ones(2)), numbers, 3, None, 2, 2
    )  # fmt: skip
    checked = []

    def opcheck(op):
        def call(*args):
            torch.library.opcheck(op, args)
            checked.append(op)
            return op(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "verify_op", opcheck(torch.ops.cactus_kernels.verify.default))
        ops.call_verify(inputs, "torch")
        patch.setattr(ops, "sample_op", opcheck(torch.ops.cactus_kernels.sample.default))
        from cactus_kernels.contract import RowInputs

        ops.call_sample(RowInputs(x[:, 0], Sampling(), True, numbers, numbers), "torch")
    assert len(checked) == 2


def test_a_whole_graph_compiles_and_gives_the_same():
    x, d, ids = batch(B=2, m=2, V=30)

    def step(x, d, ids, seed):
        drawn = sample(d[:, 0], seed=seed, offset=0)
        a = verify_from_logits(x, d, ids, Cactus(0.5), seed=seed, offset=3, sampling=Sampling(0.8, top_k=5))
        b = verify(x.softmax(-1), d.softmax(-1), ids, "sps", seed=4, offset=3)
        return drawn.token_ids, drawn.probs, a.token_ids, a.num_accepted, a.valid, b.token_ids

    seed = torch.tensor([1, 2])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for expected, got in zip(step(x, d, ids, seed), compiled(x, d, ids, seed), strict=True):
        assert torch.equal(expected, got)


def half_accept(q_n, p_n, stat, delta):
    return 0.5 * q_n


class Half(Cactus):
    """Of the name and strength of `Cactus`, and with functions of its own."""

    accept = staticmethod(half_accept)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_rule_of_ones_own_is_refused_while_compiling(fullgraph):
    x, d, ids = batch(B=20, m=2, V=30)

    def step(x, d, ids, rule):
        return verify(x.softmax(-1), d.softmax(-1), ids, rule, seed=4, offset=3).num_accepted

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=fullgraph, backend="aot_eager")
    own, cactus = (step(x, d, ids, rule) for rule in (Half(1.0), Cactus(1.0)))
    assert own.sum() < cactus.sum() and torch.equal(compiled(x, d, ids, Cactus(1.0)), cactus)
    with pytest.raises(ValueError, match="of the package, got cactus of the class Half"):
        compiled(x, d, ids, Half(1.0))
