"""The decoding loop: exact laws on lookup-table models, greedy equality with transformers' own `generate`."""

import copy
import time
from functools import cache

import numpy as np
import pytest
from support import exact, flash

pytest.importorskip("transformers")

import torch
from support.decoding import (
    EOS,
    PAD,
    PROCESSORS,
    ROWS,
    Increasing,
    Recorder,
    SumStops,
    chain,
    noisy,
    outputs,
    p_value,
    plain,
    random_prompts,
    rows_of,
    run,
    sampled,
    uneven,
)
from support.models import TableModel, build, table_pair
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    set_seed,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import logits_process as hf

from cactus_kernels import Cactus, Rule, SpS, definition, embedded_pair, philox, speculative_generate
from cactus_kernels.decoding.drafters.drafts import DraftRows, Drafts
from cactus_kernels.decoding.drafters.model import ModelDrafter
from cactus_kernels.decoding.drafters.sampler import DraftSampler
from cactus_kernels.decoding.verifier import Verifier
from cactus_kernels.host import draw as host_draw


def markov_law(table, context, length):
    """The law of `length` tokens after a context, [V] * length, from the rows' probabilities float64 [V, V]."""
    law = table[context]
    for _ in range(length - 1):
        law = law[..., None] * table
    return law


def loop_law(p, q, delta, context, length, num_assistant_tokens):
    """The law of the tokens that the loop emits, [V] * length, by enumeration over drafts.

    Within a round the token after an accepted draft is drafted in turn; after the last draft it follows the target. A
    rejection ends the round with a recovered token, and a round drafts no more than the tokens left but one.
    """
    V = len(q)

    @cache
    def verified(context):
        """What one drafted position emits: accepted [V], recovered [V]."""
        accepted, recovered = np.zeros(V), np.zeros(V)
        for n in np.flatnonzero(p[context]):
            h = exact.verified_against(q[context], n, delta)
            accept = min(1.0, h[n] / p[context, n])
            accepted[n] = p[context, n] * accept
            residual = np.maximum(h - p[context], 0)
            if accept < 1:
                recovered += p[context, n] * (1 - accept) * residual / residual.sum()
        np.testing.assert_allclose(accepted + recovered, exact.emitted(p[context], q[context], delta), atol=1e-14)
        return accepted, recovered

    @cache
    def law(context, left, drafts):
        if left == 0:
            return np.array(1.0)
        if drafts is None:
            return law(context, left, min(num_assistant_tokens, left - 1))
        if drafts == 0:
            return np.stack([q[context, x] * law(x, left - 1, None) for x in range(V)])
        accepted, recovered = verified(context)
        return np.stack(
            [accepted[x] * law(x, left - 1, drafts - 1) + recovered[x] * law(x, left - 1, None) for x in range(V)]
        )

    return law(context, length, None)


# -- laws


@pytest.mark.parametrize(("length", "num_assistant_tokens"), [(2, 1), (3, 2), (3, 5)])
def test_sps_gives_the_law_of_the_target(length, num_assistant_tokens):
    """Two tokens and three: where random words are used twice, a later token depends on an earlier one."""
    target, draft = table_pair(5)
    law = markov_law(rows_of(target), 3, length)
    np.testing.assert_allclose(loop_law(rows_of(draft), rows_of(target), 0, 3, length, num_assistant_tokens), law)
    tokens = sampled(target, draft, max_new_tokens=length, num_assistant_tokens=num_assistant_tokens)
    assert p_value(tokens, law) > exact.FALSE_ALARM


@pytest.mark.parametrize("num_assistant_tokens", [1, 2])
def test_cactus_gives_its_own_law(num_assistant_tokens):
    target, draft = table_pair(5)
    law = loop_law(rows_of(draft), rows_of(target), 0.5, 3, 3, num_assistant_tokens)
    assert np.abs(law - markov_law(rows_of(target), 3, 3)).sum() > 0.1
    tokens = sampled(target, draft, rule=Cactus(0.5), max_new_tokens=3, num_assistant_tokens=num_assistant_tokens)
    assert p_value(tokens, law) > exact.FALSE_ALARM
    assert p_value(tokens, markov_law(rows_of(target), 3, 3)) < exact.FALSE_ALARM
    assert p_value(tokens[:, :2], law.sum(2)) > exact.FALSE_ALARM


def test_a_strength_for_each_row():
    target, draft = table_pair(5)
    delta = torch.tensor([0.0, 0.5]).repeat(ROWS)
    tokens = sampled(target, draft, 2 * ROWS, rule=Cactus(delta), max_new_tokens=2)
    for i, d in enumerate((0.0, 0.5)):
        law = loop_law(rows_of(draft), rows_of(target), d, 3, 2, 5)
        assert p_value(tokens[i::2], law) > exact.FALSE_ALARM
        assert p_value(tokens[1 - i :: 2], law) < exact.FALSE_ALARM


def without_advance(monkeypatch):
    right = Verifier.verify

    def verify(self, *args):
        verified = right(self, *args)
        self.offset = torch.zeros_like(self.offset)
        return verified

    monkeypatch.setattr(Verifier, "verify", verify)


def draft_words_for_verification(monkeypatch):
    monkeypatch.setattr(host_draw, "DRAFT_CHUNK", definition.PICK_CHUNK)
    monkeypatch.setattr(host_draw, "DRAFT_TOKEN", definition.PICK_TOKEN)


def one_draft_word_a_round(monkeypatch):
    right = DraftSampler.draw

    def draw(self, logits, j):
        self.noise = dict.fromkeys([j], *self.noise.values()) if self.noise else {}
        return right(self, logits, j)

    monkeypatch.setattr(DraftSampler, "draw", draw)


def raw_draft_rows(monkeypatch):
    right = ModelDrafter.draft

    def draft(self, offset):
        """Verified at temperature 1, whatever they were drawn at."""
        drafts = right(self, offset)
        if drafts.rows.probs is None:
            return drafts
        weights = drafts.rows.probs.sqrt()  # they were drawn at 0.5
        return Drafts(drafts.token_ids, DraftRows(probs=weights / weights.sum(-1, keepdim=True)))

    monkeypatch.setattr(ModelDrafter, "draft", draft)


@pytest.mark.parametrize(
    "mutate", [None, without_advance, draft_words_for_verification, one_draft_word_a_round, raw_draft_rows]
)
def test_these_laws_catch_a_loop_that_is_wrong(mutate, monkeypatch):
    if mutate:
        mutate(monkeypatch)
    target, draft = table_pair(5)
    target.table *= 0.5
    draft.table *= 0.5
    law = markov_law(squared(target), 3, 3)
    tokens = sampled(target, draft, max_new_tokens=3, num_assistant_tokens=2, temperature=0.5)
    assert (p_value(tokens, law) > exact.FALSE_ALARM) == (mutate is None)


def squared(target):
    """Rows at temperature 1/2."""
    rows = rows_of(target) ** 2
    return rows / rows.sum(1, keepdims=True)


WARPED = {
    "temperature": ({"temperature": 0.6}, [hf.TemperatureLogitsWarper(0.6)]),
    "top-k": ({"top_k": 3}, [hf.TopKLogitsWarper(3)]),
    "top-p": ({"top_p": 0.7}, [hf.TopPLogitsWarper(0.7)]),
    "all three": (
        {"temperature": 1.4, "top_k": 5, "top_p": 0.8},
        [hf.TemperatureLogitsWarper(1.4), hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.8)],
    ),
    "min-p": ({"min_p": 0.2}, [hf.MinPLogitsWarper(0.2)]),
    "typical": ({"typical_p": 0.6}, [hf.TypicalLogitsWarper(0.6)]),
    "epsilon": ({"epsilon_cutoff": 0.08}, [hf.EpsilonLogitsWarper(0.08)]),
    "eta": ({"eta_cutoff": 0.3}, [hf.EtaLogitsWarper(0.3)]),
}


@pytest.mark.parametrize(("settings", "warpers"), WARPED.values(), ids=WARPED)
def test_processed_rows_keep_the_law_of_the_processed_target(settings, warpers):
    """transformers #47932: acceptance must go by the distribution that the draft was sampled from."""
    target, draft = table_pair(8, seed=1)
    scores = LogitsProcessorList(warpers)(None, target.table.detach().clone())
    rows = scores.double().softmax(-1).numpy()
    assert np.abs(rows - rows_of(target)).max() > 0.05
    tokens = sampled(target, draft, 4_000, max_new_tokens=2, **settings)
    assert p_value(tokens, markov_law(rows, 3, 2)) > exact.FALSE_ALARM
    assert p_value(tokens, markov_law(rows_of(target), 3, 2)) < exact.FALSE_ALARM


@pytest.mark.parametrize("name", ["min-p", "typical", "epsilon", "eta"])
def test_cactus_keeps_its_law_on_processed_rows(name):
    """Truncations that the paper did not try: both models' rows are processed, and delta acts on what is left."""
    settings, warpers = WARPED[name]
    models = table_pair(8, seed=1)
    scores = [LogitsProcessorList(warpers)(None, model.table.detach().clone()) for model in models]
    q, p = (x.double().softmax(-1).numpy() for x in scores)
    law = loop_law(p, q, 0.3, 3, 3, 2)
    assert np.abs(law - markov_law(q, 3, 3)).sum() > 0.05
    assert np.abs(law - loop_law(*map(rows_of, models[::-1]), 0.3, 3, 3, 2)).sum() > 0.05
    tokens = sampled(*models, 6_000, rule=Cactus(0.3), max_new_tokens=3, num_assistant_tokens=2, **settings)
    assert p_value(tokens, law) > exact.FALSE_ALARM
    assert p_value(tokens, markov_law(q, 3, 3)) < exact.FALSE_ALARM


@pytest.mark.slow
def test_a_processor_that_reads_the_text_keeps_its_law():
    target, draft = table_pair(6)
    penalty = hf.RepetitionPenaltyLogitsProcessor(2.0)

    def row(*text):
        return penalty(torch.tensor([text]), target.table[text[-1]][None].clone()).double().softmax(-1)[0].numpy()

    law = np.stack([row(3)[x] * row(3, x) for x in range(6)])
    assert np.abs(law - markov_law(rows_of(target), 3, 2)).sum() > 0.1
    tokens = sampled(target, draft, 4_000, max_new_tokens=2, repetition_penalty=2.0)
    assert p_value(tokens, law) > exact.FALSE_ALARM


@pytest.mark.parametrize("sizes", [(6, 9), (9, 6)], ids=["larger draft", "smaller draft"])
def test_vocabularies_of_two_sizes(sizes):
    """transformers #45307. The law is the target's, and greedy decoding is its own, whichever is larger."""
    generator = torch.Generator().manual_seed(0)
    table = 1.5 * torch.randn(9, 9, generator=generator)
    target = TableModel(table[: sizes[0], : sizes[0]].clone())
    draft = TableModel((table + torch.randn(9, 9, generator=generator))[: sizes[1], : sizes[1]].clone())
    tokens = sampled(target, draft, max_new_tokens=3)
    assert tokens.unique().tolist() == list(range(sizes[0]))
    assert p_value(tokens, markov_law(rows_of(target), 3, 3)) > exact.FALSE_ALARM
    prompts = [[5], [2, sizes[0] - 1], [4]]
    out = run(target, draft, prompts, max_new_tokens=30)
    assert outputs(out, prompts) == plain(target, prompts, max_new_tokens=30)


@pytest.mark.parametrize("do_sample", [False, True])
def test_only_tokens_that_the_draft_lacks_are_allowed(do_sample):
    target, draft = table_pair(9)
    draft = TableModel(draft.table[:6, :6].clone())
    settings = {"suppress_tokens": list(range(6)), "do_sample": do_sample, "temperature": 0.5}
    out = run(target, draft, [[3], [4]], max_new_tokens=12, seed=1, **settings)
    assert out.stats.tokens == [12, 12] and out.sequences[:, 1:].min() >= 6


# -- greedy decoding


@pytest.mark.parametrize("attention, chunk", [("sdpa", 4), ("flash_attention_2", None), ("flash_attention_2", 4)])
def test_rows_that_draft_less_than_others(attention, chunk, monkeypatch):
    """Behind their drafts there is padding: the longest prompt's too, and at the end every row's."""
    target, draft = build("llama"), build("llama", num_hidden_layers=2)
    prompts = random_prompts((3, 17, 9, 1), 61)
    expected = plain(target, prompts, max_new_tokens=20)
    if "flash" in attention:
        flash.install(monkeypatch)
    target.config._attn_implementation = draft.config._attn_implementation = attention
    for count in (5, [0, 5, 2, 7]):
        out = run(target, draft, prompts, max_new_tokens=20, num_assistant_tokens=count, prefill_chunk_size=chunk)
        assert outputs(out, prompts) == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_draft_with_the_targets_weights_is_always_right(family):
    """So the draft's cache misses no token and holds no wrong one, in rounds of any length."""
    target = build(family)
    prompts = random_prompts((3, 17, 9, 1), target.config.vocab_size)
    for num_assistant_tokens in (1, 3):
        out = run(target, build(family), prompts, max_new_tokens=20, num_assistant_tokens=num_assistant_tokens)
        assert out.stats.accepted == out.stats.drafted and out.stats.target_forwards == 20 // (num_assistant_tokens + 1)


def test_a_draft_of_another_kind_changes_nothing():
    target, draft = build("mistral"), build("gpt2")
    prompts = random_prompts((3, 17, 9, 1), target.config.vocab_size)
    out = run(target, draft, prompts, max_new_tokens=20)
    assert outputs(out, prompts) == plain(target, prompts, max_new_tokens=20)


@pytest.mark.slow
def test_greedy_tokens_of_the_embedded_pair():
    target, draft, tokenizer = embedded_pair(dtype=torch.float64)
    texts = ["Question: Maria has 5 boxes of pencils.", "Question: A", "The farmer sold 12 eggs on Monday. How", "She"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    settings = {"max_new_tokens": 60, "do_sample": False}
    out = speculative_generate(
        target, batch.input_ids, attention_mask=batch.attention_mask, assistant_model=draft,
        return_dict_in_generate=True, **settings,
    )  # fmt: skip
    width = batch.input_ids.shape[1]
    for row, text, n in zip(out.sequences, texts, out.stats.tokens, strict=True):
        alone = target.generate(**tokenizer(text, return_tensors="pt"), **settings)
        assert row[width : width + n].tolist() == alone[0, len(tokenizer(text).input_ids) :].tolist()
    assert 0.1 < out.stats.acceptance_rate < 0.95


def test_ties_go_to_the_lowest_id():
    """lattice #280."""
    table = torch.zeros(6, 6)
    table[:, [2, 4]] = 1.0
    out = run(TableModel(table), TableModel(table.flip(1)), [[3]], max_new_tokens=9)
    assert outputs(out, [[3]]) == [[2] * 9]


@pytest.mark.parametrize("settings", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_give_the_greedy_tokens_of_plain_generate(settings):
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 25} | settings
    out = run(target, draft, prompts, **settings)
    expected = plain(target, prompts, **settings)
    assert outputs(out, prompts) == expected
    lengths = {k: settings[k] for k in ("max_new_tokens", "eos_token_id") if k in settings}
    assert expected != plain(target, prompts, **lengths)
    assert out.stats.target_forwards < max(out.stats.tokens)


def test_a_processor_of_the_callers_sees_the_texts_of_plain_generate():
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 25, "eos_token_id": [15]}
    mine, theirs = Increasing(prompts, [15]), Increasing(prompts, [15])
    out = run(target, draft, prompts, logits_processor=LogitsProcessorList([mine]), **settings)
    assert outputs(out, prompts) == plain(target, prompts, logits_processor=LogitsProcessorList([theirs]), **settings)
    assert theirs.texts <= mine.texts
    assert {len(t) for t in outputs(out, prompts)} != {25}


def test_prefix_allowed_tokens_fn_is_told_the_prompt():
    """As in `generate`, the index of the prompt, also where `num_return_sequences` repeats it."""
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 6, "prefix_allowed_tokens_fn": lambda batch_id, _: [3 + batch_id]}
    out = run(target, draft, prompts, do_sample=True, num_return_sequences=2, **settings)
    width = max(map(len, prompts))
    assert out.sequences[:, width:].tolist() == [[3 + b] * 6 for b in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_repetition_penalty_with_a_transformer():
    target = build("llama")
    prompts = random_prompts((3, 17, 9, 1), target.config.vocab_size)
    settings = {"max_new_tokens": 20, "repetition_penalty": 1.5}
    out = run(target, noisy(target, 0.1), prompts, **settings)
    assert outputs(out, prompts) == plain(target, prompts, **settings)


# -- where rows end


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("eos", [EOS, [EOS, 6]], ids=["int", "list"])
def test_rows_end_inside_an_accepted_block(eos, do_sample):
    """transformers #47912, vLLM #56101: accepted [a, EOS, b] gives two tokens, and rows end alone."""
    model = chain(8, (2, 3), (3, EOS), (EOS, 4), (4, 5), (5, 6), (6, 7))
    prompts = [[2], [7, 7, 4], [5], [6]]
    out = run(model, model, prompts, max_new_tokens=7, eos_token_id=eos, do_sample=do_sample)
    listed = eos != EOS
    expected = [[3, EOS], [5, 6] if listed else [5, 6, 7, 7, 7, 7, 7], [6] if listed else [6] + [7] * 6, [7] * 7]
    assert outputs(out, prompts) == expected
    for row, tokens in zip(out.sequences, expected, strict=True):
        assert row[3:].tolist() == tokens + [PAD] * (7 - len(tokens))
    assert out.stats.accepted_lengths[0] == [2]


@pytest.mark.parametrize("pad", [PAD, None], ids=["pad", "no pad"])
def test_padding_is_that_of_generate(pad):
    target, draft, _ = uneven()
    ids = torch.tensor([[3, 4], [9, 2], [15, 11], [3, 7]])
    settings = {"max_new_tokens": 20, "eos_token_id": [6, 5], "pad_token_id": pad}
    got = speculative_generate(target, ids, assistant_model=draft, **settings)
    expected = target.generate(ids, **settings)
    assert torch.equal(got, expected)
    assert (got[:, -1] == (6 if pad is None else PAD)).any()


@pytest.mark.parametrize("num_assistant_tokens", [1, 3, 64])
@pytest.mark.parametrize("do_sample", [False, True])
def test_no_more_tokens_than_asked_for(num_assistant_tokens, do_sample):
    target, draft, prompts = uneven()
    for new_tokens in (1, 2, 5):
        target.calls = draft.calls = 0
        out = run(
            target, draft, prompts, max_new_tokens=new_tokens, num_assistant_tokens=num_assistant_tokens,
            do_sample=do_sample,
        )  # fmt: skip
        assert out.stats.tokens == [new_tokens] * 4 and out.sequences.shape == (4, 6 + new_tokens)
        assert draft.calls == 0 if new_tokens == 1 else draft.calls > 0
        if new_tokens == 1:
            assert out.stats.drafted == [0] * 4 and out.stats.acceptance_rate is None
        assert max(out.stats.drafted) <= num_assistant_tokens * out.stats.target_forwards
        assert max(map(max, out.stats.accepted_lengths)) <= min(num_assistant_tokens, new_tokens - 1)


@pytest.mark.parametrize("settings", [{"max_length": 11}, {}, {"max_new_tokens": 4, "max_length": 30}], ids=str)
def test_lengths_are_those_of_generate(settings):
    target, draft, _ = uneven()
    ids = torch.tensor([[3, 4, 7], [9, 2, 8]])
    got = speculative_generate(target, ids, assistant_model=draft, **settings)
    assert torch.equal(got, target.generate(ids, **settings))


# -- random streams


@pytest.mark.parametrize("eos", [None, 6])
def test_a_row_does_not_depend_on_its_batch(eos):
    """FlashInfer #4861 and vLLM #10863, in the loop: rows of many lengths, ends and strengths, alone, permuted, together."""
    target, draft, prompts = uneven(noise=2.0)
    prompts, seeds = prompts * 3, list(range(12))
    delta = torch.linspace(0, 0.5, 12)
    settings = {"max_new_tokens": 20, "eos_token_id": eos, "do_sample": True, "min_p": 0.01}

    def tokens(rows):
        chosen = [prompts[r] for r in rows]
        out = run(target, draft, chosen, seed=[seeds[r] for r in rows], rule=Cactus(delta[list(rows)]), **settings)
        return outputs(out, chosen)

    together = tokens(range(12))
    assert eos is None or len({len(t) for t in together}) > 2
    assert together[:4] != together[4:8]
    assert [tokens([r])[0] for r in range(12)] == together
    order = [5, 0, 11, 3, 9, 1, 10, 2, 8, 4, 7, 6]
    assert tokens(order) == [together[r] for r in order]


def test_an_int_seed_gives_each_row_its_stream():
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 10, "do_sample": True}
    mine = philox.request_seeds(9, 4, torch.device("cpu"))
    one, listed, tensor, other = (
        run(target, draft, prompts, seed=seed, **settings).sequences for seed in (9, mine.tolist(), mine, 10)
    )
    assert torch.equal(one, listed) and torch.equal(one, tensor) and not torch.equal(one, other)


def test_without_a_seed_set_seed_decides():
    target, draft, prompts = uneven()
    got = []
    for seed in (1, 1, 2):
        set_seed(seed)
        got.append(run(target, draft, prompts, max_new_tokens=10, do_sample=True).sequences)
    assert torch.equal(got[0], got[1]) and not torch.equal(got[0], got[2])
    assert not torch.equal(got[2], run(target, draft, prompts, max_new_tokens=10, do_sample=True).sequences)


def test_the_seed_leaves_torchs_generator_alone():
    target, draft, prompts = uneven()
    before = torch.get_rng_state()
    run(target, draft, prompts, max_new_tokens=10, do_sample=True, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_num_return_sequences_repeats_the_rows():
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 10, "do_sample": True, "seed": 4, "rule": Cactus(torch.arange(12) / 12)}
    got = run(target, draft, prompts, num_return_sequences=3, **settings).sequences
    expected = run(target, draft, [p for p in prompts for _ in range(3)], **settings).sequences
    assert torch.equal(got, expected)
    assert not torch.equal(got[0], got[1])


# -- stopping criteria, streamers, what comes back


@pytest.mark.parametrize("criterion", [SumStops(), MaxLengthCriteria(9)], ids=["sum", "length"])
def test_stopping_criteria_do_not_overshoot(criterion):
    target, draft, prompts = uneven()
    prompts = [p for p in prompts if 0 not in p]
    settings = {"max_new_tokens": 25, "stopping_criteria": StoppingCriteriaList([criterion])}
    target.table[:, 0] = draft.table[:, 0] = -1e4
    out = run(target, draft, prompts, **settings)
    expected = plain(target, prompts, **settings)
    assert outputs(out, prompts) == expected
    assert {len(t) for t in expected} - {25} and max(map(max, out.stats.accepted_lengths)) > 1


def test_max_time_stops_after_the_token_at_which_it_is_over():
    target, draft, prompts = uneven()
    out = run(target, draft, prompts, max_new_tokens=25, max_time=0.0)
    assert out.stats.tokens == [1] * 4
    start = time.perf_counter()
    out = run(target, draft, [[3]], max_new_tokens=10**5, max_time=0.3)
    assert 1 < out.stats.tokens[0] < 10**5 and time.perf_counter() - start < 5


@pytest.mark.parametrize("where", ["keyword", "generation_config", "model"])
def test_stop_strings(bytes_tokenizer, where):
    a, b, c, d = (bytes_tokenizer.convert_tokens_to_ids(x) for x in "abcd")
    V = len(bytes_tokenizer)
    model = chain(V, (a, b), (b, c), (c, d), (d, a))
    prompts = [[a], [b, b, c], [d]]
    settings = {"max_new_tokens": 12}
    if where == "keyword":
        settings["stop_strings"] = ["cda", "zz"]
    elif where == "generation_config":
        settings["generation_config"] = GenerationConfig(stop_strings=["cda", "zz"])
    else:
        model.generation_config.stop_strings = ["cda", "zz"]
    out = run(model, model, prompts, tokenizer=bytes_tokenizer, **settings)
    assert outputs(out, prompts) == [[b, c, d, a], [d, a], [a, b, c, d, a]]
    assert outputs(out, prompts) == plain(model, prompts, tokenizer=bytes_tokenizer, **settings)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 2}], ids=["greedy", "sampled"])
def test_a_streamer_gets_the_prompt_once_and_every_token_that_comes_out(settings):
    target, draft, prompts = uneven()
    for prompt in prompts:
        mine = Recorder()
        out = run(target, draft, [prompt], max_new_tokens=20, eos_token_id=[6, 5], streamer=mine, **settings)
        assert mine.ended == 1
        assert mine.values[0].tolist() == [prompt]
        assert all(value.shape == (1,) for value in mine.values[1:])
        assert torch.cat([value.flatten() for value in mine.values]).tolist() == out.sequences[0].tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_stats_are_consistent(do_sample):
    target, draft, prompts = uneven()
    target.calls = draft.calls = 0
    settings = {"max_new_tokens": 20, "eos_token_id": 6, "do_sample": do_sample, "num_assistant_tokens": 4}
    rule = Cactus(0.25) if do_sample else SpS()
    out = run(target, draft, prompts, rule=rule, seed=1, **settings)
    stats = out.stats
    assert stats.rule == rule.name and stats.strengths == list(rule.strengths)
    assert stats.target_forwards == target.calls == max(stats.rounds)
    assert draft.calls == sum(
        max(
            min(4, 19 - sum(lengths[:i]) - i)
            for lengths, rounds in zip(stats.accepted_lengths, stats.rounds, strict=True)
            if i < rounds
        )
        for i in range(stats.target_forwards)
    )
    width = max(map(len, prompts))
    longest = out.sequences.shape[1] - width
    for b in range(4):
        tokens = out.sequences[b, width:].tolist()
        end = tokens.index(6) + 1 if 6 in tokens else longest
        assert stats.tokens[b] == end
        assert stats.accepted[b] == sum(stats.accepted_lengths[b]) <= stats.drafted[b]
        assert len(stats.accepted_lengths[b]) == stats.rounds[b]
        # A round adds a token of its own to the accepted ones, unless it ended with an accepted EOS.
        assert stats.accepted[b] + stats.rounds[b] - stats.tokens[b] in (0, 1)
    assert stats.acceptance_rate == sum(stats.accepted) / sum(stats.drafted)
    assert stats.tokens_per_forward == sum(stats.tokens) / sum(stats.rounds) > 1
    assert min(stats.draft_seconds, stats.target_seconds, stats.verify_seconds) > 0
    assert stats.to_dict()["accepted_lengths"] == stats.accepted_lengths


def test_what_comes_back_is_what_generate_returns():
    target, draft, _ = uneven()
    ids = torch.tensor([[3, 4], [9, 2]])
    for settings in ({}, {"return_dict_in_generate": True}):
        got = speculative_generate(target, ids, assistant_model=draft, max_new_tokens=5, **settings)
        expected = target.generate(ids, max_new_tokens=5, **settings)
        if settings:
            assert isinstance(got, GenerateDecoderOnlyOutput) and list(got.keys()) == [*expected.keys(), "stats"]
            got, expected = got["sequences"], expected["sequences"]
        assert torch.equal(got, expected) and got.dtype == expected.dtype


@pytest.mark.parametrize("as_config", [False, True])
def test_what_the_caller_gave_is_left_as_it_was(as_config):
    target, draft, _ = uneven()
    ids, mask = torch.tensor([[0, 4], [9, 2]]), torch.tensor([[0, 1], [1, 1]])
    seed, delta = torch.tensor([1, 2]), torch.tensor([0.5, 1.0])
    processors, criteria = LogitsProcessorList([hf.MinPLogitsWarper(0.05)]), StoppingCriteriaList([SumStops()])
    config = GenerationConfig(
        max_new_tokens=8, do_sample=True, pad_token_id=0, repetition_penalty=1.2, suppress_tokens=[0]
    )
    kwargs = {"generation_config": config} if as_config else config.to_diff_dict()
    kwargs.pop("transformers_version", None)
    kwargs |= {"attention_mask": mask, "logits_processor": processors, "stopping_criteria": criteria, "seed": seed}

    def state():
        tensors = (ids, mask, seed, delta, target.table, draft.table)
        configs = (config, target.config, draft.config, target.generation_config, draft.generation_config)
        lists = (processors, criteria, kwargs)
        return [t.tolist() for t in tensors], [c.to_dict() for c in configs], [list(x) for x in lists]

    before = copy.deepcopy(state()[:2]), state()[2]
    first = speculative_generate(target, ids, assistant_model=draft, rule=Cactus(delta), **kwargs)
    assert (state()[:2], state()[2]) == before
    assert torch.equal(first, speculative_generate(target, ids, assistant_model=draft, rule=Cactus(delta), **kwargs))


# -- bad scores


# Among infinite scores there is a largest one, so that greedy decoding has no quarrel with them.
@pytest.mark.parametrize(
    ("bad", "do_sample"), [(torch.nan, True), (torch.inf, True), (torch.nan, False)], ids=["nan", "inf", "nan-greedy"]
)
@pytest.mark.parametrize("who", ["target", "draft"])
def test_bad_scores_are_an_error_that_names_the_requests(who, do_sample, bad):
    """vLLM #53029, FlashInfer #2456."""
    models = {name: chain(8, (2, 3), (3, 4), (4, 5), (5, 6), (6, EOS)) for name in ("target", "draft")}
    models[who].table[5, 7] = bad
    prompts = [[2], [7], [3], [EOS]]
    with pytest.raises(ValueError, match=r"requests \[0, 2\]|requests \[2\]"):
        run(models["target"], models["draft"], prompts, max_new_tokens=9, do_sample=do_sample)


class BadAfter(LogitsProcessor):
    """Scores that are bad once a text ends with a token."""

    def __init__(self, token, value):
        self.token, self.value = token, value

    def __call__(self, input_ids, scores):
        return scores + torch.where(input_ids[:, -1:] == self.token, self.value, 0.0)


@pytest.mark.parametrize(
    ("bad", "do_sample"), [(torch.nan, True), (-torch.inf, True), (torch.nan, False)], ids=["nan", "none", "nan-greedy"]
)
def test_bad_scores_are_said_to_be_whose_they_are(bad, do_sample):
    """Row 0 meets token 5 as its third, row 1 in its prompt; the target, the draft, or a processor cannot bear it."""

    def error(target=0.0, draft=0.0, processor=0.0, **settings):
        models = [chain(8, (2, 3), (3, 4), (4, 5), (5, 6)) for _ in range(2)]
        for model, value in zip(models, (target, draft), strict=True):
            model.table[5] += value
        processors = LogitsProcessorList([BadAfter(5, processor)] if processor else [])
        with pytest.raises(ValueError, match=r"^bad values in requests \[0, 1\] at drafted positions") as raised:
            run(*models, [[2], [4]], max_new_tokens=9, do_sample=do_sample, logits_processor=processors, **settings)
        return str(raised.value)

    is_bad = "NaN, +inf or nothing but -inf"
    assert error(target=bad).endswith(f"[3, 1]: the target's own logits are {is_bad}")
    assert error(draft=bad).endswith(f": the draft's scores are {is_bad}, those of the target are good")
    after = f": the target's own logits are good, and {is_bad} after the logits processors"
    assert error(processor=bad).endswith(after)
    # What the model's own scores are is read before the processors.
    assert error(target=bad, processor=bad).endswith(f": the target's own logits are {is_bad}")


class Nothing(Rule):
    """Accepts nothing, and leaves nothing to recover."""

    name = "nothing"

    @staticmethod
    def accept(q_n, p_n, stat):
        return q_n * 0.0

    @staticmethod
    def recover(q, q_n, h_n, stat):
        return q * 0.0


def test_a_bad_rule_is_not_laid_to_scores():
    with pytest.raises(ValueError, match="the scores are good, but the rule makes no law of them"):
        run(*table_pair(5), [[1], [2]], max_new_tokens=4, rule=Nothing(), seed=1, do_sample=True)


@pytest.mark.parametrize("do_sample", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_bad_scores_of_rows_that_have_ended_do_not_matter(who, do_sample):
    models = {name: chain(8, (2, EOS), (EOS, 5), (3, 4), (4, 6)) for name in ("target", "draft")}
    for token in (EOS, 5):
        models[who].table[token] = torch.nan
    prompts = [[2], [3, 3]]
    # With one draft a round, EOS is the target's to say, or stands at the end of the block.
    for num_assistant_tokens in (1, 5):
        out = run(
            models["target"], models["draft"], prompts, max_new_tokens=9, eos_token_id=EOS, do_sample=do_sample,
            num_assistant_tokens=num_assistant_tokens,
        )  # fmt: skip
        assert outputs(out, prompts) == [[EOS], [4] + [6] * 8]
