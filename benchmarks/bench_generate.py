"""Time outside the models' forward passes in one round of sampled decoding: ours beside transformers' assisted generation.

    python benchmarks/bench_generate.py                               # the ratio measured in turn, ends in one JSON line
    pytest benchmarks/bench_tables.py                                 # a table by pytest-benchmark (the extra `bench`)

Everything that is not a model is the same size for a large model as for a small one: drawing drafts, softmaxes,
verification, bookkeeping. So the models here are tiny with a real vocabulary, V = 128,256, and their forward passes are
timed and taken off. A round is m = 5 drafts and one verification, batch 1, temperature 1, no truncation.
"""

import inspect
import json
import statistics
import time

import torch
from peers import draft_always
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cactus_kernels import speculative_generate

V, M, NEW_TOKENS = 128_256, 5, 96


def pair():
    """Two tiny Llamas; the draft is the target with noise on its output layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    target, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    target.lm_head.weight.data *= 60
    draft.load_state_dict(target.state_dict())
    draft.lm_head.weight.data += 0.1 * draft.lm_head.weight.data.std() * torch.randn_like(draft.lm_head.weight)
    for model in (target, draft):
        model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    draft_always(draft.generation_config, M)
    return target, draft


class ForwardTimer:
    """Counts a model's forward passes and the seconds in them."""

    def __init__(self, model):
        self.seconds, self.calls = 0.0, 0
        forward = model.forward

        def timed(*args, **kwargs):
            start = time.perf_counter()
            output = forward(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            return output

        timed.__signature__ = inspect.signature(forward)  # generate reads it
        model.forward = timed


def outside_forwards(way, target, draft, timers, seed):
    """Seconds outside forward passes for each forward pass of the target, over one generation."""
    torch.manual_seed(seed)
    prompt = torch.arange(1, 9)[None]
    for timer in timers:
        timer.seconds, timer.calls = 0.0, 0
    start = time.perf_counter()
    if way == "transformers":
        target.generate(
            prompt, assistant_model=draft, max_new_tokens=NEW_TOKENS, attention_mask=torch.ones_like(prompt)
        )
    else:
        speculative_generate(
            target,
            prompt,
            assistant_model=draft,
            rule=way,
            num_assistant_tokens=M,
            max_new_tokens=NEW_TOKENS,
            seed=seed,
        )
    total = time.perf_counter() - start
    return (total - sum(timer.seconds for timer in timers)) / timers[0].calls


WAYS = ["sps", "cactus", "transformers"]


def medians(rounds):
    """Median milliseconds a round outside forward passes of each way, measured in turn after one warm-up."""
    target, draft = pair()
    timers = [ForwardTimer(target), ForwardTimer(draft)]
    seconds = {way: [] for way in WAYS}
    for i in range(rounds + 1):
        for way in WAYS:
            t = outside_forwards(way, target, draft, timers, seed=i)
            if i:
                seconds[way].append(t)
    return {way: statistics.median(values) * 1e3 for way, values in seconds.items()}


def main(rounds=5):
    t = medians(rounds)
    print(
        f"torch {torch.__version__}, CPU, {torch.get_num_threads()} thread(s), median of {rounds} generations in turn"
    )
    for way in WAYS:
        print(
            f"{way:14} {t[way]:7.2f} ms a round outside forward passes, {t[way] / t['transformers']:5.2f} of transformers'"
        )
    print(json.dumps({"benchmark": "generate", "V": V, "m": M, "threads": torch.get_num_threads(), "ms_a_round": t}))


if __name__ == "__main__":
    main()
