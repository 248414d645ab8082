"""What a run of the command checks of its prompt."""

import pytest
from support.models import build

from cactus_kernels import Cactus
from cactus_kernels.tools.pair import ModelPair
from cactus_kernels.tools.runs import RunSettings, encode, run_speculative


def test_a_prompt_has_to_leave_room_in_the_targets_table_of_positions(bytes_tokenizer):
    """No other position is a limit: neither the draft's, nor those that a model computes."""
    V = len(bytes_tokenizer)
    table, computed = (
        build("gpt2", n_positions=16, vocab_size=V),
        build("llama", max_position_embeddings=16, vocab_size=V),
    )
    settings = RunSettings(rule=Cactus(1.0), seed=1, max_new_tokens=8)
    pair = ModelPair(table, computed, bytes_tokenizer, "", "")
    for prompt, advice in (("a" * 10, "use --max-new-tokens 7 or less"), ("a" * 20, "shorten it")):
        with pytest.raises(
            ValueError, match=f"the prompt is too long: .* more than the 16 positions of the target: {advice}"
        ):
            encode(pair, prompt, settings)
    assert encode(pair, "a" * 9, settings).shape == (1, 9)
    for target, draft, length in ((table, computed, 9), (computed, table, 10), (computed, table, 20)):
        pair = ModelPair(target, draft, bytes_tokenizer, "", "")
        run = run_speculative(pair, encode(pair, "a" * length, settings), settings)
        assert 0 < len(run.token_ids) <= 8
    assert encode(pair, "a" * 40, settings).shape == (1, 40)
