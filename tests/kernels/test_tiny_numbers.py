"""Strengths and settings below 2^-126 are the fp32 numbers next to them: on both backends, as numbers and in tensors."""

import pytest
import torch

from cactus_kernels import Sampling, SpS, row_stats, sample, verify, verify_from_logits
from cactus_kernels.rules import AdaptiveCactus, Cactus, Capped, Interpolation, Mentored, Optimal, Rule, Typical, m

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# A denormal, the smallest one, one that rounds to it, one that rounds to 0, the largest denormal, the smallest normal number.
TINY = {"1e-40": 1e-40, "2^-149": 2.0**-149, "2^-149.9": 0.6 * 2.0**-149, "1e-60": 1e-60, "below 2^-126": 2.0**-126 - 2.0**-149,
        "2^-126": 2.0**-126}  # fmt: skip
FEW = ("1e-40", "1e-60")


def scaled_accept(q_n, p_n, stat, weight):
    return m.minimum(q_n + weight, 1.0)


def scaled_recover(q, q_n, h_n, stat, weight):
    return q * (1.0 - weight)


class Scaled(Rule):
    """A rule of one's own, that hands on what it was given."""

    name = "scaled"
    accept = staticmethod(scaled_accept)
    recover = staticmethod(scaled_recover)

    def __init__(self, weight):
        self.strengths = (weight,)


RULES = {
    "cactus": Cactus, "cactus-kl": lambda x: Cactus(x, "kl"), "adaptive": AdaptiveCactus,
    "adaptive-uncertain": lambda x: AdaptiveCactus(x, "uncertain"), "interpolation": Interpolation, "typical": Typical,
    "typical, alpha": lambda x: Typical(0.5, x), "mentored": Mentored, "one's own": Scaled,
}  # fmt: skip
# Their strengths are at least 1: a tensor may hold less, which counts as 1.
CAPS = {"capped": Capped, "optimal-cap": lambda x: Optimal(cap=x), "optimal-price": lambda x: Optimal(price=x)}


def rows():
    generator = torch.Generator().manual_seed(5)
    target = (2 * torch.randn(2, 2, 20, generator=generator)).softmax(-1)
    draft = (2 * torch.randn(2, 1, 20, generator=generator)).softmax(-1)
    return target, draft, torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(2, 1)


def outputs(call, *, device, backends=("torch", "triton")):
    """What a call gives on each backend, as lists."""
    found = []
    for backend in backends:
        out = call(backend, torch.device("cpu") if backend == "torch" else device)
        found.append([getattr(out, name).cpu() for name in ("token_ids", "num_accepted", "valid")])
    return found


def assert_all_alike(found):
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), found


@pytest.mark.parametrize(("name", "tiny"), [(r, t) for r in RULES for t in (TINY if r == "cactus" else FEW[:1])])
def test_strengths(name, tiny, device):
    tiny = TINY[tiny]

    def call(strength):
        def run(backend, on):
            inputs = [x.to(on) for x in rows()]
            rule = RULES[name](strength.to(on) if isinstance(strength, torch.Tensor) else strength)
            return verify(*inputs, rule, seed=3, offset=7, backend=backend)

        return run

    found = outputs(call(tiny), device=device) + outputs(call(torch.full((2,), tiny)), device=device)
    assert_all_alike(found)
    assert found[0][2].all()
    if name in ("cactus", "adaptive"):  # too little to change anything
        assert_all_alike([found[0], *outputs(lambda b, on: verify(*(x.to(on) for x in rows()), SpS(), seed=3, offset=7,
                                                                  backend=b), device=device)])  # fmt: skip


@pytest.mark.parametrize("name", CAPS)
def test_caps(name, device):
    def call(strength):
        return lambda backend, on: verify(
            *(x.to(on) for x in rows()), CAPS[name](strength if isinstance(strength, float) else strength.to(on)), seed=3,
            offset=7, backend=backend,
        )  # fmt: skip

    assert_all_alike(outputs(call(1.0), device=device) + outputs(call(torch.full((2,), TINY["1e-40"])), device=device))


@pytest.mark.parametrize(
    ("name", "tiny"),
    [(n, t) for n in ("temperature", "top_p", "min_p") for t in (TINY if n == "temperature" else FEW[:1])],
)
@pytest.mark.parametrize(
    "others",
    [
        pytest.param({}, id="alone"),
        pytest.param({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, id="beside others", marks=pytest.mark.slow),
    ],
)
def test_settings(name, tiny, others, device):
    """Of the target and of the draft, in statistics, draws and verification."""
    target, draft, ids = rows()
    tiny, target, draft = TINY[tiny], target.log(), draft.log()
    numbers, as_tensor = Sampling(**others | {name: tiny}), Sampling(**others | {name: torch.full((2,), tiny)})
    stats, found, drawn = [], [], []
    for sampling in (numbers, as_tensor):

        def verified(backend, on, sampling=sampling):
            inputs = [x.to(on) for x in (target, draft, ids)]
            return verify_from_logits(
                *inputs,
                "sps",
                seed=3,
                offset=7,
                sampling=sampling.to(on),
                draft_sampling=sampling.to(on),
                backend=backend,
            )

        found += outputs(verified, device=device)
        for backend, on in (("torch", torch.device("cpu")), ("triton", device)):
            logits = target[:, 0].to(on)
            stats.append(row_stats(logits, sampling=sampling.to(on), backend=backend).packed[..., :6].cpu())
            out = sample(logits, seed=3, offset=7, sampling=sampling.to(on), backend=backend)
            drawn.append([out.token_ids.cpu(), out.stats.valid.cpu()])
    assert_all_alike(found)
    assert_all_alike(drawn)
    assert found[0][2].all() and drawn[0][1].all()
    for other in stats[1:]:
        torch.testing.assert_close(other, stats[0], rtol=1e-6, atol=1e-6, equal_nan=True)
    # The likeliest alone, at a temperature of nearly 0 as at one of 0; all, or those beside the others, at a min-p of nearly 0.
    largest = drawn[0][0] == target[:, 0].argmax(-1)
    assert largest.all() if name != "min_p" else (stats[0][:, 5] > 0.5).all()
