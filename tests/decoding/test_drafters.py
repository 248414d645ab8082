"""Where drafts come from: prompt lookup against a search written otherwise, and the target with layers skipped."""

from functools import cache

import numpy as np
import pytest
from support import exact

pytest.importorskip("transformers")

import torch
import transformers
from support.decoding import outputs, p_value, plain, random_prompts, rows_of, run, sampled
from support.models import MIXED, build, table_pair
from transformers import AutoModelForCausalLM

from cactus_kernels import Cactus, skip_layers
from cactus_kernels.decoding.batch import Batch
from cactus_kernels.decoding.drafters.drafts import CERTAIN
from cactus_kernels.decoding.drafters.prompt_lookup import PromptLookup


def looked_up(text, most, max_ngram_size):
    """The tokens that a row drafts by prompt lookup, from the definition; `text` and result are lists."""
    for n in range(max_ngram_size, 0, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        if ends:
            whole = [e for e in ends if e + most <= len(text)]
            start = max(whole) if whole else min(ends)
            return text[start : start + most]
    return []


def lookup_law(q, delta, prompt, length, most, max_ngram_size=2):
    """The law of the tokens that the loop emits, [V] * length, with drafts that are certain."""
    V = len(q)

    @cache
    def verified(last, n):
        return exact.emitted(np.eye(V)[n], q[last], delta)

    def law(text, left, drafts):
        if left == 0:
            return np.array(1.0)
        if drafts is None:
            drafts = looked_up(list(text), min(most, left - 1), max_ngram_size) if left > 1 else []
        if not drafts:
            return np.stack([q[text[-1], x] * law((*text, x), left - 1, None) for x in range(V)])
        chance = verified(text[-1], drafts[0])
        return np.stack(
            [chance[x] * law((*text, x), left - 1, drafts[1:] if x == drafts[0] else None) for x in range(V)]
        )

    return law(tuple(prompt), length, None)


PROMPT = (3, 1, 2, 4, 3, 1, 2, 2, 4, 3)  # ends in [4, 3], after which 1, 2, 2 came before


@pytest.mark.parametrize("delta", [0.0, 0.4])
def test_prompt_lookup_keeps_the_law_of_its_rule(delta):
    """transformers #32867: a draft that is certain has p = 1."""
    target, _ = table_pair(5)
    q = rows_of(target)
    law = lookup_law(q, delta, PROMPT, 3, 2)
    if delta == 0:
        np.testing.assert_allclose(law, q[3][:, None, None] * q[:, :, None] * q[None], atol=1e-12)
    settings = {"max_new_tokens": 3, "prompt_lookup_num_tokens": 2, "rule": Cactus(delta)}
    tokens = sampled(target, None, prompt=PROMPT, **settings)
    assert p_value(tokens, law) > exact.FALSE_ALARM
    if delta:
        assert p_value(tokens, lookup_law(q, 0, PROMPT, 3, 2)) < exact.FALSE_ALARM


@pytest.mark.parametrize("max_ngram_size", [1, 2, 3, 40])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_prompt_lookup_finds_what_a_plain_search_finds(most, max_ngram_size):
    """Ragged rows over few tokens, many matches; and rows that have ended or may draft less."""
    generator = torch.Generator().manual_seed(most)
    texts = [torch.randint(1, 4, (n,), generator=generator).tolist() for n in (1, 2, 3, 5, 9, 17, 33, 33)]
    texts += [[1] * 6, [1, 2, 3, 4, 5, 6], [1, 2, 1, 2, 1, 2]]
    ids = torch.tensor([[0] * (33 - len(t)) + t for t in texts])
    batch = Batch(ids, (ids > 0).long(), 10, [most] * len(texts))
    limits = [most] * len(texts)
    batch.plan(limits := [0, *limits[1:5], min(2, most), *limits[6:]])
    drafts = PromptLookup(batch, max_ngram_size).draft(torch.zeros(len(texts), dtype=torch.int64))
    expected = [looked_up(t, n, max_ngram_size) if n else [] for t, n in zip(texts, limits, strict=True)]
    assert drafts.rows is CERTAIN and any(expected) and not all(expected)
    assert [[t for t in row if t >= 0] for row in drafts.token_ids.tolist()] == expected
    assert batch.drafts == [len(e) for e in expected] == batch.num_drafts.tolist()
    for row, text, drafts in zip(batch.text.tolist(), texts, expected, strict=True):
        assert row[: len(text) + len(drafts)] == text + drafts


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompt_lookup_gives_the_greedy_tokens_of_plain_generate(family):
    target = build(family)
    prompts = [p * 3 for p in random_prompts((3, 17, 9, 1), target.config.vocab_size)]
    settings = {"max_new_tokens": 60, "do_sample": False}
    out = run(target, None, prompts, prompt_lookup_num_tokens=6, **settings)
    assert outputs(out, prompts) == plain(target, prompts, **settings)
    assert sum(out.stats.accepted) > 0 and out.stats.target_forwards < 60


def test_prompt_lookup_and_a_processor_that_forbids_the_draft():
    """A processor is never asked about a text which it does not allow."""
    target, _ = table_pair(6)

    def allowed(_, text):
        assert not ((text[:-1] == 2) & (text[1:] == 4))[len(PROMPT) - 1 :].any(), text
        return [0, 1, 2, 3, 5] if text[-1] == 2 else [0, 1, 2, 3, 4, 5]

    settings = {"max_new_tokens": 40, "prompt_lookup_num_tokens": 5, "prefix_allowed_tokens_fn": allowed}
    out = run(target, None, [PROMPT] * 3, rule="sps", do_sample=True, seed=1, **settings)
    assert sum(out.stats.accepted) > 0 and 2 in out.sequences[:, len(PROMPT) :]


def test_each_request_has_its_own_number_of_drafts():
    target, draft = table_pair(16, seed=5, noise=0.7)
    prompts, counts = [[3], [4, 9, 9, 2], [15, 11], [7, 3, 12]], [0, 1, 4, 9]
    out = run(target, target, prompts, max_new_tokens=21, num_assistant_tokens=counts)
    assert outputs(out, prompts) == plain(target, prompts, max_new_tokens=21)
    assert out.stats.accepted_lengths == [[0] * 21, [1] * 10 + [0], [4] * 4 + [0], [9, 9, 0]]
    same = {"num_return_sequences": 2, "do_sample": True, "seed": list(range(8)), "max_new_tokens": 9}
    together = run(target, draft, prompts, num_assistant_tokens=[c for c in counts for _ in "ab"], **same)
    for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        alone = run(
            target, draft, [prompt], **same | {"seed": [2 * row, 2 * row + 1]}, num_assistant_tokens=[count] * 2
        )
        assert outputs(alone, [prompt]) == outputs(together, prompts)[2 * row : 2 * row + 2]


# -- self-draft

KEPT = {
    "llama": [0, 2], "qwen3": [1], "mistral": [0, 1], "gemma3": [1, 2], "gpt2": [0, 2], "gpt-neox": [2], "phi3": [0, 2],
}  # fmt: skip


@pytest.mark.parametrize(("family", "kept"), KEPT.items(), ids=KEPT)
def test_a_draft_of_skipped_layers_is_the_smaller_model(family, kept):
    """Against a model of that size, built anew, with the weights of the kept layers."""
    target = build(family)
    draft = skip_layers(target, [i for i in range(3) if i not in kept])
    config = type(target.config).from_dict(target.config.to_dict())
    config.num_hidden_layers = len(kept)
    if family == "gemma3":
        config.layer_types = [MIXED["layer_types"][i] for i in kept]
    small = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(torch.float64).eval()
    prefix = next(n for n, m in small.named_modules() if isinstance(m, torch.nn.ModuleList)) + "."
    state = target.state_dict()
    for name in small.state_dict():
        if name.startswith(prefix):
            i, rest = name.removeprefix(prefix).split(".", 1)
            small.state_dict()[name].copy_(state[f"{prefix}{kept[int(i)]}.{rest}"])
        else:
            small.state_dict()[name].copy_(state[name])
    ids = torch.tensor(random_prompts((20,), target.config.vocab_size))
    with torch.no_grad():
        before = target(ids).logits
        torch.testing.assert_close(draft(ids, use_cache=False).logits, small(ids).logits, rtol=0, atol=1e-12)
        assert torch.equal(target(ids).logits, before)

    # No storage of its own.
    def storages(model):
        return {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*model.parameters(), *model.buffers())
        }

    mine, its = storages(target), storages(draft)
    assert its.items() <= mine.items() and sum(its.values()) < sum(mine.values())

    prompts = random_prompts((3, 17, 9, 1), target.config.vocab_size)
    settings = {"max_new_tokens": 30, "do_sample": False}
    out = run(target, draft, prompts, **settings)
    assert outputs(out, prompts) == plain(target, prompts, **settings)


def test_a_layer_that_adds_nothing_can_be_skipped_at_no_loss():
    target = build("llama")
    for name, parameter in target.model.layers[1].named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    out = run(target, skip_layers(target, [1]), random_prompts((3, 9), target.config.vocab_size), max_new_tokens=24)
    assert out.stats.accepted == out.stats.drafted and out.stats.target_forwards == 4
    assert target.config.num_hidden_layers == 3 == len(target.model.layers)


def test_layers_that_cannot_be_skipped():
    target = build("llama")
    for layers in ([], [0, 1, 2], [3], [-1]):
        with pytest.raises(ValueError, match=r"layers must name some of 0 \.\. 2, not all, got"):
            skip_layers(target, layers)
    with pytest.raises(TypeError, match="layers must hold ints"):
        skip_layers(target, ["1"])
    with pytest.raises(TypeError, match="such as"):
        skip_layers(target, 1)
    target.model.forward = target.model.forward  # as hooks do
    with pytest.raises(ValueError, match=r"LlamaModel\.forward was replaced"):
        skip_layers(target, [1])
    config = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, vocab_size=9
    )
    with pytest.raises(ValueError, match=r"has \d lists of 2 layers, and must have one"):
        skip_layers(transformers.T5ForConditionalGeneration(config), [0])
