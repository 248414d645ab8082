"""torch's global defaults do not leak in: under odd ones every part of the core gives what it gives under plain ones."""

import ast
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

import cactus_kernels
from cactus_kernels import Sampling, draw, law, row_stats, sample, verify, verify_from_logits
from cactus_kernels.rules import (
    AdaptiveCactus,
    Cactus,
    Capped,
    Coupled,
    Interpolation,
    Mentored,
    Optimal,
    SpS,
    TopK,
    Typical,
    m,
)

RULES = [
    SpS(), Cactus(0.5), Cactus(0.5, "kl"), AdaptiveCactus(1.0), AdaptiveCactus(1.0, "uncertain"), Capped(1.5),
    Interpolation(0.6), Optimal(cap=1.5), Optimal(price=1.5), Mentored(0.1), Typical(0.2), TopK(3), Coupled(),
]  # fmt: skip
FEW_RULES = [Cactus(0.5), AdaptiveCactus(1.0), Optimal(cap=1.5), Mentored(0.1), Typical(0.2), TopK(3), Coupled()]
B, M, V = 2, 2, 50


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic():
    """Memory that is not initialised is NaN, or the largest integer."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def no_denormals():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


ODD = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: default_device("meta"),  # a tensor without a device of its own has no values there
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "deterministic": deterministic,
    "no denormals": no_denormals,
}


def batch():
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(B, M + 1, V, generator=generator)
    draft = target[:, :M] + 0.7 * torch.randn(B, M, V, generator=generator)
    ids = torch.multinomial(draft.softmax(-1).view(-1, V), 1, generator=generator).view(B, M)
    return target, draft, ids


def core(backend, device):
    """What the core gives for one batch: {what: tuple of tensors}. Of the triton backend, which the interpreter may run,
    each kernel in few forms."""
    target, draft, ids = (x.to(device) for x in INPUTS["rows"])
    probs = target.softmax(-1), draft.softmax(-1)
    flat = [x.reshape(-1, V) for x in probs]
    layout = {"cu_draft_tokens": INPUTS["cu"].to(device), "max_draft_tokens": M}
    number = {"seed": 5, "offset": 2, "backend": backend}
    tensors = {"seed": INPUTS["seed"].to(device), "offset": INPUTS["offset"].to(device), "backend": backend}
    budget = INPUTS["budget"].to(device)
    few = backend == "triton"
    found = {}

    def put(what, out):
        spent = () if out.spent is None else (out.spent,)
        found[what] = out.token_ids, out.num_accepted, out.valid, *spent

    for i, rule in enumerate(FEW_RULES if few else RULES):
        if not few or i % 2:
            put((rule, "padded"), verify(*probs, ids, rule, **number))
        if not few or not i % 2:
            put((rule, "flat"), verify(*flat, ids.reshape(-1), rule, **layout, **tensors))
        if not few or isinstance(rule, (Typical, Cactus)):
            put((rule, "logits"), verify_from_logits(target, draft, ids, rule, sampling=Sampling(0.8), **number))
        if rule.keeps_proportions and (not few or isinstance(rule, Cactus)):
            put((rule, "budget"), verify(*probs, ids, rule, budget=budget, **tensors))
    put("one-hot", verify(probs[0], None, ids, "sps", **number))
    put("draw", draw(probs[0][:, 0], **tensors))
    for kind, stream in ("number", number), ("tensors", tensors):
        drawn = sample(target[:, 0], sampling=Sampling(0.8), entropy=True, **stream)
        found["sample", kind] = drawn.token_ids, drawn.probs, *numbers(drawn.stats)
    truncated = sample(target[:1, 0], sampling=Sampling(1.0, top_k=20, top_p=0.9), **number)
    found["sample", "truncated"] = truncated.token_ids, truncated.probs
    found["row_stats"] = numbers(row_stats(target[:, 0], entropy=True, backend=backend))
    return {what: tuple(x.cpu() for x in tensors) for what, tensors in found.items()}


def numbers(stats):
    return stats.max, stats.argmax, stats.cutoff, stats.norm, stats.kept, stats.entropy, stats.log_sum_exp


INPUTS = {
    "rows": batch(),
    "seed": torch.tensor([-1, 2**40]),
    "offset": torch.tensor([5, 2**33]),
    "cu": torch.arange(0, B * M + 1, M, dtype=torch.int32),
    "prompts": (torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])),
    "budget": torch.tensor([0.1, 2.0], dtype=torch.float64),
}


@cache
def plain(backend, device):
    return core(backend, device)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    different = [
        what
        for what in expected
        if any(
            a.dtype != b.dtype or not torch.equal(a.nan_to_num(7), b.nan_to_num(7))
            for a, b in zip(got[what], expected[what], strict=True)
        )
    ]
    assert not different


# In the interpreter, which is slow, those that show most are in the fast tier.
FEW_ODD = ("bfloat16", "float64", "device")


@pytest.mark.parametrize(
    ("backend", "odd"),
    [
        pytest.param(backend, odd, marks=[pytest.mark.slow] * (backend == "triton" and odd not in FEW_ODD))
        for backend in ("torch", "triton")
        for odd in ODD
    ],
)
def test_verification_and_draws(backend, odd, device):
    device = device if backend == "triton" else torch.device("cpu")
    expected = plain(backend, device)
    with ODD[odd]():
        got = core(backend, device)
    assert_same(got, expected)
    if backend == "torch" or odd == "inference mode":  # what was kept works without it, too
        assert_same(core(backend, device), expected)


def laws():
    q, p = (x[0, :M].double().softmax(-1) for x in INPUTS["rows"][:2])
    found = {rule: (law.emitted(p, q, rule), law.acceptance(p, q, rule)) for rule in RULES}
    found["divergences"] = tuple(law.divergences(p, q))
    body = m.where(p < q, 0.1, 0.2)
    found["two numbers"] = (body,)
    return found


@pytest.mark.parametrize("odd", ODD)
def test_laws(odd):
    fixed = laws()
    with ODD[odd]():
        found = laws()
    keyed = [{str(k): v for k, v in x.items()} for x in (found, fixed)]
    assert_same(*keyed)


@cache
def pairs():
    models = pytest.importorskip("support.models")
    llama = models.build("llama", dtype=torch.float32)
    return {"table": models.table_pair(), "llama": (llama, cactus_kernels.skip_layers(llama, [1]))}


def texts(name):
    """Of a loop over two rows of different lengths: sampled within a budget, truncated, greedy, from looked-up drafts."""
    target, draft = pairs()[name]
    ids, mask = INPUTS["prompts"]
    shared = {"attention_mask": mask, "max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": None, "seed": 4}
    shared |= {"return_dict_in_generate": True}
    found = {}
    sampled = {"do_sample": True, "top_k": 0, "assistant_model": draft}
    for how, options in {
        "budget": sampled | {"rule": Cactus(0.5), "budget": 1.0},
        "truncated": sampled | {"rule": AdaptiveCactus(0.5), "top_k": 5, "top_p": 0.9},
        "greedy": {"assistant_model": draft},
        "coupled": sampled | {"rule": "coupled"},
        "prompt lookup": sampled | {"rule": "cactus", "assistant_model": None, "prompt_lookup_num_tokens": 3},
    }.items():
        out = cactus_kernels.speculative_generate(target, ids, **shared | options)
        alone = cactus_kernels.speculative_generate(target, ids[1:], **shared | options | {"attention_mask": mask[1:]})
        spent = torch.tensor(out.stats.spent or [], dtype=torch.float64, device="cpu")
        found[how] = out.sequences, spent, alone.sequences
    return found


# A llama makes tensors on the default device itself, and computes otherwise under autocast.
@pytest.mark.parametrize(
    ("name", "odd"),
    [
        *(("table", odd) for odd in ODD),
        *(pytest.param("llama", odd, marks=pytest.mark.slow) for odd in ODD if odd not in ("device", "autocast")),
    ],
)  # fmt: skip
def test_texts(name, odd):
    expected = texts(name)
    with ODD[odd]():
        found = texts(name)
    assert_same(found, expected)


# -- every tensor that the package makes says what it is

MAKE = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip


def incomplete(source):
    """Calls of torch's that make a tensor of a default dtype or on a default device: [(line, call)]."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"):
            continue
        name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
        if name in MAKE and not {"dtype", "device"} <= given:
            found.append((call.lineno, ast.unparse(call)))
        if name == "where" and all(isinstance(x, ast.Constant) and isinstance(x.value, float) for x in call.args[1:]):
            found.append((call.lineno, ast.unparse(call)))
    return found


def test_no_tensor_is_made_without_its_dtype_and_device():
    package = Path(cactus_kernels.__file__).parent
    found = {str(path.relative_to(package)): incomplete(path.read_text()) for path in package.rglob("*.py")}
    assert len(found) > 50 and {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "call", ["torch.zeros(3)", "torch.arange(3, device=x)", "torch.tensor(y, dtype=z)", "torch.where(a, 1.0, 0.0)"]
)
def test_a_tensor_without_them_is_found(call):
    assert incomplete(f"def f(x):\n    return 1 + {call}\n") == [(2, call)]
    assert incomplete("torch.where(a, b, 0.0), x.new_zeros(3), torch.zeros_like(x)") == []
