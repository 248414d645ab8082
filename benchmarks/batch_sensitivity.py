"""How often a request's tokens depend on the batch it stands in, per token.

    python benchmarks/batch_sensitivity.py TARGET DRAFT [--tokens 64] [--batch 8] [--dtypes float32 bfloat16]

A row's random words do not depend on its batch, and its cache is its own. What is left is the models: a matrix product
over eight rows adds up in another order than one over a single row, so that logits differ in their last bits, and now and
then the larger of two nearly equal scores changes. Each request is decoded alone and in a batch, with one seed, and
compared up to the first token that differs: the rate is that of first differences per token compared, with its exact
95 % interval. Plain `generate` stands beside it for greedy decoding. The loop's difference includes that between forward
passes of one and of several tokens, since a request's rounds are the same alone and in a batch only until a draft differs.
Prints a table and ends in one JSON line.
"""

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cactus_kernels import speculative_generate

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "How many days are there in a leap year, and why do we have leap years?",
    "Explain to a child how a bicycle stays upright.",
    "List five uses of a paper clip.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show each step.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number, and describe how it works.",
    "Give me a recipe for a simple vegetable soup.",
    "Summarise the causes of the French Revolution in three sentences.",
    "What should I see in Lisbon in two days?",
    "Translate 'Where is the nearest pharmacy?' into French, Spanish and German.",
    "Why do cats purr?",
    "Describe the water cycle.",
    "Write a polite letter that asks a landlord to repair a heater.",
    "Who was Ada Lovelace, and what is she known for?",
)


def decode(model, draft, tokenizer, texts, way, tokens, seeds):
    """New tokens of each text, lists of `tokens` ids."""
    inputs = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": tokenizer.pad_token_id}
    if way == "generate, greedy":
        out = model.generate(**inputs, do_sample=False, **settings)
    else:
        whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "rule": "cactus"}
        sampled = whole if way.endswith("sampled") else {"do_sample": False}
        out = speculative_generate(model, **inputs, assistant_model=draft, seed=seeds, **sampled, **settings)
    return out[:, inputs.input_ids.shape[1] :].tolist()


def first_difference(one, other):
    """Tokens up to and with the first that differs, and whether there is one."""
    for n, (a, b) in enumerate(zip(one, other, strict=True), 1):
        if a != b:
            return n, True
    return len(one), False


def rate(differences, compared):
    """Differences per token and the exact 95 % interval of a Poisson rate."""
    low = gamma_quantile(differences, 0.025) / compared if differences else 0.0
    return differences / compared, low, gamma_quantile(differences + 1, 0.975) / compared


def gamma_quantile(shape, share):
    """x below which a gamma variable of that shape (a whole number) and scale 1 lies with probability `share`."""
    shape = torch.tensor(float(shape), dtype=torch.float64)
    low, high = torch.zeros_like(shape), 10 * shape + 10
    for _ in range(100):
        middle = (low + high) / 2
        below = torch.special.gammainc(shape, middle) < share
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.item()


def measure(target, draft, dtype, way, requests, batch, tokens):
    """One line of the table."""
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    tokenizer.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval() for path in (target, draft)]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in QUESTIONS[:requests]
    ]
    start = time.perf_counter()
    alone = [decode(*models, tokenizer, [text], way, tokens, [i])[0] for i, text in enumerate(texts)]
    together = []
    for i in range(0, requests, batch):
        seeds = list(range(i, min(i + batch, requests)))
        together += decode(*models, tokenizer, texts[i : i + batch], way, tokens, seeds)
    ends = [first_difference(a, b) for a, b in zip(alone, together, strict=True)]
    differences, compared = sum(differs for _, differs in ends), sum(n for n, _ in ends)
    value, low, high = rate(differences, compared)
    return {
        "dtype": str(dtype).removeprefix("torch."), "way": way, "requests": requests, "differences": differences,
        "compared": compared, "rate": value, "low": low, "high": high, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--requests", type=int, default=8, choices=range(1, len(QUESTIONS) + 1), metavar="N")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    print(f"batch 1 against batch {args.batch}; torch {torch.__version__}, {torch.get_num_threads()} threads, cpu")
    lines = []
    for name in args.dtypes:
        for way in ("generate, greedy", "cactus, greedy", "cactus, sampled"):
            line = measure(args.target, args.draft, getattr(torch, name), way, args.requests, args.batch, args.tokens)
            lines.append(line)
            print(
                f"{name:10} {way:18} {line['differences']:3} differences in {line['compared']:5} tokens: "
                f"{line['rate']:.1e} a token (95 %: {line['low']:.1e} to {line['high']:.1e}), {line['seconds']:.0f} s",
                flush=True,
            )
    print(json.dumps({"batch": args.batch, "tokens": args.tokens, "lines": lines}))


if __name__ == "__main__":
    main()
