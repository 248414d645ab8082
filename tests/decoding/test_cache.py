"""Logits over ragged rows with rollbacks, against the plain forward of each row's own text."""

import random
import shutil

import pytest
import torch
import transformers
from support import flash
from support.decoding import Widths
from support.models import COMMON, FAMILIES, V, build
from support.refused import (
    SMALL_BERT,
    SMALL_MAMBA,
    SMALL_NEO,
    SMALL_NEXT,
    SMALL_T5,
    flex_on_two_devices,
    model_of,
    with_attention,
)  # fmt: skip
from torch.nn.attention.flex_attention import create_mask
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from cactus_kernels.decoding.cache.masks import BLOCK, block_mask, visible_slots
from cactus_kernels.decoding.cache.rollback import SMALLEST_CAPACITY, RollbackModel
from cactus_kernels.decoding.cache.support import max_positions

PROMPTS = (3, 17, 9, 1)
B = len(PROMPTS)
# Inside, transformers rounds to fp32 in norms, rotary tables and the eager softmax. A wrong slot costs about 1.
TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-4}


def left_padded(rows: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids, positions [B, T] of rows given as (tokens, position of the first)."""
    width = max(len(tokens) for tokens, _ in rows)
    ids, positions = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -1)
    for b, (tokens, start) in enumerate(rows):
        ids[b, width - len(tokens) :] = tokens
        positions[b, width - len(tokens) :] = torch.arange(start, start + len(tokens))
    return ids, positions


def random_tokens(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randint(3, V, shape, generator=torch.Generator().manual_seed(seed))


def plain_logits(model, texts: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=text[None]).logits for text in texts])


def prefilled(model, texts: torch.Tensor, max_length: int = 128) -> RollbackModel:
    rollback = RollbackModel(model, B, max_length)
    ids, positions = left_padded([(texts[b, :n], 0) for b, n in enumerate(PROMPTS)])
    rollback(ids, positions, length=max(PROMPTS))
    return rollback


CHUNK = 5
FORWARD_CASES = [
    (family, attention, dtype, "slots")
    for family in FAMILIES
    for attention in ("sdpa", "eager")
    for dtype in TOLERANCE
    # transformers has no sdpa for Gemma 2: it caps the scores of the attention.
    if (family, attention) != ("gemma2", "sdpa")
]
FORWARD_CASES += [
    (family, attention, torch.float64, how)
    for family, attention in (("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gemma3", "sdpa"))
    for how in ("chunks", "aligned", "flash")
    # transformers' eager mask of a row that is all padding is nothing but -inf in float64.
    if (attention, how) != ("eager", "aligned")
]
FORWARD_CASES += [
    (family, "flex_attention", torch.float64, how)
    for family, how in (("llama", "slots"), ("mistral", "slots"), ("gemma2", "slots"), ("gemma3", "chunks"))
]


# What the dtype changes is what a family's attention does with masks; of every family in the slow tier.
FLOAT32 = ("llama", "gemma2", "gemma3", "gpt2")
FORWARD_CASES = [
    case if case[2] != torch.float32 or case[0] in FLOAT32 else pytest.param(*case, marks=pytest.mark.slow)
    for case in FORWARD_CASES
]


def short(value) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family, attention, dtype, how", FORWARD_CASES, ids=short)
def test_logits_are_those_of_the_plain_forward(family, attention, dtype, how, monkeypatch):
    """Aligned as for flash attention, whose layout other kinds of attention take as well."""
    model = build(family, attention, dtype)
    if family == "gpt2" and attention == "eager" and any(buffer.dim() == 4 for buffer in model.buffers()):
        pytest.skip("in this transformers GPT-2 has a mask by slot in eager attention, which is refused")
    length = 72
    texts = random_tokens((B, length))
    expected = plain_logits(model, texts)
    if how == "flash":
        flash.install(monkeypatch)
        model.config._attn_implementation = "flash_attention_2"
    rollback = RollbackModel(model, B, length + 4, CHUNK if how == "chunks" else None)
    rollback.aligned |= how == "aligned"
    rng = random.Random(0)
    blocks = [(0, n, 0) for n in PROMPTS]
    done = [0] * B
    rounds = rolled_back = 0
    while min(done) < length:
        rows = []
        for b, (start, right, wrong) in enumerate(blocks):
            drafts = random_tokens((wrong,), seed=rounds * B + b)
            rows.append((torch.cat([texts[b, start : start + right], drafts]), start))
        ids, positions = left_padded(rows)
        logits = rollback(ids, positions, length=int(positions.max()) + 1)
        assert logits.isfinite().all()
        for b, (start, right, wrong) in enumerate(blocks):
            end = logits.shape[1] - wrong
            torch.testing.assert_close(
                logits[b, end - right : end], expected[b, start : start + right], rtol=0, atol=TOLERANCE[dtype]
            )
            done[b] = max(done[b], start + right)
            rolled_back += wrong > 0
        rounds += 1
        blocks = []
        for n in done:
            start = n - rng.randint(0, min(n, 3))
            right = min(length, n + rng.randint(1, 3)) - start
            idle = n == length or rng.random() < 0.1
            blocks.append((0, 0, 0) if idle else (start, right, rng.randint(0, 4)))
        if all(right == 0 for _, right, _ in blocks):
            blocks[0] = (0, 1, 0)
    assert rolled_back > 50


ONE_ROW_CASES = [
    (family, "eager" if family == "gemma2" else attention, how)
    for family in ("llama", "mistral", "gemma2", "gemma3", "gpt-neox")
    for attention in ("sdpa", "eager")
    for how in ("slots", "chunks", "aligned")
    if family != "gemma2" or attention == "eager"
]
ONE_ROW_CASES += [("gemma3", "flex_attention", how) for how in ("slots", "chunks")]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family, attention, how", ONE_ROW_CASES, ids=short)
def test_one_row_without_positions(family, attention, how):
    """Blocks of 1 to 9 tokens, the last ones wrong and written over; past the capacity that was allocated first."""
    model = build(family, attention, torch.float64)
    length = 150 if family in ("llama", "gemma3") and attention == "sdpa" else 80
    text = random_tokens((1, length))
    expected = plain_logits(model, text)[0]
    rollback = RollbackModel(model, 1, length + 4, CHUNK if how == "chunks" else None)
    rollback.aligned |= how == "aligned"
    rng, done, wrong = random.Random(0), 0, 0
    while done < length:
        start = max(done - rng.randint(0, 3), 0)
        right = min(length, done + rng.choice((1, 1, 2, 5, 9))) - start
        tokens = torch.cat([text[:, start : start + right], random_tokens((1, wrong), seed=done)], 1)
        logits = rollback(tokens, None, length=start + right + wrong, logits_to_keep=right + wrong)[0, :right]
        torch.testing.assert_close(logits, expected[start : start + right], rtol=0, atol=TOLERANCE[torch.float64])
        done, wrong = start + right, rng.randint(0, 4)
    assert rollback.slots.capacity > SMALLEST_CAPACITY
    with pytest.raises(ValueError, match=r"positions \(1, 1\) must both be \[2, T\]"):
        RollbackModel(model, 2, 9)(text[:, :1], None, length=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_finished_rows_leave_the_others_unchanged(family, attention):
    model = build(family, attention)
    texts = random_tokens((B, 40))
    running, finishing = prefilled(model, texts), prefilled(model, texts)
    lengths = list(PROMPTS)
    for _ in range(6):
        rows = [(texts[b, n : n + 3], n) for b, n in enumerate(lengths)]
        lengths = [n + 3 for n in lengths]
        ids, positions = left_padded(rows)
        expected = running(ids, positions, length=max(lengths))
        positions[[1, 3]] = -1
        got = finishing(ids, positions, length=max(lengths))
        assert torch.equal(got[[0, 2]], expected[[0, 2]])
        assert got.isfinite().all()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "family, attention", [("llama", "sdpa"), ("mistral", "sdpa"), ("gpt2", "sdpa"), ("mistral", "flex_attention")]
)
def test_what_lies_past_a_row_is_never_seen(family, attention):
    model = build(family, attention)
    texts = random_tokens((B, 40))
    clean, poisoned = prefilled(model, texts), prefilled(model, texts)
    for layer in poisoned.cache.layers:
        for b, n in enumerate(PROMPTS):
            layer.keys[b, :, n + 1 :] = 1e4
            layer.values[b, :, n + 1 :] = 1e4
        layer.keys[:, :, 0] = layer.values[:, :, 0] = 1e4
    ids, positions = left_padded([(texts[b, n : n + 2 + b], n) for b, n in enumerate(PROMPTS)])
    real = positions >= 0
    assert torch.equal(clean(ids, positions, length=20)[real], poisoned(ids, positions, length=20)[real])


def test_a_model_is_ready_for_another_batch_at_once():
    model = build("llama")
    used = prefilled(model, random_tokens((B, 40), seed=1))
    texts = random_tokens((B, 12), seed=2)
    positions = torch.arange(12).expand(B, 12)
    torch.testing.assert_close(used(texts, positions, length=12), plain_logits(model, texts), rtol=0, atol=1e-6)


def test_buffers_grow_by_doubling_up_to_max_length():
    model = build("llama")
    texts = random_tokens((2, 250))
    expected = plain_logits(model, texts)
    rollback = RollbackModel(model, 2, 250)
    capacities = []
    for start in range(0, 250, 10):
        positions = torch.arange(start, start + 10).expand(2, 10)
        logits = rollback(texts[:, start : start + 10], positions, length=start + 10)
        torch.testing.assert_close(logits, expected[:, start : start + 10], rtol=0, atol=1e-6)
        sizes = {buffer.shape[2] for layer in rollback.cache.layers for buffer in (layer.keys, layer.values)}
        assert len(sizes) == 1
        capacities.append(sizes.pop())
    assert sorted(set(capacities)) == [SMALLEST_CAPACITY, 2 * 71, 251]
    assert capacities == sorted(capacities)


def test_no_more_than_max_length_is_allocated():
    rollback = prefilled(build("llama"), random_tokens((B, 20)), max_length=17)
    assert rollback.cache.layers[0].keys.shape == (B, 2, 18, 8)


def test_logits_to_keep_keeps_the_last_columns():
    rollback = prefilled(build("llama"), random_tokens((B, 20)))
    ids, positions = left_padded([(random_tokens((2 + b,)), n) for b, n in enumerate(PROMPTS)])
    whole = rollback(ids, positions, length=21)
    last = rollback(ids, positions, length=21, logits_to_keep=2)
    assert whole.shape == (B, 5, V)
    torch.testing.assert_close(last, whole[:, -2:], rtol=0, atol=1e-9)


def test_inputs_stay_and_ids_of_padding_do_not_matter():
    model = build("llama")
    texts = random_tokens((B, 20))
    rollback = prefilled(model, texts)
    ids, positions = left_padded([(texts[b, n : n + 1 + b], n) for b, n in enumerate(PROMPTS)])
    expected = rollback(ids, positions, length=20)
    ids[positions < 0] = -100
    before = ids.clone(), positions.clone()
    assert torch.equal(rollback(ids, positions, length=20), expected)
    assert torch.equal(ids, before[0]) and torch.equal(positions, before[1])


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_visible_slots(window):
    positions = torch.tensor([[-1, 0, 1], [4, 5, 6], [-1, -1, -1]])
    got = visible_slots(positions, 8, window)
    assert got.shape == (3, 1, 3, 8) and got.dtype == torch.bool
    for b, row in enumerate(positions.tolist()):
        for i, t in enumerate(row):
            first = 0 if window is None else max(0, t - window + 1)
            seen = {0} if t < 0 else {s + 1 for s in range(first, t + 1)}
            assert {slot for slot in range(8) if got[b, 0, i, slot]} == seen


@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_blocks_of_flex_attention_hold_what_is_visible(window):
    """In none of its blocks too much or too little, against the dense mask: torch's formula for a CPU reads no blocks."""
    rows = {
        "round": [(5, -1), (2, 300), (0, -1), (5, 200)],
        "one column": [(1, 0), (1, 126), (1, 127), (1, 511)],
        "prompts": [(300, 0), (7, 0), (128, 0), (129, 0)],
        "a chunk": [(256, 100), (0, -1), (100, 412), (256, 255)],
    }
    found = set()
    for case in rows.values():
        _, positions = left_padded([(torch.zeros(n), start) for n, start in case])
        T, used = positions.shape[1], int(positions.max()) + 2
        mask = block_mask(positions, used, window)
        assert mask.shape == (B, 1, T, used)
        expected = visible_slots(positions, used, window)
        assert torch.equal(create_mask(mask.mask_mod, B, 1, T, used, device="cpu"), expected)
        partial, full = (
            [
                [set(row[:n]) for row, n in zip(*lists, strict=True)]
                for lists in zip(i.tolist(), n.tolist(), strict=True)
            ]
            for i, n in (
                (mask.kv_indices[:, 0], mask.kv_num_blocks[:, 0]),
                (mask.full_kv_indices[:, 0], mask.full_kv_num_blocks[:, 0]),
            )
        )
        for b in range(B):
            for i in range(0, T, BLOCK):
                for j in range(0, used, BLOCK):
                    block = expected[b, 0, i : i + BLOCK, j : j + BLOCK]
                    whole = block.shape[1] == BLOCK and bool(block.all())
                    kind = "full" if whole else "partial" if block.any() else "unseen"
                    found.add(kind)
                    assert (j // BLOCK in full[b][i // BLOCK]) == (kind == "full")
                    assert (j // BLOCK in partial[b][i // BLOCK]) == (kind == "partial")
    assert found == {"partial", "unseen"} | ({"full"} if window in (None, 300) else set())


@pytest.mark.slow
def test_flex_attention_compiled(device):
    """In batches of several sizes, without as many graphs as make torch give up compiling."""
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch compiles for a CPU with a C++ compiler")
    sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "max_position_embeddings": 512}
    model = build("gemma3", "flex_attention", torch.float32, **sizes).to(device)
    texts = random_tokens((4, 300))
    expected = plain_logits(build("gemma3", "sdpa", torch.float32, **sizes), texts)
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for prompts in ((200, 5, 130, 77), (120, 3), (250,), (100, 100)):
            rollback, ends = RollbackModel(model, len(prompts), 300), [0] * len(prompts)
            for widths in (prompts, (2, 5, 1, 3), (1, 1, 1, 1), (2, 0, 1, 1), (40, 30, 20, 10), (1, 1, 1, 1)):
                starts = [max(end - 1, 0) for end in ends]
                ends = [start + width for start, width in zip(starts, widths, strict=False)]
                rows = [(texts[b, start:end], start) for b, (start, end) in enumerate(zip(starts, ends, strict=True))]
                ids, positions = left_padded(rows)
                logits = rollback(ids.to(device), positions.to(device), length=max(ends)).cpu()
                for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
                    torch.testing.assert_close(
                        logits[b, logits.shape[1] - (end - start) :], expected[b, start:end], rtol=0, atol=1e-4
                    )


class Bigram(PreTrainedModel):
    """A table of logits by the last token: no attention, no use of the cache."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.randn(V, V, generator=torch.Generator().manual_seed(0)))

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        return CausalLMOutput(logits=self.table[input_ids])


def bigram() -> Bigram:
    return Bigram(transformers.PretrainedConfig(vocab_size=V, num_hidden_layers=1))


def test_a_model_without_attention_passes_through():
    model = bigram()
    rollback = RollbackModel(model, B, 10**9)
    ids, positions = left_padded([(random_tokens((4 + b,), seed=b), 0) for b in range(B)])
    assert max_positions(model) is None
    assert torch.equal(rollback(ids, positions, length=7), model.table[ids])
    assert torch.equal(rollback(ids, positions, length=7, logits_to_keep=3), model.table[ids[:, -3:]])
    assert not rollback.cache.layers


def with_quantized_cache():
    model = build("llama")
    model.generation_config.cache_implementation = "quantized"
    return model


def without_positions():
    model = bigram()
    model.forward = lambda input_ids, cache=None: None
    return model


def without_cache():
    model = bigram()
    model.forward = lambda input_ids, position_ids=None: None
    return model


SET_SDPA = r".*call model.set_attn_implementation\(\"sdpa\"\)"
REFUSED = {
    "no head": (lambda: model_of("LlamaModel", **COMMON), "LlamaModel is not .* AutoModelForCausalLM"),
    "encoder": (lambda: model_of("BertForMaskedLM", **SMALL_BERT), "BertForMaskedLM is not .* AutoModelForCausalLM"),
    "encoder-decoder": (lambda: model_of("T5ForConditionalGeneration", **SMALL_T5), "T5.* is not a decoder-only"),
    "recurrent": (lambda: model_of("MambaForCausalLM", **SMALL_MAMBA), "Mamba.* recurrent, hybrid .*use a model whose"),
    "hybrid": (lambda: model_of("Qwen3NextForCausalLM", **SMALL_NEXT), "Qwen3Next.* recurrent, hybrid .*linear_atten"),
    "flex on two devices": (flex_on_two_devices, r"LlamaForCausalLM are on several devices \(0, 1\)" + SET_SDPA),
    "paged attention": (lambda: with_attention("paged|sdpa"), r"'paged\|sdpa'" + SET_SDPA),
    "paged flash": (lambda: with_attention("paged|flash_attention_2"), r"'paged\|flash_attention_2'" + SET_SDPA),
    "no positions": (without_positions, "takes input_ids, cache, and must take position_ids"),
    "no cache": (without_cache, "takes input_ids, position_ids, and must take .* past_key_values"),
    "mask by slot": (
        lambda: model_of("GPTNeoForCausalLM", **SMALL_NEO),
        "mask of its own by slot .* use another model",
    ),
    "alibi": (lambda: model_of("FalconForCausalLM", **SMALL_BERT, alibi=True), "Falcon.* positions of its own .ALiBi"),
    "roberta": (lambda: model_of("RobertaForCausalLM", **SMALL_BERT, is_decoder=True), "Roberta.* from the padding"),
    "quantized cache": (with_quantized_cache, "cache_implementation is 'quantized'.* set it to None"),
}


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_refusals_say_what_came_and_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        RollbackModel(make(), 1, 257)


@pytest.mark.parametrize(
    "ids, positions, length, message",
    [
        ((3, 2), (3, 2), 2, r"must both be \[2, T\]"),
        ((2, 2), (2, 3), 2, r"input_ids \(2, 2\) and positions \(2, 3\)"),
        ((2, 2), (2, 2), 21, "length is 21, not in 0 .. 20"),
        ((2, 2), (2, 2), -1, "length is -1, not in 0 .. 20"),
    ],
    ids=["rows", "columns", "too long", "negative"],
)
def test_wrong_calls_are_refused(ids, positions, length, message):
    rollback = RollbackModel(bigram(), 2, 20)
    with pytest.raises(ValueError, match=message):
        rollback(torch.zeros(ids, dtype=torch.int64), torch.zeros(positions, dtype=torch.int64), length=length)


@pytest.mark.parametrize(
    "prompts, chunk, calls",
    [
        ((9, 9), None, [(9, None)]),
        ((9, 9), 4, [(4, None), (4, (2, 1, 4, 9)), (1, (2, 1, 1, 10))]),
        ((9, 3), None, [(9, (2, 1, 9, 10))]),
        ((9, 3), 4, [(4, (2, 1, 4, 5)), (4, (2, 1, 4, 9)), (1, (2, 1, 1, 10))]),
    ],
    ids=["even", "even, chunks", "ragged", "ragged, chunks"],
)
def test_masks_are_no_larger_than_they_must_be(prompts, chunk, calls):
    """None where the model needs none to see a prompt causally, and never more than a chunk's."""
    model = build("llama")
    texts = random_tokens((2, 9))
    ids, positions = left_padded([(texts[b, :n], 0) for b, n in enumerate(prompts)])
    expected = [plain_logits(model, texts[b : b + 1, :n])[0] for b, n in enumerate(prompts)]
    seen = Widths(model)
    for keep in (1, 3, 6, 0):
        logits = RollbackModel(model, 2, 20, chunk)(ids, positions, length=9, logits_to_keep=keep)
        assert logits.shape == (2, keep or 9, V)
        for b, n in enumerate(prompts):
            last = min(keep or 9, n)
            torch.testing.assert_close(logits[b, -last:], expected[b][-last:], rtol=0, atol=1e-6)
        assert seen.calls == calls
        seen.calls.clear()
