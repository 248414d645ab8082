"""The embedded pair is what its users rely on: one vocabulary, small files, a target better than its draft, a real overlap."""

import pytest

pytest.importorskip("transformers")

import torch

from cactus_kernels.tools.pair import ASSETS, embedded_pair

MAX_BYTES = 8_000_000

# Written for this test, in the form of the training text but not taken from it.
PROBLEMS = [
    "Question: A florist ties 9 bunches of tulips with 6 tulips in each bunch. She gives 14 tulips to the school. How many "
    "tulips does she have left?\nAnswer: The florist has 9 * 6 = 54 tulips.\nShe has 54 - 14 = 40 tulips left.\n#### 40",
    "Question: Omar walks 3 miles to work and 3 miles back home every day, 5 days a week. How many miles does he walk in 4 "
    "weeks?\nAnswer: Omar walks 3 + 3 = 6 miles a day.\nHe walks 6 * 5 = 30 miles a week.\nSo in 4 weeks he walks 30 * 4 = "
    "120 miles.\n#### 120",
    "Question: A ticket for the zoo costs $12 for an adult and half as much for a child. How much do 2 adults and 3 children "
    "pay?\nAnswer: A child's ticket costs $12 / 2 = $6.\nThe adults pay $12 * 2 = $24.\nThe children pay $6 * 3 = $18.\n"
    "They pay $24 + $18 = $42 in total.\n#### 42",
]


@pytest.fixture(scope="module")
def pair():
    return embedded_pair()


def log_probabilities(model, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] log-probabilities of the tokens that follow the first T ones of `ids`, [1, T + 1]."""
    with torch.no_grad():
        return model(ids[:, :-1]).logits[0].log_softmax(-1)


def test_pair_loads_ready_to_use(pair):
    model, assistant_model, tokenizer = pair
    assert model.config.vocab_size == assistant_model.config.vocab_size == len(tokenizer) >= 2048
    assert assistant_model.num_parameters() < model.num_parameters() / 5
    for m in (model, assistant_model):
        assert not m.training
        assert m.dtype == torch.float32
        assert m.device == torch.device("cpu")


def test_dtype_is_an_argument():
    model, assistant_model, _ = embedded_pair(dtype=torch.bfloat16, device="cpu")
    assert model.dtype == assistant_model.dtype == torch.bfloat16


def test_files_stay_small():
    assert sum(f.stat().st_size for f in ASSETS.rglob("*") if f.is_file()) <= MAX_BYTES


def test_generation_samples_as_the_paper_does(pair):
    *models, tokenizer = pair
    for m in models:
        config = m.generation_config
        assert config.do_sample is True
        assert (config.top_k, config.top_p, config.temperature) == (20, 0.95, 0.6)
        assert config.eos_token_id == config.bos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text",
    [*PROBLEMS, "", "two  spaces\n\n\ttab , and this", "naïve café, Δ ≤ 0.5, 数学, 🌵", "\x00\x7f \u2028 e\u0301"],
    ids=["florist", "walk", "zoo", "empty", "spaces", "unicode", "control"],
)
def test_tokenizer_round_trips(pair, text):
    tokenizer = pair[2]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_pads_on_the_left(pair):
    tokenizer = pair[2]
    batch = tokenizer(["Question", PROBLEMS[0]], padding=True, return_tensors="pt")
    padded = batch["attention_mask"][0] == 0
    assert padded[0] and not padded[-1]
    assert torch.equal(batch["input_ids"][0] == tokenizer.pad_token_id, padded)


def test_target_beats_draft_and_overlaps_it(pair):
    model, assistant_model, tokenizer = pair
    losses, overlaps = [], []
    for problem in PROBLEMS:
        ids = tokenizer(problem + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        log_q, log_p = log_probabilities(model, ids), log_probabilities(assistant_model, ids)
        losses.append([torch.nn.functional.nll_loss(log, ids[0, 1:]).item() for log in (log_q, log_p)])
        overlaps.append(torch.minimum(log_q, log_p).exp().sum(-1))
    assert all(q_loss < p_loss for q_loss, p_loss in losses), losses
    assert 0.5 <= torch.cat(overlaps).mean().item() <= 0.85


def test_greedy_continuation_is_text(pair):
    model, _, tokenizer = pair
    prompt = tokenizer("Question: Lena picked 8 apples on Monday and", return_tensors="pt")
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in text
    assert len(text.split()) >= 10 and sum(c.isalnum() or c in " .,?$\n" for c in text) > 0.9 * len(text)
