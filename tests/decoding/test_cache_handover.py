"""Caches that come from the caller and go back: continued conversations."""

import copy
import functools

import pytest
import torch
from support.decoding import Widths, noisy, outputs, plain, random_prompts
from support.models import V, build
from transformers import DynamicCache, StaticCache

from cactus_kernels import custom_generate, speculative_generate
from cactus_kernels.decoding.cache.handover import CACHE_NAME

FAMILIES = [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma3", "sdpa"), ("gemma2", "eager"), ("gpt2", "sdpa")]
FAMILIES += [("gemma3", "flex_attention")]
PROMPTS = random_prompts((5, 13), V)
MORE = torch.tensor(random_prompts((6, 6), V, seed=1))


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def ours(target, ids, mask, draft=None, **kwargs):
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True} | kwargs
    draft = noisy(target, 0.1) if draft is None else draft
    return speculative_generate(target, ids, attention_mask=mask, assistant_model=draft, **settings)


def through_generate(target, ids, mask, draft=None, **kwargs):
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True} | kwargs
    loop = functools.partial(custom_generate, assistant_model=noisy(target, 0.1) if draft is None else draft)
    return target.generate(ids, attention_mask=mask, custom_generate=loop, **settings)


def theirs(target, ids, mask, **kwargs):
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True} | kwargs
    return target.generate(ids, attention_mask=mask, **settings)


def continued(out, mask):
    """The texts of a first turn with more tokens after them."""
    ids = torch.cat([out.sequences, MORE[: len(mask)]], 1)
    return ids, torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


TURNS = {
    "ours": (ours, ours),
    "in": (theirs, ours),
    "out": (ours, theirs),
    "through generate": (through_generate, through_generate),
}
CONVERSATIONS = [
    pytest.param(
        *(*model, *TURNS[turns]),
        id="-".join((*model, turns)),
        # Dear, and what a cache holds does not depend on the attention.
        marks=[pytest.mark.slow] if "flex" in model[1] and turns != "ours" else [],
    )
    for model in FAMILIES
    for turns in TURNS
]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family, attention, first, second", CONVERSATIONS)
def test_a_conversation_goes_on_from_its_cache(family, attention, first, second):
    """Also with plain `generate` before or after."""
    # Scores of attention are capped in Gemma 2, and in fp64 transformers' own left-padded eager batch is NaN.
    dtype = torch.float32 if attention == "eager" else torch.float64
    target = build(family, attention, dtype)
    ids, mask = padded(PROMPTS)
    one = first(target, ids, mask)
    cache = one[CACHE_NAME]
    assert cache.get_seq_length() == one.sequences.shape[1] - 1
    ids, mask = continued(one, mask)
    expected = plain(target, [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)], max_new_tokens=12)
    draft, seen = noisy(target, 0.1), Widths(target)
    settings = {} if second is theirs else {"draft": draft}
    two = second(target, ids, mask, **settings, **{CACHE_NAME: cache})
    assert two.sequences[:, ids.shape[1] :].tolist() == expected
    drafts = 0 if second is theirs else 5
    assert seen.calls[0][0] == 1 + MORE.shape[1] + drafts
    assert two[CACHE_NAME] is cache and cache.get_seq_length() == two.sequences.shape[1] - 1


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family, attention", FAMILIES)
def test_the_cache_that_comes_back_is_that_of_generate(family, attention):
    target = build(family, attention, torch.float32)
    ids, mask = padded(PROMPTS)
    got, expected = (f(target, ids, mask)[CACHE_NAME] for f in (ours, theirs))
    assert len(got.layers) == len(expected.layers)
    for layer, other in zip(got.layers, expected.layers, strict=True):
        assert type(layer) is type(other) and layer.get_seq_length() == other.get_seq_length()
        for name in ("keys", "values"):
            mine, its = getattr(layer, name), getattr(other, name)
            assert mine.shape == its.shape
            real = mask.new_ones(2, got.get_seq_length())
            real[:, : mask.shape[1]] = mask
            real = real[:, -mine.shape[2] :].bool()
            torch.testing.assert_close(mine.transpose(1, 2)[real], its.transpose(1, 2)[real], rtol=0, atol=1e-4)


def test_the_cache_ends_where_the_shortest_row_does():
    target = build("llama")
    ids, mask = padded(PROMPTS)
    free = theirs(target, ids, mask).sequences[:, ids.shape[1] :]
    eos = next(t for t in free[0, 2:].tolist() if t not in free[1].tolist())
    out = ours(target, ids, mask, eos_token_id=eos)
    short = min(out.stats.tokens)
    assert short < max(out.stats.tokens)
    assert out[CACHE_NAME].get_seq_length() == ids.shape[1] + short - 1
    out[CACHE_NAME].batch_select_indices(torch.tensor([1]))
    more, more_mask = (x[1:] for x in continued(out, mask))
    got = ours(target, more, more_mask, **{CACHE_NAME: out[CACHE_NAME]})
    assert outputs(got, [more[0].tolist()]) == plain(target, [more[0][more_mask[0].bool()].tolist()], max_new_tokens=12)


def test_an_empty_cache_is_filled():
    target = build("gemma3")
    ids, mask = padded(PROMPTS)
    cache = DynamicCache(config=target.config)
    sequences = ours(target, ids, mask, return_dict_in_generate=False, **{CACHE_NAME: cache})
    assert torch.equal(sequences, ours(target, ids, mask).sequences)
    assert cache.get_seq_length() == sequences.shape[1] - 1


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("chunk, attention", [(1, "sdpa"), (3, "sdpa"), (100, "sdpa"), (3, "flex_attention")])
def test_prompts_in_chunks(chunk, attention):
    target = build("gemma3", attention)
    ids, mask = padded(PROMPTS)
    expected = ours(target, ids, mask).sequences
    seen = Widths(target)
    assert torch.equal(ours(target, ids, mask, prefill_chunk_size=chunk).sequences, expected)
    assert max(width for width, _ in seen.calls) == min(chunk, ids.shape[1] + 5)


def cached(**kwargs):
    target = build("llama")
    ids, mask = padded(PROMPTS)
    return ours(target, ids, mask, **kwargs)[CACHE_NAME]


def with_static_layers():
    cache, model = cached(), build("llama")
    cache.layers = StaticCache(config=model.config, max_cache_len=40).layers
    return cache


REFUSED = {
    "static": (
        lambda: StaticCache(config=build("llama").config, max_cache_len=40),
        "must be a DynamicCache, got Static",
    ),
    "tuple": (lambda: ((torch.zeros(1),),), "must be a DynamicCache, got tuple"),
    "static layers": (with_static_layers, r"not a plain DynamicCache \(StaticLayer\): make it with"),
    "whole text": (cached, "the cache holds 24 tokens and input_ids 13: input_ids must hold the whole text"),
    "rows": (lambda: halved(cached(max_new_tokens=1)), "the cache has 1 rows for 2 rows of the batch"),
}


def halved(cache):
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(-1 if cache.get_seq_length() else 0)
    return cache


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_caches_that_are_refused(make, message):
    target = build("llama")
    ids, mask = padded(PROMPTS)
    cache = make()
    before = copy.deepcopy(cache)
    with pytest.raises((TypeError, ValueError), match=message):
        ours(target, ids, mask, **{CACHE_NAME: cache})
    assert type(cache) is type(before)
    if isinstance(cache, DynamicCache):
        assert cache.get_seq_length() == before.get_seq_length()


def test_an_offloaded_cache_is_refused():
    target = build("llama")
    ids, mask = padded(PROMPTS)
    cache = cached()
    cache.offloading = True
    with pytest.raises(ValueError, match=r"not a plain DynamicCache \(offloaded\)"):
        ours(target, ids, mask, **{CACHE_NAME: cache})
