"""Compiled models as target and draft: called through what was compiled, and read as what they are."""

import functools

import pytest

pytest.importorskip("transformers")

import torch
from support.decoding import outputs, plain, random_prompts, run
from support.models import build, table_pair

from cactus_kernels import skip_layers
from cactus_kernels.decoding.cache.support import without_wrapper
from cactus_kernels.tools.pair import check_rollback

SETTINGS = {"max_new_tokens": 6, "num_assistant_tokens": 2}
PROMPTS = random_prompts((3, 9), 61)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that runs what it is given, and counts the runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def counted(*args):
            self.runs += 1
            return graph.forward(*args)

        return counted


def compiled(model):
    """By torch.compile, and its backend."""
    backend = Counting()
    return torch.compile(model, backend=backend, dynamic=True), backend


def small(**changes):
    return build("llama", num_hidden_layers=1, **changes)


@pytest.mark.parametrize("who", ["target", "draft", "both"])
def test_a_call_runs_through_what_was_compiled(who):
    """Of models small enough to compile at once; transformers' own are in the slow tier."""
    models, backends = dict(zip(("target", "draft"), table_pair(8), strict=True)), {}
    expected = run(*models.values(), [[3], [4, 5]], **SETTINGS)
    for name in models if who == "both" else [who]:
        models[name], backends[name] = compiled(models[name])
    out = run(*models.values(), [[3], [4, 5]], **SETTINGS)
    assert torch.equal(out.sequences, expected.sequences) and out.stats.accepted == expected.stats.accepted
    assert all(backend.runs >= out.stats.target_forwards > 1 for backend in backends.values()) and backends


@pytest.mark.slow
def test_the_compiled_module_is_the_one_that_runs():
    (target, of_target), (draft, of_draft) = compiled(small()), compiled(small())
    out = run(target, draft, PROMPTS, **SETTINGS)
    assert outputs(out, PROMPTS) == plain(small(), PROMPTS, max_new_tokens=6)
    assert out.stats.accepted == out.stats.drafted
    # Each forward pass is one run of a graph at least.
    assert of_target.runs >= out.stats.target_forwards > 1 and of_draft.runs >= sum(out.stats.drafted) // 2
    # The cache comes back as `generate`'s own, and sampling works in the same way.
    again = run(target, draft, PROMPTS, do_sample=True, rule="sps", seed=1, **SETTINGS)
    assert torch.equal(
        again.sequences, run(small(), small(), PROMPTS, do_sample=True, rule="sps", seed=1, **SETTINGS).sequences
    )


@pytest.mark.slow
def test_compiled_in_place():
    target, backend = small(), Counting()
    target.compile(backend=backend, dynamic=True)
    out = run(target, small(), PROMPTS[:1], **SETTINGS)
    assert outputs(out, PROMPTS[:1]) == plain(small(), PROMPTS[:1], max_new_tokens=6)
    assert backend.runs >= out.stats.target_forwards


@pytest.mark.slow
def test_a_compiled_forward():
    """`model.forward = torch.compile(model.forward)`, as transformers' own pages have it."""
    target, backend = small(), Counting()
    target.forward = torch.compile(target.forward, backend=backend, dynamic=True)
    out = run(target, small(), PROMPTS[:1], **SETTINGS)
    assert outputs(out, PROMPTS[:1]) == plain(small(), PROMPTS[:1], max_new_tokens=6)
    assert backend.runs >= out.stats.target_forwards


def test_refusals_name_the_model_that_was_compiled():
    target, _ = compiled(small())
    target.config._attn_implementation = "paged|sdpa"
    for models in ((target, small()), (small(), target)):
        with pytest.raises(ValueError, match=r"paged\|sdpa"):
            run(*models, PROMPTS, **SETTINGS)
    table, _ = compiled(build("gpt2", n_positions=16))
    with pytest.raises(ValueError, match="the target, GPT2LMHeadModel, has a table of 16 positions"):
        run(table, small(), PROMPTS, max_new_tokens=9)
    check_rollback(compiled(small())[0])


def test_layers_of_a_compiled_model_are_skipped_in_the_model_itself():
    model = build("llama")
    draft, plain_draft = skip_layers(compiled(model)[0], [1]), skip_layers(model, [1])
    ids = torch.tensor(PROMPTS[1:])
    with torch.no_grad():
        assert torch.equal(draft(ids, use_cache=False).logits, plain_draft(ids, use_cache=False).logits)
    # A model compiled in place would else run whole.
    model.compile(backend=Counting())
    with torch.no_grad():
        in_place = skip_layers(model, [1])(ids, use_cache=False).logits
        assert torch.equal(in_place, plain_draft(ids, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_frequencies_that_follow_the_length_are_not_compiled_away(in_place):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    make = functools.partial(small, max_position_embeddings=8, rope_parameters=rope)
    expected = plain(make(), PROMPTS[:1], max_new_tokens=12)
    target, backend = compiled(make())
    if in_place:
        target, backend = make(), Counting()
        target.compile(backend=backend, dynamic=True)
    for _ in range(2):
        out = run(target, make(), PROMPTS[:1], max_new_tokens=12, num_assistant_tokens=3)
        assert outputs(out, PROMPTS[:1]) == expected and sum(out.stats.accepted) > 0
    assert backend.runs > 0


@pytest.mark.slow
def test_adapters_of_a_compiled_model():
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(3)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, target_modules=["q_proj"])
        return peft.get_peft_model(model, config).double().eval()

    expected = plain(adapted(small()), PROMPTS[:1], max_new_tokens=6)
    target, backend = compiled(adapted(small()))
    assert without_wrapper(target) is target._orig_mod.get_base_model()
    out = run(target, small(), PROMPTS[:1], **SETTINGS)
    assert outputs(out, PROMPTS[:1]) == expected and backend.runs >= out.stats.target_forwards
