"""Tokens a second, whole: a draft that is cheap and good beside a target that is dear, and the peers that run here.

    python benchmarks/bench_heavy_twin.py              # a table for one request and for eight, ends in one JSON line

The "heavy twin": a Llama of hidden size 512 and V = 8,192 whose first 2 layers are the draft, too, and whose other 34 are
silent (their output projections are zero), so that it costs eighteen times the draft and follows the same law; noise of
0.3 sigma on the draft's output layer sets how much of it the draft knows. Random weights: the speed is real, the text is
not. Temperature 1, no truncation, 5 drafts a round, 128 new tokens for one request and 64 each for eight, medians over 5
generations in turn, each way with another seed in each.

Peers: transformers' own `generate`, plain and assisted (one row alone: it refuses batches), and flashspec and economize
where they are installed.
"""

import argparse
import copy
import importlib.util
import json
import statistics
import tempfile
import time

import torch
from peers import draft_always
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cactus_kernels import speculative_generate

V, M, SILENT = 8_192, 5, 34
NEW_TOKENS = {1: 256, 8: 64}  # by the number of requests
HEAD_SCALE, HEAD_NOISE = 6.0, 0.3
SLOW = 60.0  # seconds


def pair(silent=SILENT):
    """The target and its draft."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": V, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2 + silent, **settings)).eval()
    draft = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **settings)).eval()
    with torch.no_grad():
        target.lm_head.weight.mul_(HEAD_SCALE)
        for layer in target.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        draft.load_state_dict(target.state_dict(), strict=False)
        noise = torch.randn_like(draft.lm_head.weight)
        draft.lm_head.weight.add_(HEAD_NOISE * draft.lm_head.weight.std() * noise)
    for model in (target, draft):
        model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    return target, draft


def prompts(rows):
    """Left-padded rows of 8, 12, 16, ... tokens: input_ids and attention_mask, int64 [rows, P]."""
    lengths = [8 + 4 * b for b in range(rows)]
    ids = torch.randint(1, V, (rows, max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


@torch.no_grad()
def overlap(target, draft):
    """Sum of min(p, q) on average over random text: the chance that SpS accepts a draft."""
    ids = torch.randint(1, V, (4, 64), generator=torch.Generator().manual_seed(2))
    return torch.minimum(target(ids).logits.softmax(-1), draft(ids).logits.softmax(-1)).sum(-1).mean().item()


def ours(rule, target, draft):
    def generate(ids, mask, seed):
        return speculative_generate(
            target, ids, attention_mask=mask, assistant_model=draft, rule=rule, num_assistant_tokens=M, seed=seed,
            max_new_tokens=NEW_TOKENS[len(ids)],
        )  # fmt: skip

    return generate


def plain(target, draft):
    def generate(ids, mask, seed):
        torch.manual_seed(seed)
        return target.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS[len(ids)])

    return generate


def assisted(target, draft, always):
    """always: whether it drafts M tokens in every round; else it decides, by the draft's confidence."""
    config = copy.deepcopy(draft.generation_config)
    if always:
        draft_always(config, M)

    def generate(ids, mask, seed):
        draft.generation_config = config
        torch.manual_seed(seed)
        return target.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS[len(ids)], assistant_model=draft)

    return generate


def flashspec(target, draft):
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import HuggingFaceDrafter, TargetModel

    cpu = torch.device("cpu")
    verifier = TargetModel("target", cpu, torch.float32, model=target)
    drafter = HuggingFaceDrafter("draft", cpu, torch.float32, model=draft)

    def generate(ids, mask, seed):
        sampling = SamplingConfig(temperature=1.0, gamma=M, seed=seed)
        config = FlashSpecConfig(
            device="cpu", compile=False, drafter_strategy="bandit", bandit=BanditConfig(n_arms=1), sampling=sampling
        )
        engine = SpeculativeEngine(config, [drafter], verifier)
        return engine.generate(ids, max_new_tokens=NEW_TOKENS[len(ids)]).output_ids

    return generate


def economize(target, draft):
    import economize
    from economize.techniques.draft_model import DraftModelConfig

    with tempfile.TemporaryDirectory() as directory:
        draft.save_pretrained(directory)
        model = economize.apply(target, DraftModelConfig(model=directory))

    def generate(ids, mask, seed):
        rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
        sampler = economize.TopPSampler(temperature=1.0, top_p=1.0, seed=seed, device="cpu")
        decoding = economize.DecodeConfig(cycle_length=M + 1, verifier="rejection")
        return model.decode_batch(rows, NEW_TOKENS[len(ids)], decoding=decoding, selector=sampler)

    return generate


def ways(target, draft):
    """Each way to generate, by its name; and why others are left out."""
    found = {
        "plain generate": plain(target, draft),
        "assisted, 5 drafts": assisted(target, draft, always=True),
        "assisted, as it comes": assisted(target, draft, always=False),
        "sps": ours("sps", target, draft),
        "cactus, delta 1": ours("cactus", target, draft),
    }
    missing = []
    for peer in (flashspec, economize):
        name = peer.__name__
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name} is not installed")
        else:
            found[name] = peer(target, draft)
    return found, missing


def tokens_per_second(found, rows, rounds, target):
    """Medians over generations in turn after one warm-up: tokens a second of each way, None where it refuses the batch; tokens of
    a request for each forward pass of the target; and why a way refuses.

    What takes over a minute is timed once.
    """
    ids, mask = prompts(rows)
    seconds, forwards, refused = {name: [] for name in found}, {name: [] for name in found}, {}
    calls = []
    hook = target.register_forward_hook(lambda *_: calls.append(1))
    for i in range(rounds + 1):
        for name, generate in found.items():
            if name in refused or (seconds[name] and seconds[name][0] > SLOW):
                continue
            calls.clear()
            start = time.perf_counter()
            try:
                generate(ids, mask, seed=i)
            except (ValueError, NotImplementedError) as error:
                refused[name] = str(error).splitlines()[0]
                continue
            taken = time.perf_counter() - start
            if i or taken > SLOW:
                seconds[name].append(taken)
                forwards[name].append(len(calls))
    hook.remove()
    rates = {name: rows * NEW_TOKENS[rows] / statistics.median(s) if s else None for name, s in seconds.items()}
    per_forward = {name: NEW_TOKENS[rows] / statistics.mean(f) if f else None for name, f in forwards.items()}
    return rates, per_forward, refused


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--silent", type=int, default=SILENT, help="silent layers of the target")
    arguments = parser.parse_args()
    target, draft = pair(arguments.silent)
    found, missing = ways(target, draft)
    result = {
        "benchmark": "heavy twin",
        "overlap": overlap(target, draft),
        "threads": torch.get_num_threads(),
        "rates": {},
        "tokens_per_forward": {},
    }
    print(f"torch {torch.__version__}, CPU, {result['threads']} thread(s), overlap {result['overlap']:.2f}")
    for line in missing:
        print(f"skipped: {line}")
    for rows in NEW_TOKENS:
        rates, per_forward, refused = tokens_per_second(found, rows, arguments.rounds, target)
        print(f"\n{rows} request{'s' if rows > 1 else ''}, medians of {arguments.rounds}")
        for name, rate in rates.items():
            if rate is None:
                print(f"{name:22} refused: {refused[name]}")
            else:
                print(
                    f"{name:22} {rate:8.1f} tokens/s {rate / rates['plain generate']:6.2f} x plain generate "
                    f"{per_forward[name]:6.2f} tokens a forward pass"
                )
        result["rates"][rows], result["tokens_per_forward"][rows] = rates, per_forward
    print(json.dumps(result))


if __name__ == "__main__":
    main()
