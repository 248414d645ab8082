"""What must not change a token: splits, warps, the order in which blocks arrive, the batch, strides, scratch, earlier calls."""

from dataclasses import replace

import pytest
import torch

from cactus_kernels import Cactus, VerifyOutput, new_scratch, rules
from cactus_kernels.contract import Inputs, Probs
from cactus_kernels.contract import inputs_of_rows as draw_inputs
from cactus_kernels.host import verify as host_verify
from cactus_kernels.rules import Rule, SpS
from cactus_kernels.testing import parity
from cactus_kernels.testing.fuzz import DTYPES

triton = pytest.importorskip("triton")
verify_triton = pytest.importorskip("cactus_kernels.kernels.verify")
kernel_scratch = pytest.importorskip("cactus_kernels.kernels.scratch")
race_triton = pytest.importorskip("cactus_kernels.kernels.race")

INTERPRETED = pytest.mark.skipif(not race_triton.INTERPRETED, reason="steps into the interpreter")
V = 40_000  # 40 chunks: five blocks of eight warps
OUTPUTS = ("token_ids", "num_accepted", "valid")


def batch(V=V, B=4, m=3, dtype=torch.float32, rule=None, seed=0):
    """Padded `Inputs`: request 0 is accepted whole, 1 rejects at once, 2 has no residual, 3 somewhere between."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(B, m + 1, V, generator=generator) ** 8
    target /= target.sum(-1, keepdim=True)
    draft = torch.rand(B, m, V, generator=generator) ** 8
    draft /= draft.sum(-1, keepdim=True)
    ids = torch.randint(0, V, (B, m), generator=generator)
    draft[0] = target[0, :m]
    target[1, 0, ids[1, 0]] = 0
    target[2, 0, ids[2, 0]] = 0
    draft[2, 0] = target[2, 0] * 1.5
    target, draft = target.to(dtype), draft.to(dtype)
    seeds, offsets = torch.randint(-(2**62), 2**62, (2, B), generator=generator)
    return Inputs(Probs(target), Probs(draft), ids, rule or SpS(), seeds, offsets, None, m, B)


def run(inputs, device="cpu", scratch=None, backend=verify_triton, **options):
    """Verified into poisoned outputs; they come back to the CPU."""
    fields = {name: parity.to_device(getattr(inputs, name), device) for name in inputs.__dataclass_fields__}
    inputs = Inputs(**fields)
    B, width = inputs.batch_size, inputs.max_draft_tokens + 1
    out = VerifyOutput(
        torch.full((B, width), parity.POISON, dtype=inputs.draft_token_ids.dtype, device=device),
        torch.full((B,), parity.POISON, dtype=torch.int32, device=device),
        torch.zeros(B, dtype=torch.bool, device=device),
    )
    backend.verify(inputs, out, scratch, **options)
    return VerifyOutput(out.token_ids.cpu(), out.num_accepted.cpu(), out.valid.cpu())


def reference(inputs):
    return run(inputs, backend=host_verify)


def assert_same(expected, got):
    for name in ("num_accepted", "valid", "token_ids"):
        assert torch.equal(getattr(expected, name), getattr(got, name)), name


def test_the_batch_reaches_every_kind_of_draw():
    out = reference(batch())
    assert out.valid.all() and out.num_accepted[:3].tolist() == [3, 0, 0]
    ids, draft, target = batch().draft_token_ids, batch().draft.values, batch().target.values
    assert (target[2, 0] <= draft[2, 0]).all() and out.token_ids[2, 0] != ids[2, 0]


@pytest.mark.parametrize(("splits", "num_warps"), [(1, 1), (2, 4), (3, 8), (8, 1)])
def test_splits_and_warps(splits, num_warps, device):
    inputs = batch()
    assert_same(reference(inputs), run(inputs, device, splits=splits, num_warps=num_warps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_warps", [2, 16])
def test_warps_by_dtype(dtype, num_warps, device):
    inputs = batch(V=9000, dtype=dtype, rule=Cactus(0.1))
    assert_same(reference(inputs), run(inputs, device, num_warps=num_warps))


def test_more_chunks_than_a_split_holds(device):
    """V > 262,144 takes a second split, whatever is asked for."""
    size = 1024 * verify_triton.SPLIT_CHUNKS.value + 500
    probs = torch.zeros(3, size)
    probs[0, [5, size - 1]] = 0.5
    probs[1, size - 1] = probs[2, 7] = 1e-3
    inputs = draw_inputs(probs, 3, 0)
    expected = reference(inputs)
    assert expected.token_ids[1:].tolist() == [[size - 1], [7]]
    assert_same(expected, run(inputs, device, splits=1))


@INTERPRETED
@pytest.mark.parametrize(("order", "splits"), [("last first", 2), ("middle first", 5)])
def test_blocks_may_arrive_in_any_order(order, splits, monkeypatch):
    from triton.runtime import interpreter

    inputs, builder, blocks = batch(), interpreter.interpreter_builder, []
    set_grid_idx = builder.set_grid_idx

    def other_order(x, y, z):
        y = splits - 1 - y if order == "last first" else (y + splits // 2) % splits
        blocks.append((x, y))
        set_grid_idx(x, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", other_order)
    got = run(inputs, splits=splits)
    assert blocks[0] == (0, splits - 1 if order == "last first" else splits // 2)
    assert len(set(blocks)) == len(blocks) == 4 * splits
    assert_same(reference(inputs), got)


def test_calls_take_turns_with_one_scratch(device):
    """Of different sizes, valid and not, and the scratch is zero after each."""
    scratch = new_scratch(5, 9000, device)
    many, few, drawn = batch(V=9000), batch(V=1025, B=3, m=1, seed=1), draw_inputs(torch.rand(5, 2000) / 1000, 3, 0)
    bad = batch(V=9000, seed=2)
    bad.target.values[1, 0, 4000] = bad.target.values[3, 1] = float("nan")
    expected = [reference(inputs) for inputs in (many, few, drawn, bad)]
    assert not expected[3].valid[1]
    for _ in range(2):
        for inputs, right in zip((many, few, drawn, bad), expected, strict=True):
            assert_same(right, run(inputs, device, scratch=scratch, splits=2))
            assert not scratch.zeros.any()


def raising_recover(q, q_n, h_n, stat):
    return rules.m.no_such_function(q)


class Raising(Rule):
    name = "raising"
    accept = SpS.accept
    recover = staticmethod(raising_recover)


def test_a_call_after_one_that_raised(device):
    """The private scratch of a launch that raised is dropped: its words may be left anyhow."""
    inputs = batch(V=3000)
    expected = reference(inputs)
    assert_same(expected, run(inputs, device))
    held = dict(kernel_scratch._scratch)
    assert held
    with pytest.raises(Exception, match="no_such_function"):
        run(replace(inputs, rule=Raising()), device)
    assert not any(
        kernel_scratch._scratch.get(owner) is words for owner, words in held.items() if owner[0].type == device.type
    )
    assert_same(expected, run(inputs, device))


@INTERPRETED
def test_a_launch_that_raises_between_blocks_leaves_no_trace(monkeypatch):
    """It stops after two of three blocks arrived: with the same scratch the next call would count four."""
    inputs, runs = batch(V=20_000, B=4), []
    expected = reference(inputs)
    kernel_scratch._scratch.clear()
    run(inputs, splits=3)
    words = next(iter(kernel_scratch._scratch.values()))
    philox = verify_triton.tl.philox

    def stops(*args):  # a block takes words twice, for acceptance and for its race
        runs.append(1)
        if len(runs) == 5:
            raise KeyError("stopped")
        return philox(*args)

    with monkeypatch.context() as patched:
        patched.setattr(verify_triton.tl, "philox", stops)
        with pytest.raises(Exception, match="stopped"):
            run(inputs, splits=3)
    assert words.zeros[:2].all() and not words.zeros[2:].any() and not kernel_scratch._scratch
    assert_same(expected, run(inputs, splits=3))


def test_the_private_scratch_grows_and_is_kept(device):
    kernel_scratch._scratch.clear()
    run(batch(V=100, B=3), device)
    (first,) = kernel_scratch._scratch.values()
    run(replace(batch(V=100, B=3)), device)
    (again,) = kernel_scratch._scratch.values()
    run(batch(V=100, B=6), device)
    (grown,) = kernel_scratch._scratch.values()
    assert first is again and [len(x.zeros) for x in (first, grown)] == [6, 12] and not grown.zeros.any()


def test_a_bad_scratch_is_refused(device):
    for scratch, error, words in (
        (new_scratch(2, 100, device), ValueError, "scratch is too small"),
        (torch.zeros(8, dtype=torch.int64, device=device), TypeError, "must be new_scratch.*, got Tensor"),
    ):
        with pytest.raises(error, match=words):
            run(batch(V=100), device, scratch=scratch)


@pytest.mark.parametrize("layout", ["padded to 16", "padded by 3", "misaligned", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_of_rows(layout, dtype, device):
    inputs = batch(V=2051, dtype=dtype)

    def laid_out(rows):
        B, m, size = rows.shape
        if layout == "transposed":  # positions outermost
            return rows.transpose(0, 1).contiguous().transpose(0, 1)
        ahead, width = (
            (1, size + 3) if layout == "misaligned" else (0, size + {"padded by 3": 3, "padded to 16": 13}[layout])
        )
        held = torch.full((B, m, ahead + width), float("nan"), dtype=dtype)
        held[..., ahead : ahead + size] = rows
        return held[..., ahead : ahead + size]

    other = replace(inputs, target=Probs(laid_out(inputs.target.values)), draft=Probs(laid_out(inputs.draft.values)))
    assert other.target.values.stride() != inputs.target.values.stride()
    assert_same(reference(inputs), run(other, device))


def test_strides_of_the_rest(device):
    """Ids, seeds, offsets, strengths and outputs with strides; nothing between their elements is written to."""
    inputs = batch(V=1500, rule=Cactus(torch.tensor([0.0, 0.1, 0.2, 3.0])))
    expected = reference(inputs)
    inputs = Inputs(**{n: parity.to_device(getattr(inputs, n), device) for n in inputs.__dataclass_fields__})

    def every_third(x):
        held = torch.full((*x.shape, 3), parity.POISON, dtype=x.dtype, device=device)
        held[..., 1] = x
        return held[..., 1]

    names = ("draft_token_ids", "seed", "offset")
    inputs = replace(
        inputs, rule=Cactus(every_third(inputs.rule.delta)), **{n: every_third(getattr(inputs, n)) for n in names}
    )
    held = [torch.full((4, 9), parity.POISON, device=device, dtype=t) for t in (torch.int64, torch.int32)]
    held.append(torch.ones((4, 2), dtype=torch.bool, device=device))
    out = VerifyOutput(held[0][:, 1::2], held[1][:, 4], held[2][:, 0])
    verify_triton.verify(inputs, out, None)
    assert_same(expected, VerifyOutput(out.token_ids.cpu(), out.num_accepted.cpu(), out.valid.cpu()))
    assert (held[0][:, ::2] == parity.POISON).all() and held[2][:, 1].all()
    assert (held[1][:, [0, 1, 2, 3, 5, 6, 7, 8]] == parity.POISON).all()
