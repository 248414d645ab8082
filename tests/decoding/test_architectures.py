"""The loop over transformers of many families: greedy tokens of plain `generate`, and the law of sampled ones."""

import numpy as np
import pytest
import torch
from support import exact
from support.decoding import noisy, outputs, p_value, plain, random_prompts, run
from support.models import FAMILIES, build

from cactus_kernels import speculative_generate

# Weight noise at which a copy of the model is wrong often, and right often.
NOISE = {"gemma2": 0.3, "gemma3": 0.3, "gpt2": 0.05, "qwen3-moe": 0.05}
GREEDY = [(family, "eager" if family == "gemma2" else "sdpa") for family in FAMILIES]
GREEDY += [("llama", "eager"), ("gemma3", "eager")]
GREEDY += [("gemma3", "flex_attention")]
GREEDY += [pytest.param(family, "flex_attention", marks=pytest.mark.slow) for family in ("llama", "mistral")]
# New tokens: past the slots that a cache begins with for some, past every window and a dozen rollbacks for all.
LONG, SHORT = 60, 24


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("family", "attention"), GREEDY, ids=lambda v: str(v))
def test_greedy_tokens_are_those_of_plain_generate(family, attention):
    """Also transformers #48280 and #30312: the windows of those that have one are 8 here.

    In a ragged batch, and for one row, whose masks and places are other ones.
    """
    target = build(family, attention)
    draft = noisy(target, NOISE.get(family, 0.1))
    prompts = random_prompts((3, 17, 9, 1), target.config.vocab_size)
    is_long = family in ("llama", "gemma3", "gpt2") and attention == "sdpa"
    settings = {"max_new_tokens": LONG if is_long else SHORT, "do_sample": False}
    expected = plain(build(family) if attention == "flex_attention" else target, prompts, **settings)
    out = run(target, draft, prompts, **settings)
    assert outputs(out, prompts) == expected
    assert 0.1 < out.stats.acceptance_rate < 0.9
    assert outputs(run(target, draft, prompts[1:2], **settings), prompts[1:2]) == expected[1:2]


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3-moe", "gpt-neox"))]
)
def test_sampled_tokens_follow_the_law_of_the_target(family):
    """At temperature 1, three tokens after each of two prompts of different lengths in one batch."""
    V, rows, length = 6, 3_000, 3
    target = build(family, vocab_size=V)
    with torch.no_grad():
        target.get_output_embeddings().weight /= 3  # a law with more than one likely token
    draft = noisy(target, 0.5)
    prompts = [[3, 4, 5, 3, 3, 4, 5, 5, 3, 4, 3], [5, 4]]
    width = len(prompts[0])
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts]).repeat(rows, 1)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).repeat(rows, 1)
    out = speculative_generate(
        target, ids, assistant_model=draft, attention_mask=mask, rule="sps", num_assistant_tokens=2, seed=5,
        do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True,
    )  # fmt: skip
    assert 0.2 < out.stats.acceptance_rate < 0.95
    tokens = out.sequences[:, width:]
    laws = [law_of(target, prompt, V, length) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        assert p_value(tokens[i::2], laws[i]) > exact.FALSE_ALARM
        for wrong in (laws[1 - i], law_of(draft, prompt, V, length)):
            assert p_value(tokens[i::2], wrong) < exact.FALSE_ALARM


@torch.no_grad()
def law_of(model, prompt, V, length):
    """The law of `length` tokens after a prompt, [V] * length, from plain forwards over every text."""
    texts = torch.cartesian_prod(*[torch.arange(V)] * (length - 1))
    texts = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
    rows = model(texts, use_cache=False).logits[:, -length:].softmax(-1).numpy()
    law = rows[0, 0]
    for k in range(1, length):
        law = law[..., None] * rows[:: V ** (length - 1 - k), k].reshape(*[V] * k, V)
    np.testing.assert_allclose(law.sum(), 1)
    return law
