"""Processors and criteria that remember: what they remember is the row's own text, as if it were generated alone."""

import copy
import threading
from functools import partial

import pytest

pytest.importorskip("transformers")

import torch
from support.decoding import EOS, PAD, chain, outputs, plain, run, uneven
from support.models import table_pair
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation import logits_process as hf

from cactus_kernels import custom_generate, speculative_generate
from cactus_kernels.decoding.state import STATELESS

END = 15


class EndAfter(LogitsProcessor):
    """Forces END at its call number `calls`, and keeps it away before: the published end of thinking after N tokens."""

    def __init__(self, calls):
        self.calls, self.count = calls, 0

    def __call__(self, input_ids, scores):
        self.count += 1
        scores = scores.clone()
        if self.count == self.calls:
            scores[:, :END] = -torch.inf
        elif self.count < self.calls:
            scores[:, END] = -torch.inf
        return scores


class Surprised(LogitsProcessor):
    """Remembers the sum of the best scores that it was shown, in a list, and favours a token by it."""

    def __init__(self):
        self.seen = [0.0]

    def __call__(self, input_ids, scores):
        self.seen.append(self.seen[-1] + float(scores.max()))
        scores = scores.clone()
        scores[:, int(self.seen[-1]) % END] += 2.0
        return scores


class StopsAfter(StoppingCriteria):
    """Stops at its call number `calls`."""

    def __init__(self, calls):
        self.calls, self.count = calls, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.count += 1
        return torch.tensor([self.count == self.calls])


class StopsAtRepeat(StoppingCriteria):
    """Stops where a token comes out a second time, of those since the prompt."""

    def __init__(self):
        self.seen = set()

    def __call__(self, input_ids, scores, **kwargs):
        token = int(input_ids[0, -1])
        again = token in self.seen
        self.seen.add(token)
        return torch.tensor([again])


def prompt_lookup():
    """Prompts over few tokens, so that lookup drafts."""
    target, _, _ = uneven()
    return target, None, [[3, 4, 9, 3, 4], [2, 7, 2, 7, 2, 7], [9, 9, 9]]


DRAFTERS = {
    "draft model": lambda: (*uneven()[:2], uneven()[2][:3]),
    "its own draft": lambda: (uneven()[0], uneven()[0], uneven()[2][:3]),
    "prompt lookup": prompt_lookup,
}


def settings_of(draft):
    return {"max_new_tokens": 19} | ({} if draft else {"prompt_lookup_num_tokens": 4})


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("processor", [partial(EndAfter, 12), Surprised], ids=["count", "sum"])
def test_a_processor_that_remembers_gives_the_tokens_of_plain_generate(processor, make):
    target, draft, prompts = make()
    alone = [processor() for _ in prompts]
    expected = [
        plain(target, [p], max_new_tokens=19, logits_processor=[x])[0] for p, x in zip(prompts, alone, strict=True)
    ]
    for rows in ([0], [2], [0, 1, 2]):
        mine, some = processor(), [prompts[r] for r in rows]
        out = run(target, draft, some, logits_processor=[mine], **settings_of(draft))
        assert outputs(out, some) == [expected[r] for r in rows]
        assert vars(mine) == vars(alone[rows[0]])
    assert sum(out.stats.accepted) > 0
    if processor is not Surprised:
        assert all(row.index(END) == 11 for row in expected)


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_sampled_text_ends_where_a_processor_counts_to(make):
    target, draft, prompts = make()
    mine = EndAfter(12)
    settings = settings_of(draft) | {"rule": "sps", "do_sample": True, "seed": 1, "eos_token_id": END}
    out = run(target, draft, prompts, logits_processor=[mine], **settings)
    assert [row.index(END) for row in outputs(out, prompts)] == [11] * 3 and mine.count == 12


def test_state_through_custom_generate():
    target, draft, prompts = uneven()
    mine, criterion = EndAfter(7), StopsAfter(9)
    ids = torch.tensor(prompts[1:2]).expand(2, -1)
    got = target.generate(
        ids, custom_generate=partial(custom_generate, assistant_model=draft), logits_processor=[mine], max_new_tokens=19,
        stopping_criteria=[criterion], pad_token_id=PAD, eos_token_id=None,
    )  # fmt: skip
    expected = plain(target, prompts[1:2], max_new_tokens=9, logits_processor=[EndAfter(7)])
    assert got[:, ids.shape[1] :].tolist() == expected * 2
    assert mine.count == criterion.count == 9


@pytest.mark.parametrize("criterion", [partial(StopsAfter, 8), StopsAtRepeat], ids=["count", "set"])
@pytest.mark.parametrize("eos", [None, 6])
def test_a_criterion_that_remembers_ends_each_row_where_it_ends_alone(criterion, eos):
    target, draft, prompts = uneven()
    settings = {"max_new_tokens": 20, "eos_token_id": eos}
    alone = [criterion() for _ in prompts]
    expected = [plain(target, [p], stopping_criteria=[x], **settings)[0] for p, x in zip(prompts, alone, strict=True)]
    mine = criterion()
    out = run(target, draft, prompts, stopping_criteria=[mine], **settings)
    assert outputs(out, prompts) == expected and min(map(len, expected)) > 1
    assert vars(mine) == vars(alone[0])


def test_every_criterion_is_asked_about_every_token():
    """As `generate` does, also where another one has ended the row."""
    first, second = StopsAfter(4), StopsAfter(4)
    target, draft, prompts = uneven()
    run(target, draft, prompts[:1], stopping_criteria=[first, second], max_new_tokens=9)
    assert first.count == second.count == 4


class Watch(StoppingCriteria):
    """Stops once the processor that it watches has counted so far: what they share stays shared."""

    def __init__(self, processor, calls):
        self.processor, self.calls = processor, calls

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([self.processor.count >= self.calls])


def test_a_criterion_that_watches_a_processor():
    target, draft, prompts = uneven()
    processor = EndAfter(19)
    settings = {"logits_processor": [processor], "stopping_criteria": [Watch(processor, 7)], "max_new_tokens": 19}
    for some in (prompts[:1], prompts):
        processor.count = 0
        assert run(target, draft, some, **settings).stats.tokens == [7] * len(some)


class Holds:
    """A processor or a criterion that holds what is given."""

    def __init__(self, held):
        self.held = held

    def __call__(self, input_ids, scores):
        return torch.tensor([False]) if scores is None else scores


def test_what_cannot_be_copied_is_refused_by_name():
    target, draft, prompts = uneven()
    for given in ({"logits_processor": [Holds(threading.Lock())]}, {"stopping_criteria": [Holds(threading.Event())]}):
        with pytest.raises(ValueError, match=r"Holds in \w+ cannot be copied \(cannot pickle '_thread.lock' object\)"):
            run(target, draft, prompts, **given)
        if "logits_processor" in given:
            with pytest.raises(ValueError, match="Holds in logits_processor cannot be copied"):
                run(target, draft, prompts[:1], **given)
    assert target.calls == draft.calls == 0
    # A row alone needs no copy of its criteria: a button of an interface may hold such an event.
    given = {"stopping_criteria": [Holds(threading.Event())], "max_new_tokens": 4}
    assert run(target, draft, prompts[:1], **given).stats.tokens == [4]


def test_models_and_tokenizers_that_a_processor_holds_are_shared(bytes_tokenizer, monkeypatch):
    """Copies of them would cost more than the loop, and what they hold is no state of a text."""
    model, target = table_pair(8)
    monkeypatch.setattr(type(bytes_tokenizer), "__deepcopy__", lambda *_: 1 / 0, raising=False)
    monkeypatch.setattr(type(model), "__deepcopy__", lambda *_: 1 / 0, raising=False)
    for held in (bytes_tokenizer, model):
        out = run(target, target, [[3], [4, 5]], logits_processor=[Holds(held)], max_new_tokens=6)
        assert out.stats.tokens == [6, 6]


# -- transformers' own


IDS = torch.tensor([[3, 4, 5, 3, 4]])
# Each of the stateless ones as `generate` or a caller makes it.
MADE = {
    hf.MinLengthLogitsProcessor: lambda: hf.MinLengthLogitsProcessor(7, EOS),
    hf.MinNewTokensLengthLogitsProcessor: lambda: hf.MinNewTokensLengthLogitsProcessor(5, 3, EOS),
    hf.TemperatureLogitsWarper: lambda: hf.TemperatureLogitsWarper(0.7),
    hf.RepetitionPenaltyLogitsProcessor: lambda: hf.RepetitionPenaltyLogitsProcessor(1.5),
    hf.EncoderRepetitionPenaltyLogitsProcessor: lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, IDS),
    hf.TopPLogitsWarper: lambda: hf.TopPLogitsWarper(0.7),
    hf.TopKLogitsWarper: lambda: hf.TopKLogitsWarper(3),
    hf.TopHLogitsWarper: lambda: hf.TopHLogitsWarper(0.5),
    hf.MinPLogitsWarper: lambda: hf.MinPLogitsWarper(0.2),
    hf.TypicalLogitsWarper: lambda: hf.TypicalLogitsWarper(0.6),
    hf.EpsilonLogitsWarper: lambda: hf.EpsilonLogitsWarper(0.05),
    hf.EtaLogitsWarper: lambda: hf.EtaLogitsWarper(0.3),
    hf.NoRepeatNGramLogitsProcessor: lambda: hf.NoRepeatNGramLogitsProcessor(2),
    hf.EncoderNoRepeatNGramLogitsProcessor: lambda: hf.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
    hf.SequenceBiasLogitsProcessor: lambda: hf.SequenceBiasLogitsProcessor([[[5], -4.0], [[4, 5], 3.0]]),
    hf.NoBadWordsLogitsProcessor: lambda: hf.NoBadWordsLogitsProcessor([[5], [4, 3]], EOS),
    hf.PrefixConstrainedLogitsProcessor: lambda: hf.PrefixConstrainedLogitsProcessor(lambda b, x: [int(x[-1]), 2], 1),
    hf.ForcedBOSTokenLogitsProcessor: lambda: hf.ForcedBOSTokenLogitsProcessor(3),
    hf.ForcedEOSTokenLogitsProcessor: lambda: hf.ForcedEOSTokenLogitsProcessor(7, EOS),
    hf.InfNanRemoveLogitsProcessor: lambda: hf.InfNanRemoveLogitsProcessor(),
    hf.ExponentialDecayLengthPenalty: lambda: hf.ExponentialDecayLengthPenalty((1, 1.5), EOS, 5),
    hf.LogitNormalization: lambda: hf.LogitNormalization(),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda: hf.SuppressTokensAtBeginLogitsProcessor([3, 4], 6),
    hf.SuppressTokensLogitsProcessor: lambda: hf.SuppressTokensLogitsProcessor([3, 4]),
    hf.WatermarkLogitsProcessor: lambda: hf.WatermarkLogitsProcessor(8, "cpu"),
    MaxLengthCriteria: lambda: MaxLengthCriteria(7),
    MaxTimeCriteria: lambda: MaxTimeCriteria(1e9, initial_timestamp=1.0),
    EosTokenCriteria: lambda: EosTokenCriteria(EOS),
}


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_what_is_taken_for_stateless_answers_alike_whatever_it_was_asked_before(kind):
    """Texts that go on, go back and differ; each answer is that of one that was never asked."""
    generator, used = torch.Generator().manual_seed(0), MADE[kind]()
    for n in (1, 5, 6, 7, 9, 6, 2, 7, 5):
        text = torch.cat([IDS, torch.randint(1, 8, (1, 4), generator=generator)], 1)[:, :n]
        scores = torch.randn(1, 8, generator=generator)
        torch.testing.assert_close(used(text, scores.clone()), MADE[kind]()(text, scores.clone()), rtol=0, atol=0)


def test_stop_strings_hold_no_state(bytes_tokenizer):
    a, b, c = (bytes_tokenizer.convert_tokens_to_ids(x) for x in "abc")
    used = StopStringCriteria(bytes_tokenizer, ["abc"])
    for text, ends in (([a, b, c], True), ([a, b], False), ([c], False), ([b, a, b, c], True), ([b, c], False)):
        assert bool(used(torch.tensor([text]), None)) == ends


def test_the_list_of_stateless_ones_is_proved():
    assert set(STATELESS) == {*MADE, StopStringCriteria}


def test_all_that_generate_makes_of_a_config_is_stateless():
    """Every processor that a setting asks for and the loop does not refuse."""
    config = GenerationConfig(
        max_length=20, min_length=9, min_new_tokens=3, eos_token_id=EOS, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1,
        typical_p=0.9, epsilon_cutoff=0.01, eta_cutoff=0.01, repetition_penalty=1.2, encoder_repetition_penalty=1.2,
        no_repeat_ngram_size=2, encoder_no_repeat_ngram_size=2, bad_words_ids=[[5]], sequence_bias=[[[5], -4.0]],
        suppress_tokens=[3], begin_suppress_tokens=[3], forced_bos_token_id=2, forced_eos_token_id=EOS, do_sample=True,
        exponential_decay_length_penalty=(4, 1.5), renormalize_logits=True, remove_invalid_values=True,
    )  # fmt: skip
    made = table_pair(8)[0].generate(
        IDS, generation_config=config, prefix_allowed_tokens_fn=lambda *_: [2],
        custom_generate=lambda model, input_ids, logits_processor, **_: logits_processor,
    )  # fmt: skip
    assert len({type(p) for p in made}) > 20 and {type(p) for p in made} <= set(STATELESS)


def test_stateless_ones_cost_no_copy(monkeypatch):
    monkeypatch.setattr(LogitsProcessor, "__deepcopy__", lambda *_: 1 / 0, raising=False)
    monkeypatch.setattr(StoppingCriteria, "__deepcopy__", lambda *_: 1 / 0, raising=False)
    target, draft, prompts = uneven()
    own = {
        "logits_processor": [hf.RepetitionPenaltyLogitsProcessor(1.3)], "stopping_criteria": [MaxLengthCriteria(12)]
    }  # fmt: skip
    out = run(target, draft, prompts, no_repeat_ngram_size=2, max_new_tokens=9, **own)
    assert out.stats.tokens == [9, 8, 9, 6]


def test_synthid_remembers_the_contexts_of_its_row():
    """transformers' own processor with a state: keys are skipped for a context that came before."""
    target, draft, prompts = uneven()

    def made():
        return hf.SynthIDTextWatermarkLogitsProcessor(3, [7, 9, 11, 13], 64, 0, 8, torch.device("cpu"))

    expected = [plain(target, [p], max_new_tokens=19, logits_processor=[made()])[0] for p in prompts]
    assert outputs(run(target, draft, prompts, max_new_tokens=19, logits_processor=[made()]), prompts) == expected
    assert expected != plain(target, prompts, max_new_tokens=19)


def test_a_function_that_is_a_processor():
    """It has no state that anyone could copy."""
    target, draft, prompts = uneven()

    def prefers(input_ids, scores):
        return scores + 3.0 * (torch.arange(16) == (input_ids[:, -1:] + 1) % 16)

    settings = {"max_new_tokens": 12, "logits_processor": [prefers]}
    assert outputs(run(target, draft, prompts, **settings), prompts) == plain(target, prompts, **settings)


def test_the_draft_model_is_asked_with_the_state_of_the_text_before_it():
    """So a draft with the target's weights is always right, though a processor counts."""
    target, _, prompts = uneven()
    out = run(target, copy.deepcopy(target), prompts, logits_processor=[EndAfter(7)], max_new_tokens=18)
    assert out.stats.accepted == out.stats.drafted == [15] * 4


def test_texts_after_a_forbidden_or_ending_draft_leave_no_state():
    """The row that ends early, and one whose draft is forbidden: calls are one for each kept token."""
    model = chain(16, (2, 3), (3, EOS), (4, 5), (5, 6), (6, 7))
    mine = EndAfter(30)
    out = run(model, model, [[2]], max_new_tokens=9, eos_token_id=EOS, logits_processor=[mine])
    assert outputs(out, [[2]]) == [[3, EOS]] and mine.count == 2
    ids = torch.tensor([[4]])
    mine = EndAfter(30)
    got = speculative_generate(
        model, ids, assistant_model=model, logits_processor=[mine], max_new_tokens=6, bad_words_ids=[[6]]
    )
    assert mine.count == 6 and 6 not in got[0, 1:].tolist()
