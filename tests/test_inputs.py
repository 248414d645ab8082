"""Bad input: an error before any work, which names what came and says what to do."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import torch
from support.models import TableModel, build, table_pair
from support.refused import SMALL_MAMBA, SMALL_NEXT, SMALL_T5, model_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from cactus_kernels import Cactus, VerifyOutput, draw, speculative_generate, verify

V = 8
IDS = torch.tensor([[3, 4], [5, 6]])
nan, inf = float("nan"), float("inf")


def table(size):
    return TableModel(torch.zeros(size, size))


def tokenizer(words):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    )


# -- speculative_generate: what is passed beside two table models and two rows -> the error and what it says

REFUSED = {
    # the rule
    "rule": ({"rule": "cacti"}, ValueError, "unknown rule 'cacti': use one of 'block', 'sps', 'cactus'"),
    "rule type": ({"rule": 0.5}, TypeError, "rule must be a Rule or its name, got float"),
    "rule class": ({"rule": Cactus}, TypeError, "rule must be a Rule or its name, got type"),
    "strengths": ({"rule": Cactus(torch.ones(3))}, ValueError, "3 strengths for 2 rows: give one a row, or a number"),
    "negative strength": ({"rule": Cactus(torch.tensor([1.0, -1.0]))}, ValueError, r"finite and at least 0, got \[1.0, -1.0\]"),
    "NaN strength": ({"rule": Cactus(torch.tensor([nan, 1.0]))}, ValueError, "finite and at least 0, got .nan, 1.0"),
    "infinite strength": ({"rule": Cactus(torch.tensor([inf, 1.0]))}, ValueError, "finite and at least 0, got .inf, 1.0"),
    "strengths elsewhere": (
        {"rule": Cactus(torch.ones(2, device="meta"))}, ValueError, "strengths are on meta and the model on cpu: move them"
    ),
    # the number of drafts
    "no drafts": ({"num_assistant_tokens": 0}, ValueError, r"num_assistant_tokens must be in 1 \.\. 64, got 0"),
    "negative": ({"num_assistant_tokens": -1}, ValueError, r"num_assistant_tokens must be in 1 \.\. 64, got -1"),
    "many drafts": ({"num_assistant_tokens": 65}, ValueError, r"num_assistant_tokens must be in 1 \.\. 64, got 65"),
    "fraction": ({"num_assistant_tokens": 2.5}, TypeError, "num_assistant_tokens must be an int, got 2.5"),
    "truth": ({"num_assistant_tokens": True}, TypeError, "num_assistant_tokens must be an int, got True"),
    "string": ({"num_assistant_tokens": "5"}, TypeError, "num_assistant_tokens must be an int, got '5'"),
    "in a config": (
        {"generation_config": GenerationConfig(num_assistant_tokens=65)}, ValueError, r"must be in 1 \.\. 64, got 65"
    ),
    # the pair
    "no draft": ({"assistant_model": None}, ValueError, "assistant_model is None: pass the draft model"),
    "a name": ({"assistant_model": "gpt2"}, TypeError, "assistant_model must be a transformers causal LM, got str"),
    "another size": ({"assistant_model": table(V + 1025)}, ValueError, "target has 8 tokens and the draft 1033: they must"),
    "encoder-decoder": (
        {"assistant_model": model_of("T5ForConditionalGeneration", **SMALL_T5)},
        ValueError,
        "T5ForConditionalGeneration is not a decoder-only causal LM: load the model with AutoModelForCausalLM",
    ),
    "recurrent": (
        {"assistant_model": model_of("MambaForCausalLM", **SMALL_MAMBA)},
        ValueError,
        "MambaForCausalLM has recurrent, hybrid .* use a model whose layers are all",
    ),
    "hybrid": (
        {"assistant_model": model_of("Qwen3NextForCausalLM", **SMALL_NEXT)},
        ValueError,
        "Qwen3NextForCausalLM has recurrent, hybrid .* use a model whose layers are all",
    ),
    "another tokenizer": (
        {"tokenizer": tokenizer("abcdefgh"), "assistant_tokenizer": tokenizer("abcdefhg")},
        ValueError,
        "another tokenizer: 2 tokens differ, among them 'g' with id 6 in the target's and 7 in the draft's: use a draft",
    ),
    "a larger tokenizer": (
        {"tokenizer": tokenizer("abcdefgh"), "assistant_tokenizer": tokenizer("abcdefg")},
        ValueError,
        "another tokenizer: 1 tokens differ, among them 'h' with id 7 in the target's and None in the draft's",
    ),
    "stop strings": ({"stop_strings": ["a"]}, ValueError, "stop_strings need the tokenizer: pass tokenizer="),
    # the prompts
    "a list": ({"input_ids": [[3, 4]]}, TypeError, r"input_ids must be an int64 tensor \[B, P\], got list"),
    "nothing": ({"input_ids": None}, TypeError, r"input_ids must be an int64 tensor \[B, P\], got NoneType"),
    "one dimension": ({"input_ids": IDS[0]}, ValueError, r"must have shape \[B, P\], got \(2,\)"),
    "empty rows": ({"input_ids": IDS[:, :0]}, ValueError, r"input_ids are empty, shape \(2, 0\): give at least one token"),
    "no rows": ({"input_ids": IDS[:0]}, ValueError, r"input_ids are empty, shape \(0, 2\)"),
    "floats": ({"input_ids": IDS.float()}, TypeError, "input_ids must be int64, got torch.float32"),
    "id too high": ({"input_ids": IDS + 2}, ValueError, r"input_ids must be in 0 \.\. 7, got 8: another tokenizer"),
    "id too low": ({"input_ids": IDS - 4}, ValueError, r"input_ids must be in 0 \.\. 7, got -1"),
    # the mask
    "left padding": ({"pad_token_id": 5}, ValueError, "rows begin or end with the padding id 5: pass attention_mask"),
    "right padding": ({"pad_token_id": 6}, ValueError, "rows begin or end with the padding id 6: pass attention_mask"),
    "padding inside": (
        {"pad_token_id": 0, "input_ids": torch.tensor([[3, 0, 4]])},
        ValueError,
        "the padding id 0 stands inside or at the end of a row: pass attention_mask",
    ),
    "padding only": ({"pad_token_id": 0, "input_ids": torch.tensor([[0]])}, ValueError, "padding id 0 .* pass attention_mask"),
    "mask shape": (
        {"attention_mask": torch.ones(2, 3)},
        ValueError,
        r"attention_mask must have the shape of input_ids, \(2, 2\), got \(2, 3\)",
    ),
    "mask dimensions": ({"attention_mask": torch.ones(2, 1, 2, 2)}, ValueError, r"got \(2, 1, 2, 2\)"),
    "mask type": ({"attention_mask": [[1, 1], [1, 1]]}, ValueError, "attention_mask must have the shape .* got list"),
    "mask values": ({"attention_mask": torch.tensor([[0, 1], [2, 1]])}, ValueError, "attention_mask must hold 0 and 1"),
    "right-padded mask": (
        {"attention_mask": torch.tensor([[1, 1], [1, 0]])},
        ValueError,
        "padding at the right of a row or inside it: use tokenizer.padding_side='left'",
    ),
    "mask with a hole": (
        {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.tensor([[1, 0, 1]])},
        ValueError,
        "padding at the right of a row or inside it",
    ),
    "masked row": ({"attention_mask": torch.tensor([[1, 1], [0, 0]])}, ValueError, "padding at the right"),
    # the seed
    "seeds": ({"seed": [1, 2, 3]}, ValueError, "seed has 3 entries for 2 rows: give one a row, or an int"),
    "one seed": ({"seed": [1]}, ValueError, "seed has 1 entries for 2 rows"),
    "fractional seed": ({"seed": 1.5}, TypeError, "seed must be an int, a list of ints or None, got float"),
    "true seed": ({"seed": True}, TypeError, "seed must be an int, a list of ints or None, got bool"),
    "string seed": ({"seed": "1"}, TypeError, "seed must be an int, a list of ints or None, got str"),
    "seeds of floats": ({"seed": [1.0, 2.0]}, TypeError, "seed must hold ints, got"),
    "seed tensor of floats": ({"seed": torch.tensor([1.0, 2.0])}, TypeError, "seed must hold ints, got"),
    "seed matrix": ({"seed": torch.tensor([[1, 2]])}, TypeError, "seed must hold ints, got"),
    "seed scalar": ({"seed": torch.tensor(1)}, TypeError, "seed must hold ints, got"),
    "large seed": ({"seed": 2**63}, ValueError, "a seed must fit in 64 bits, got 9223372036854775808"),
    "large seeds": ({"seed": [0, -(2**63) - 1]}, ValueError, "a seed must fit in 64 bits"),
    # what `generate` offers and this does not
    "num_beams": ({"num_beams": 2}, ValueError, "num_beams=2: beam search does not sample: use num_beams=1"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, ValueError, "penalty_alpha=0.6: contrastive search does not"),
    "dola_layers": ({"dola_layers": "high"}, ValueError, "dola_layers='high'"),
    "two drafters": (
        {"prompt_lookup_num_tokens": 3}, ValueError, "prompt_lookup_num_tokens and assistant_model are both given: leave one"
    ),
    "lookup and a number": (
        {"prompt_lookup_num_tokens": 3, "assistant_model": None, "num_assistant_tokens": 5},
        ValueError,
        "prompt_lookup_num_tokens and num_assistant_tokens are both given: leave the latter out",
    ),
    "long lookup": (
        {"prompt_lookup_num_tokens": 65, "assistant_model": None}, ValueError, r"tokens must be in 1 \.\. 64, got 65"
    ),
    "n-gram": (
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1, "assistant_model": None},
        ValueError,
        "max_matching_ngram_size must be at least 1, got -1",
    ),
    "drafts of rows": ({"num_assistant_tokens": [1]}, ValueError, "num_assistant_tokens has 1 entries for 2 rows: give one"),
    "drafts of a row": ({"num_assistant_tokens": [1, 65]}, ValueError, r"num_assistant_tokens must be in 0 \.\. 64, got 65"),
    "guidance_scale": ({"guidance_scale": 1.5}, ValueError, "guidance_scale=1.5: .* leave it out"),
    "use_cache": ({"use_cache": False}, ValueError, "use_cache=False: speculative decoding needs the cache"),
    "quantized": ({"cache_implementation": "quantized"}, ValueError, "cache_implementation='quantized'.*leave it out"),
    "offloaded": ({"cache_implementation": "offloaded"}, ValueError, "cache_implementation='offloaded'"),
    "inputs_embeds": ({"inputs_embeds": torch.zeros(2, 2, 4)}, ValueError, "inputs_embeds is not taken"),
    "past_key_values": ({"past_key_values": object()}, TypeError, "must be a DynamicCache, got object"),
    "custom_generate": ({"custom_generate": "x/y"}, ValueError, "custom_generate is not taken"),
    "streamer": ({"streamer": object()}, ValueError, "a streamer takes one row, got 2: pass a list with one a row"),
    "streamers": ({"streamer": [object()]}, ValueError, "streamer has 1 entries for 2 rows: give one a row"),
    "synced_gpus": ({"synced_gpus": True}, ValueError, "synced_gpus=True is not offered"),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be 'triton', 'torch' or None, got 'cuda'"),
    "padding to end with": (
        {"max_time": 1.0}, ValueError, "rows that end at different lengths need padding: pass pad_token_id"
    ),
    "prompt too long": ({"max_length": 2, "max_new_tokens": None}, ValueError, "input_ids is 2, but `max_length` is set to 2"),
    "no new tokens": ({"max_new_tokens": 0}, ValueError, "`max_new_tokens` must be greater than 0, but is 0"),
    "temperature": (
        {"temperature": -1.0, "do_sample": True, "rule": "sps"},
        ValueError,
        "`temperature` .=-1.0. has to be a strictly positive",
    ),
    "typo": ({"max_new_token": 3}, ValueError, r"not used by the model: \['max_new_token'\]"),
    "typos": ({"temprature": 1.0, "do_sampel": True}, ValueError, "temprature.*do_sampel"),
    "a name of the loop's": ({"request": 1}, ValueError, r"not used by the model: \['request'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_speculative_generate_refuses_before_any_work(given, error, says):
    target, draft = table_pair(V)
    with pytest.raises(error, match=says):
        speculative_generate(target, **{"input_ids": IDS, "assistant_model": draft, "max_new_tokens": 4} | given)
    assert target.calls == draft.calls == 0


@pytest.mark.parametrize("delta", [-1e-9, -1, nan, inf, -inf, 1e39])
def test_a_strength_must_be_finite_and_not_negative(delta):
    with pytest.raises(ValueError, match=re.escape(f"delta must be finite and at least 0 (0 is SpS), got {delta}")):
        Cactus(delta)


@pytest.mark.parametrize(
    ("delta", "error", "says"),
    [
        ("1", TypeError, "got str"),
        (True, TypeError, "got bool"),
        (None, TypeError, "got NoneType"),
        (torch.ones(2, dtype=torch.int64), TypeError, "float tensor .* torch.int64"),
        (torch.tensor(1.0), ValueError, r"shape \[B\], one strength a request, got \(\)"),
        (torch.ones(2, 2), ValueError, r"got \(2, 2\)"),
    ],
    ids=str,
)
def test_a_strength_is_a_number_or_one_for_each_request(delta, error, says):
    with pytest.raises(error, match=says):
        Cactus(delta)


@pytest.mark.parametrize("name", ["num_beams", "penalty_alpha", "stop_strings"])
@pytest.mark.parametrize("where", ["generation_config", "model"])
def test_settings_are_refused_wherever_they_stand(name, where):
    target, draft = table_pair(V)
    value = {"num_beams": 3, "penalty_alpha": 0.6, "stop_strings": ["a"]}[name]
    config = type(target.generation_config)(**{name: value})
    given = {"generation_config": config}
    if where == "model":
        target.generation_config, given = config, {}
    with pytest.raises(ValueError, match=name):
        speculative_generate(target, IDS, assistant_model=draft, **given)
    assert target.calls == draft.calls == 0


def test_more_tokens_than_positions():
    """The length that counts is that of the longest row without its padding. Of a draft it is no error (test_positions.py)."""
    target, draft = build("gpt2", dtype=torch.float32), build("llama", dtype=torch.float32)
    ids = torch.full((2, 250), 3)
    mask = torch.ones_like(ids)
    mask[:, :10] = 0
    counts = [0, 0]
    for i, model in enumerate((target, draft)):
        model.register_forward_pre_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    settings = {"assistant_model": draft, "attention_mask": mask}
    with pytest.raises(
        ValueError,
        match=r"max_length is 258, but the target, GPT2LMHeadModel, has a table of 256 positions, .* use a shorter",
    ):
        speculative_generate(target, ids, max_new_tokens=18, **settings)
    assert counts == [0, 0]
    assert speculative_generate(target, ids, max_new_tokens=17, **settings).shape == (2, 267)


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("T5ForConditionalGeneration", SMALL_T5, "T5ForConditionalGeneration is not a decoder-only causal LM"),
        ("MambaForCausalLM", SMALL_MAMBA, "MambaForCausalLM has recurrent, hybrid"),
        ("Qwen3NextForCausalLM", SMALL_NEXT, "Qwen3NextForCausalLM has recurrent, hybrid"),
    ],
)
def test_targets_that_cannot_roll_back(name, kwargs, says):
    """transformers #49036."""
    with pytest.raises(ValueError, match=says):
        speculative_generate(model_of(name, **kwargs), IDS, assistant_model=table(V))


def test_a_target_that_is_no_model():
    with pytest.raises(TypeError, match="model must be a transformers causal LM, got str"):
        speculative_generate("gpt2", IDS, assistant_model=table(V))


def test_one_tokenizer_padded_to_two_sizes_is_accepted():
    tokens = tokenizer("abcdefgh"), tokenizer("abcdefgh")
    for given in ({"tokenizer": tokens[0], "assistant_tokenizer": tokens[1]}, {"tokenizer": tokens[0]}, {}):
        assert speculative_generate(table(V), IDS, assistant_model=table(V + 1024), **given).shape == (2, 22)
    # Where both are compared id by id, the padding may be any.
    given = {"tokenizer": tokens[0], "assistant_tokenizer": tokens[1]}
    assert speculative_generate(table(V), IDS, assistant_model=table(V + 2000), **given).shape == (2, 22)


@pytest.mark.parametrize(
    ("ids", "given"),
    [
        ([[5, 3], [5, 4]], {"pad_token_id": 5, "eos_token_id": 5}),  # one id for padding, beginning and end
        ([[3, 5, 4]], {"pad_token_id": 5, "eos_token_id": [2, 5]}),  # an EOS within a text
        ([[3, 4, 5]], {"pad_token_id": 5, "eos_token_id": 5}),  # and at its end
        ([[5, 3, 4]], {"pad_token_id": 5}),  # `generate` takes it for padding, and so does this
    ],
    ids=["beginning", "inside", "end", "padding"],
)
def test_padding_ids_that_mean_no_harm(ids, given):
    target, draft = table_pair(V)
    got = speculative_generate(target, torch.tensor(ids), assistant_model=draft, max_new_tokens=5, **given)
    assert torch.equal(got, target.generate(torch.tensor(ids), max_new_tokens=5, **given))


def test_the_triton_backend_where_there_is_none():
    """In a process of its own, since TRITON_INTERPRET is read when triton is imported."""
    script = """
import torch
from support.models import table_pair
from cactus_kernels import speculative_generate, verify
target, draft = table_pair(8)
for call in (
    lambda: speculative_generate(target, torch.tensor([[3]]), assistant_model=draft, do_sample=True, backend="triton"),
    lambda: speculative_generate(target, torch.tensor([[3]]), assistant_model=draft, backend="triton"),
    lambda: verify(torch.ones(1, 1, 2) / 2, None, torch.zeros(1, 0, dtype=torch.int64), "sps", seed=0, offset=0,
                   backend="triton"),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
print(target.calls + draft.calls)
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=os.path.dirname(__file__), env=env, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and lines[-1] == "0", done.stderr
    assert all(
        "set TRITON_INTERPRET=1" in line or "triton is not installed: install it, or pass backend='torch'" in line
        for line in lines[:3]
    )


# -- verify and draw

B, M = 2, 3


def padded(**changes):
    """Arguments of `verify` for two requests of three drafts each; flat ones with `flat=True`."""
    arguments = {
        "target_probs": torch.full((B, M + 1, V), 1 / V),
        "draft_probs": torch.full((B, M, V), 1 / V),
        "draft_token_ids": torch.zeros(B, M, dtype=torch.int64),
        "rule": "sps",
        "seed": 1,
        "offset": 0,
    }
    return arguments | changes


def flat(**changes):
    arguments = {
        "target_probs": torch.full((4 + B, V), 1 / V),
        "draft_probs": torch.full((4, V), 1 / V),
        "draft_token_ids": torch.zeros(4, dtype=torch.int32),
        "cu_draft_tokens": torch.tensor([0, 3, 4], dtype=torch.int32),
        "max_draft_tokens": 3,
    }
    return padded(**arguments | changes)


def out_of(**changes):
    tensors = {
        "token_ids": torch.zeros(B, M + 1, dtype=torch.int64),
        "num_accepted": torch.zeros(B, dtype=torch.int32),
        "valid": torch.zeros(B, dtype=torch.bool),
    }
    return VerifyOutput(**tensors | changes)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


BAD_CALLS = {
    "list": (padded(target_probs=[[[1.0]]]), TypeError, "target_probs must be a tensor, got list"),
    "fp64 target": (
        padded(target_probs=torch.full((B, M + 1, V), 1 / V, dtype=torch.float64)),
        TypeError,
        "target_probs must be float32 or bfloat16 or float16, got float64: cast it first",
    ),
    "fp64 draft": (
        padded(draft_probs=torch.full((B, M, V), 1 / V, dtype=torch.float64)), TypeError, "draft_probs must .* float64"
    ),
    "int rows": (padded(draft_probs=torch.ones(B, M, V, dtype=torch.int64)), TypeError, "draft_probs must .* int64"),
    "float ids": (padded(draft_token_ids=torch.zeros(B, M)), TypeError, "draft_token_ids must be int32 or int64, got float32"),
    "int16 ids": (padded(draft_token_ids=torch.zeros(B, M, dtype=torch.int16)), TypeError, "int32 or int64, got int16"),
    "target rows": (
        padded(target_probs=torch.ones(B, M, V)),
        ValueError,
        r"target_probs must have shape \[2, 4, V\] beside draft_token_ids of shape \(2, 3\), got \(2, 3, 8\)",
    ),
    "draft rows": (padded(draft_probs=torch.ones(B, M + 1, V)), ValueError, r"draft_probs must have shape \[2, 3, V\]"),
    "requests": (padded(draft_probs=torch.ones(B + 1, M, V)), ValueError, r"draft_probs must have shape \[2, 3, V\]"),
    "flat rows without prefix sums": (
        padded(target_probs=torch.ones(6, V)), ValueError, r"target_probs must have 3 dimensions, got shape \(6, 8\)"
    ),
    "one dimension": (padded(draft_token_ids=torch.zeros(B, dtype=torch.int64)), ValueError, "must have 2 dimensions"),
    "no vocabulary": (padded(target_probs=torch.ones(B, M + 1, 0)), ValueError, r"empty vocabulary: shape \(2, 4, 0\)"),
    "no draft vocabulary": (padded(draft_probs=torch.ones(B, M, 0)), ValueError, "draft_probs has an empty vocabulary"),
    "strides": (
        padded(target_probs=torch.ones(B, M + 1, 2 * V)[:, :, ::2]),
        ValueError,
        r"target_probs must be contiguous in its last dimension, got strides \(64, 16, 2\)",
    ),
    "draft strides": (padded(draft_probs=torch.ones(B, V, M).mT), ValueError, "draft_probs must be contiguous in its last"),
    "expanded vocabulary": (padded(target_probs=torch.ones(B, M + 1, 1).expand(-1, -1, V)), ValueError, "must be contiguous"),
    "65 drafts": (
        padded(
            target_probs=torch.ones(B, 66, V), draft_probs=None, draft_token_ids=torch.zeros(B, 65, dtype=torch.int64)
        ),
        ValueError,
        "at most 64 drafted tokens a request, got 65: verify them in shorter drafts",
    ),
    "max_draft_tokens": (padded(max_draft_tokens=4), ValueError, "max_draft_tokens is 4, but the padded .* have m = 3"),
    "rule": (padded(rule="specinfer"), ValueError, "unknown rule 'specinfer'"),
    "strengths": (padded(rule=Cactus(torch.ones(3))), ValueError, r"strength of cactus must have shape \(2,\), got \(3,\)"),
    "no such backend": (padded(backend="cuda"), ValueError, "backend must be 'triton', 'torch' or None, got 'cuda'"),
    # seed and offset
    "float seed": (padded(seed=1.0), TypeError, r"seed must be an int or an int64 tensor \[B\], got float"),
    "no seed": (padded(seed=None), TypeError, "seed must be an int or an int64 tensor .* got NoneType"),
    "list of seeds": (padded(seed=[1, 2]), TypeError, "seed must be an int or an int64 tensor .* got list"),
    "true": (padded(offset=True), TypeError, "offset must be an int or an int64 tensor .* got bool"),
    "int32 seeds": (padded(seed=torch.zeros(B, dtype=torch.int32)), TypeError, "seed must be int64, got int32"),
    "three seeds": (padded(seed=torch.zeros(3, dtype=torch.int64)), ValueError, r"seed must have shape \(2,\), got \(3,\)"),
    "scalar offset": (padded(offset=torch.tensor(0)), ValueError, r"offset must have 1 dimensions, got shape \(\)"),
    "large seed": (padded(seed=2**63), ValueError, "seed must fit in 64 bits, got 9223372036854775808"),
    "small offset": (padded(offset=-(2**63) - 1), ValueError, "offset must fit in 64 bits"),
    # flat
    "no max_draft_tokens": (flat(max_draft_tokens=None), TypeError, "needs max_draft_tokens, an int >= 0; got None"),
    "tensor max_draft_tokens": (flat(max_draft_tokens=torch.tensor(3)), TypeError, "needs max_draft_tokens, an int >= 0"),
    "negative max_draft_tokens": (flat(max_draft_tokens=-1), TypeError, "needs max_draft_tokens, an int >= 0; got -1"),
    "max_draft_tokens 65": (flat(max_draft_tokens=65), ValueError, "at most 64 drafted tokens a request, got 65"),
    "prefix sums": (flat(cu_draft_tokens=[0, 3, 4]), TypeError, "cu_draft_tokens must be a tensor, got list"),
    "float prefix sums": (flat(cu_draft_tokens=torch.tensor([0.0, 3, 4])), TypeError, "cu_draft_tokens must be int32 or"),
    "empty prefix sums": (flat(cu_draft_tokens=torch.zeros(0, dtype=torch.int32)), ValueError, r"must have shape \[B \+ 1\]"),
    "flat target rows": (flat(target_probs=torch.ones(4, V)), ValueError, r"target_probs must have shape \[6, V\]"),
    "flat draft rows": (flat(draft_probs=torch.ones(6, V)), ValueError, r"draft_probs must have shape \[4, V\]"),
    "padded rows with prefix sums": (flat(target_probs=torch.ones(B, 4, V)), ValueError, "must have 2 dimensions"),
    # devices
    "draft elsewhere": (
        padded(draft_probs=meta(B, M, V)), ValueError, "all tensors must be on the target's device cpu, got one on meta"
    ),
    "ids elsewhere": (padded(draft_token_ids=meta(B, M, dtype=torch.int64)), ValueError, "target's device cpu, got one on meta"),
    "target elsewhere": (padded(target_probs=meta(B, M + 1, V)), ValueError, "target's device meta, got one on cpu"),
    "seed elsewhere": (padded(seed=meta(B, dtype=torch.int64)), ValueError, "target's device cpu, got one on meta"),
    "offset elsewhere": (padded(offset=meta(B, dtype=torch.int64)), ValueError, "target's device cpu, got one on meta"),
    "strengths elsewhere": (padded(rule=Cactus(meta(B))), ValueError, "target's device cpu, got one on meta"),
    "prefix sums elsewhere": (flat(cu_draft_tokens=meta(3, dtype=torch.int32)), ValueError, "device cpu, got one on meta"),
    "output elsewhere": (padded(out=out_of(valid=meta(B, dtype=torch.bool))), ValueError, "device cpu, got one on meta"),
    # out
    "tuple": (padded(out=(1, 2, 3)), TypeError, "out must be a VerifyOutput, got tuple"),
    "output width": (
        padded(out=out_of(token_ids=torch.zeros(B, M, dtype=torch.int64))),
        ValueError,
        r"out.token_ids must have shape \(2, 4\), got \(2, 3\)",
    ),
    "output ids": (
        padded(out=out_of(token_ids=torch.zeros(B, M + 1, dtype=torch.int32))), TypeError, "out.token_ids must be int64"
    ),
    "output counts": (padded(out=out_of(num_accepted=torch.zeros(B))), TypeError, "out.num_accepted must be int32"),
    "output flags": (padded(out=out_of(valid=torch.zeros(1, dtype=torch.bool))), ValueError, r"out.valid must have shape \(2,\)"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "says"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_verify_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        verify(**arguments)


def test_what_verify_refuses_leaves_the_output_alone():
    out = out_of(token_ids=torch.full((B, M + 1), 77))
    with pytest.raises(TypeError, match="seed"):
        verify(**padded(out=out, seed=None))
    assert (out.token_ids == 77).all()


def test_seed_and_offset_must_be_given():
    """A default would use random words twice."""
    for name in ("seed", "offset"):
        arguments = padded()
        del arguments[name]
        with pytest.raises(TypeError, match=name):
            verify(**arguments)


@pytest.mark.parametrize(
    ("probs", "given", "error", "says"),
    [
        (torch.ones(2), {}, ValueError, "probs must have 2 dimensions"),
        (torch.ones(2, 3, dtype=torch.float64), {}, TypeError, "probs must be .* got float64: cast it first"),
        ([[1.0]], {}, TypeError, "probs must be a tensor, got list"),
        (torch.ones(2, 0), {}, ValueError, "empty vocabulary"),
        (torch.ones(2, 6)[:, ::2], {}, ValueError, "contiguous in its last dimension"),
        (torch.ones(2, 3), {"seed": torch.zeros(3, dtype=torch.int64)}, ValueError, r"seed must have shape \(2,\)"),
        (torch.ones(2, 3), {"offset": None}, TypeError, "offset must be an int or an int64 tensor"),
        (torch.ones(2, 3), {"backend": "numpy"}, ValueError, "backend must be 'triton', 'torch' or None, got 'numpy'"),
        (torch.ones(2, 3), {"out": out_of()}, ValueError, r"out.token_ids must have shape \(2, 1\)"),
    ],
    ids=["one dimension", "fp64", "list", "no vocabulary", "strides", "seeds", "offset", "backend", "out"],
)
def test_draw_refuses(probs, given, error, says):
    with pytest.raises(error, match=says):
        draw(probs, **{"seed": 1, "offset": 0} | given)


def test_invalid_requests_are_named():
    out = out_of(valid=torch.tensor([True, False]), num_accepted=torch.tensor([3, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"bad values in requests \[1\] at drafted positions \[2\]"):
        out.raise_if_invalid()
    out_of(valid=torch.ones(B, dtype=torch.bool)).raise_if_invalid()
