"""Texts past the positions that a model was made for: a table of them ends, the others go on as `generate` does."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from packaging.version import Version
from support.decoding import noisy, outputs, plain, random_prompts, run
from support.models import build
from transformers.generation import stopping_criteria

from cactus_kernels import skip_layers, speculative_generate
from cactus_kernels.decoding.cache.support import table_positions

LIMIT = 16
PROMPTS = random_prompts((3, 9, 14, 21), 61)
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.5, 3.0, 4.0]}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    "llama3": {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 10, **FACTORS},
}  # fmt: skip
PHI3 = {"original_max_position_embeddings": 10, "sliding_window": None}


def roped(family, kind, **changes):
    rope = {"rope_theta": 100.0, **ROPES[kind]}
    return build(family, max_position_embeddings=LIMIT, rope_parameters=rope, **changes)


KINDS = {
    **{f"llama, {kind}": ("llama", kind, {}) for kind in ROPES},
    "qwen3, yarn": ("qwen3", "yarn", {}),
    "phi3, longrope": ("phi3", "longrope", PHI3),
}


def fresh(model):
    """Frequencies as they are before any text: transformers keeps those of the longest one so far."""
    rotary = model.model.rotary_emb
    rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq.clone(), LIMIT
    return model


@torch.no_grad()
def read_anew(model, prompts, new_tokens):
    """The greedy tokens of each prompt with the whole text read for every one of them."""
    texts = [list(prompt) for prompt in prompts]
    for text in texts:
        for _ in range(new_tokens):
            text.append(int(fresh(model)(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return [text[-new_tokens:] for text in texts]


@pytest.mark.parametrize(("family", "kind", "changes"), KINDS.values(), ids=KINDS)
def test_rotary_positions_go_on_past_the_configured_length(family, kind, changes):
    """Ragged rows that come past it early, late, or at once; the tokens are those of each row's plain `generate`."""
    target = roped(family, kind, **changes)
    expected = [plain(fresh(target), [p], max_new_tokens=14)[0] for p in PROMPTS]
    if family == "phi3":
        # Older releases mix short and long frequencies where they should read anew.
        assert expected == read_anew(target, PROMPTS, 14) or Version(transformers.__version__) < Version("5.24")
        expected = read_anew(target, PROMPTS, 14)
    for draft, lookup in ((noisy(target, 0.1), {}), (None, {"prompt_lookup_num_tokens": 3})):
        out = run(fresh(target), draft, PROMPTS, max_new_tokens=14, **lookup)
        assert outputs(out, PROMPTS) == expected
    for row, prompt in enumerate(PROMPTS):
        out = run(fresh(target), noisy(target, 0.05), [prompt], max_new_tokens=14)
        assert outputs(out, [prompt]) == [expected[row]]
        assert sum(out.stats.accepted) > 0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_these_frequencies_matter(kind):
    """Else the tokens above would be the same without."""
    long = random_prompts((30,), 61)
    assert plain(fresh(roped("llama", kind)), long, max_new_tokens=9) != plain(
        roped("llama", "default"), long, max_new_tokens=9
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_callers_model_is_left_as_it_was(kind):
    target = fresh(roped("llama", kind))
    rotary = target.model.rotary_emb
    before = rotary.inv_freq.clone(), rotary.max_seq_len_cached
    run(target, skip_layers(target, [1]), PROMPTS, max_new_tokens=14)
    assert torch.equal(rotary.inv_freq, before[0]) and rotary.max_seq_len_cached == before[1]
    assert not rotary._forward_hooks


def test_the_warning_is_that_of_generate(monkeypatch):
    said = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", said.append)
    target = build("llama", max_position_embeddings=LIMIT)
    for new_tokens, warns in ((LIMIT - 9, False), (LIMIT - 8, False), (LIMIT - 7, True)):
        del said[:]
        plain(target, PROMPTS[1:2], max_new_tokens=new_tokens)
        theirs = set(said)
        del said[:]
        run(target, target, PROMPTS[1:2], max_new_tokens=new_tokens)
        assert set(said) == theirs and bool(theirs) == warns


SMALL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": LIMIT}
NARROW = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": LIMIT}
TABLES = {
    "GPT2": NARROW, "OPT": WIDE | {"ffn_dim": 48, "word_embed_proj_dim": 32}, "GPTJ": NARROW | {"rotary_dim": 8},
    "CodeGen": NARROW | {"rotary_dim": 8}, "CTRL": NARROW | {"dff": 48}, "BioGpt": WIDE | {"intermediate_size": 48},
    "GPTBigCode": NARROW, "OpenAIGPT": NARROW,
}  # fmt: skip
COMPUTED = {
    "GPTNeoX": WIDE | {"intermediate_size": 48}, "Llama": WIDE | {"intermediate_size": 48}, "Bloom": NARROW,
    "XGLM": {"d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": LIMIT},
    "Falcon": WIDE, "Mistral": WIDE | {"num_key_value_heads": 2},
}  # fmt: skip


def small(kind, settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings, **SMALL)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", [*TABLES, *COMPUTED])
def test_a_table_of_positions_is_what_plain_generate_cannot_go_past(kind):
    model = small(kind, {**TABLES, **COMPUTED}[kind])
    prompt = torch.tensor([PROMPTS[1]])
    assert table_positions(model) == (LIMIT if kind in TABLES else None)
    settings = {"eos_token_id": None, "do_sample": False}
    assert model.generate(prompt, max_new_tokens=LIMIT - 8, **settings).shape == (1, LIMIT + 1)
    if kind in TABLES:
        with pytest.raises((IndexError, RuntimeError)):  # of torch, in the forward pass
            model.generate(prompt, max_new_tokens=LIMIT - 7, **settings)
    else:
        model.generate(prompt, max_new_tokens=LIMIT, **settings)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_target_with_a_table_ends_with_it(family):
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    target, prompts = build(family, **{name: LIMIT}), PROMPTS[:2]
    out = run(target, noisy(target, 0.1), prompts, max_new_tokens=LIMIT - 8)
    assert outputs(out, prompts) == plain(target, prompts, max_new_tokens=LIMIT - 8)
    kind = type(target).__name__
    with pytest.raises(
        ValueError,
        match=rf"max_length is 18, but the target, {kind}, has a table of 16 positions, for texts of 17 tokens",
    ):
        run(target, build("llama"), prompts, max_new_tokens=LIMIT - 7)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_with_a_table_stops_drafting_at_its_end(family, do_sample):
    """The target goes on alone; a row's prompt may lie past the draft's table from the beginning."""
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    target = build(family)
    draft = build(family, **{name: LIMIT})
    draft.load_state_dict({k: v[: LIMIT + (family == "opt") * 2] if "pos" in k or "wpe" in k else v
                           for k, v in target.state_dict().items()})  # fmt: skip
    settings = {"max_new_tokens": 12, "num_assistant_tokens": 3}
    for some in (PROMPTS, PROMPTS[3:], PROMPTS[1:2]):
        if do_sample:
            out = run(target, draft, some, do_sample=True, rule="sps", seed=1, **settings)
        else:
            out = run(target, draft, some, **settings)
            assert outputs(out, some) == plain(target, some, max_new_tokens=12)
        # Up to there it is the target, and drafts of the last round are as many as positions are left.
        assert out.stats.accepted == out.stats.drafted and out.stats.tokens == [12] * len(some)
        for prompt, drafted in zip(some, out.stats.drafted, strict=True):
            assert (drafted > 0) == (len(prompt) <= LIMIT)
            assert drafted <= max(LIMIT + 1 - len(prompt), 0)


def test_a_longer_prompt_is_the_targets_affair():
    target = build("gpt2", n_positions=LIMIT)
    with pytest.raises(
        ValueError, match="max_length is 23, but the target, GPT2LMHeadModel, has a table of 16 positions"
    ):
        speculative_generate(target, torch.tensor(PROMPTS[3:]), assistant_model=build("llama"), max_new_tokens=2)
