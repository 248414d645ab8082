"""What a run says it took: memory, of the caches and in all."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import torch
from support.decoding import EOS, SumStops, chain, random_prompts, run, uneven
from support.models import COMMON, build

from cactus_kernels import skip_layers
from cactus_kernels.decoding import stats

HEADS = COMMON["num_key_value_heads"] * (COMMON["hidden_size"] // COMMON["num_attention_heads"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_both_caches(dtype):
    """Keys and values of as many positions as there are slots, for two rows: a draft of one layer has a third."""
    target = build("llama", dtype=dtype)
    prompts = random_prompts((3, 9), target.config.vocab_size)
    out = run(target, skip_layers(target, [0, 1]), prompts, max_new_tokens=20)
    slots, left_over = divmod(out.stats.draft_cache_bytes, 2 * 2 * HEADS * dtype.itemsize)
    assert left_over == 0 and 9 + 20 <= slots <= 9 + 20 + 2
    assert out.stats.target_cache_bytes == 3 * out.stats.draft_cache_bytes
    out = run(target, None, prompts, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert out.stats.draft_cache_bytes == 0 < out.stats.target_cache_bytes
    assert out.stats.to_dict()["target_cache_bytes"] == out.stats.target_cache_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_the_process():
    def high_water():
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return 1024 * int(line.split()[1])

    target, before = build("llama"), high_water()
    peak = run(target, target, [[3]], max_new_tokens=2).stats.peak_memory_bytes
    assert before * 0.99 <= peak <= high_water() * 1.01  # the kernel counts pages in batches


def test_peak_memory_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 17)
    assert stats.peak_memory(torch.device("cuda")) == 17
    assert stats.peak_memory(torch.device("meta")) is None
    monkeypatch.setitem(
        sys.modules, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=5))
    )
    for platform, bytes_ in (("linux", 5 * 1024), ("darwin", 5), ("win32", None)):
        monkeypatch.setattr(sys, "platform", platform)
        assert stats.peak_memory(torch.device("cpu")) == bytes_


ENDS = {
    "EOS": {"eos_token_id": [5, 6]},
    "EOS, sampled": {"eos_token_id": [5, 6], "do_sample": True, "rule": "sps", "seed": 1},
    "criterion": {"stopping_criteria": [SumStops()]},
}


@pytest.mark.parametrize("settings", ENDS.values(), ids=ENDS)
def test_drafts_after_the_end_of_a_row_are_not_counted(settings):
    """Of a draft with the target's weights every counted one is accepted, wherever in a block rows end."""
    target = uneven()[0]
    prompts = [[3], [4, 9, 9, 2], [15, 11], [7, 3, 12, 4, 5, 6], [2], [8]]
    for count in (1, 4, 7):
        out = run(target, target, prompts, max_new_tokens=21, num_assistant_tokens=count, **settings)
        assert out.stats.drafted == out.stats.accepted and out.stats.acceptance_rate == 1
        ended_early = sum(out.stats.tokens) < sum(out.stats.accepted) + sum(out.stats.rounds)
        assert ended_early or count == 1


def test_drafts_that_the_target_ends_a_row_before_are_counted():
    """The draft goes on where the target says EOS: its tokens were rejected."""
    target, draft = chain(8, (2, 3), (3, EOS)), chain(8, (2, 3), (3, 4), (4, 5))
    out = run(target, draft, [[2]], max_new_tokens=9, num_assistant_tokens=5, eos_token_id=EOS)
    assert out.stats.tokens == [2] and (out.stats.drafted, out.stats.accepted) == ([5], [1])
