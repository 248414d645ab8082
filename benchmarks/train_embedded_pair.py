"""Train the embedded model pair, `cactus_kernels/assets/`, from the training text of GSM8K.

The pair has to be small enough to travel inside the package and good enough that its acceptance rates mean something: a
target that writes readable word problems, and a draft that agrees with it about as often as a real draft does. So the target
is trained on the text, and the draft mostly on the target's own distributions.

    python benchmarks/train_embedded_pair.py --text gsm8k_train.jsonl --heldout gsm8k_test.jsonl --out pair

Each JSON line of the texts has a `question` and an `answer`. The held-out text is only measured on: a schedule that is fixed
beforehand decides when training stops. Seeds are fixed; the last bits still depend on the number of threads. Prints the
held-out loss of every epoch (of its first 200 documents), a sample, and one JSON line of figures measured on the files as
stored. Everything is written beside OUT first, and OUT appears, complete, at the end.

glibc hands the memory of large tensors back after every use; `MALLOC_MMAP_THRESHOLD_=17179869184
MALLOC_TRIM_THRESHOLD_=17179869184` in the environment keeps it, which makes a step faster and changes no result.
"""

import argparse
import contextlib
import json
import math
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
EOS, PAD = "<|endoftext|>", "<|pad|>"
ROW_TOKENS = 512
BATCH_ROWS = 8
IGNORED = -100
SAMPLE_PROMPT = "Question: Maria has 5 boxes of pencils."


@dataclass(frozen=True)
class Recipe:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    epochs: int
    learning_rate: float
    weight_decay: float
    dropout: float
    distilled: float  # share of the loss taken from the teacher's distribution, the rest from the text
    seed: int


# Few wide layers rather than many narrow ones: on a CPU a step of 4 x 256 takes 30 % less time than one of 8 x 192, as large.
TARGET = Recipe(256, 4, 4, 2, 704, epochs=4, learning_rate=3e-3, weight_decay=0.1, dropout=0.1, distilled=0.0, seed=1)
DRAFT = Recipe(96, 2, 3, 1, 256, epochs=5, learning_rate=5e-3, weight_decay=0.1, dropout=0.0, distilled=0.9, seed=2)


def read_documents(path: Path) -> list[str]:
    """One text for each problem, without the calculator annotations `<<48/2=24>>`."""
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        f"Question: {p['question'].strip()}\nAnswer: {re.sub(r'<<.*?>>', '', p['answer']).strip()}{EOS}"
        for p in problems
    ]


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text round-trips; digits stay apart, so arithmetic is done on digits."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((d.removesuffix(EOS) for d in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=2 * ROW_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def pack(documents: list[list[int]], pad: int, generator: torch.Generator) -> torch.Tensor:
    """Whole documents into rows [R, ROW_TOKENS], first fit in random order, so that every row starts where a prompt would."""
    rows: list[list[int]] = []
    for i in torch.randperm(len(documents), generator=generator).tolist():
        document = documents[i][:ROW_TOKENS]
        row = next((r for r in rows[-100:] if len(r) + len(document) <= ROW_TOKENS), None)
        if row is None:
            rows.append(row := [])
        row += document
    rows = [r + [pad] * (ROW_TOKENS - len(r)) for r in rows]
    return torch.tensor(rows)[torch.randperm(len(rows), generator=generator)]


def build(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            intermediate_size=recipe.intermediate,
            max_position_embeddings=2 * ROW_TOKENS,
            tie_word_embeddings=True,
            **ids,
        )
    )
    # The paper's sampling.
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=20, top_p=0.95, temperature=0.6, max_new_tokens=128, **ids
    )
    return model


@contextlib.contextmanager
def residual_dropout(model: LlamaForCausalLM, rate: float):
    """Dropout where Llama has none: on the embedding and on what each block adds to the residual stream."""
    hooks = [
        module.register_forward_hook(lambda module, _, output: F.dropout(output, rate, module.training))
        for name, module in model.named_modules()
        if name.endswith(("embed_tokens", "o_proj", "down_proj"))
    ]
    yield
    for hook in hooks:
        hook.remove()


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the embedding and the norms."""
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    chosen = {id(w) for w in matrices}
    others = [w for w in model.parameters() if id(w) not in chosen]
    return [
        torch.optim.Muon(
            matrices, recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def batch_loss(model, teacher, batch: torch.Tensor, pad: int, distilled: float) -> torch.Tensor:
    targets = batch[:, 1:].flatten()
    kept = targets != pad
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits
        if distilled:
            with torch.no_grad():
                teacher_logits = teacher(batch[:, :-1], use_cache=False).logits
    log_p = logits.flatten(0, 1)[kept].float().log_softmax(-1)
    loss = (1 - distilled) * F.nll_loss(log_p, targets[kept])
    if distilled:
        log_q = teacher_logits.flatten(0, 1)[kept].float().log_softmax(-1)
        loss = loss + distilled * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
    return loss


def train(name: str, recipe: Recipe, tokenizer, documents, heldout, teacher=None) -> LlamaForCausalLM:
    model, generator = build(recipe, tokenizer), torch.Generator().manual_seed(recipe.seed)
    pad, started = tokenizer.pad_token_id, time.perf_counter()
    epochs = [pack(documents, pad, generator).split(BATCH_ROWS) for _ in range(recipe.epochs)]
    steps, step = sum(map(len, epochs)), 0
    chosen = optimizers(model, recipe)
    with residual_dropout(model, recipe.dropout):
        for epoch, batches in enumerate(epochs, 1):
            model.train()
            for batch in batches:
                step += 1
                warm_up = min(1.0, step / (0.03 * steps))
                rate = recipe.learning_rate * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))
                loss = batch_loss(model, teacher, batch, pad, recipe.distilled)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in chosen:
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                    optimizer.step()
                    optimizer.zero_grad()
                if step % 50 == 0:
                    minutes = (time.perf_counter() - started) / 60
                    print(f"{name} step {step}/{steps}  {minutes:5.1f} min  batch loss {loss.item():.3f}", flush=True)
            model.eval()
            pair = (model, teacher if teacher is not None else model)
            figures = measure(pair, heldout[:200], pad)
            print(
                f"{name} epoch {epoch}/{recipe.epochs}  held-out loss {figures['losses'][0]:.3f}  "
                f"overlap with its teacher {figures['overlap']:.3f}",
                flush=True,
            )
    return model


@torch.no_grad()
def measure(pair, documents: list[list[int]], pad: int) -> dict:
    """Mean loss of each model in nats a token, and their mean overlap sum_x min(p(x), q(x)), over every token of the
    documents but the first, each document by itself."""
    losses, overlap, count = torch.zeros(2, dtype=torch.float64), 0.0, 0
    documents = sorted((d[:ROW_TOKENS] for d in documents), key=len)
    for start in range(0, len(documents), 2 * BATCH_ROWS):
        rows = [torch.tensor(d) for d in documents[start : start + 2 * BATCH_ROWS]]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        targets = batch[:, 1:].flatten()
        kept = targets != pad
        logs = [m(batch[:, :-1], use_cache=False).logits.flatten(0, 1)[kept].float().log_softmax(-1) for m in pair]
        losses += torch.stack([F.nll_loss(log, targets[kept], reduction="sum") for log in logs]).double()
        overlap += torch.minimum(*logs).exp().sum().item()
        count += len(logs[0])
    return {"losses": (losses / count).tolist(), "overlap": overlap / count, "tokens": count}


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def store(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """The model as its users will have it: rounded to bfloat16 on the way through the file."""
    model.to(torch.bfloat16).save_pretrained(folder)
    return load(folder)


def folder_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="JSON lines to train on (gsm8k_train.jsonl)")
    parser.add_argument("--heldout", type=Path, required=True, help="JSON lines to measure on (gsm8k_test.jsonl)")
    parser.add_argument("--target", type=Path, help="target/ of an earlier run on this text: train only a draft")
    parser.add_argument("--out", type=Path, required=True, help="folder to create: target/, draft/, tokenizer/")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"--out {arguments.out} exists already; name a new folder")
    if arguments.target and not arguments.target.is_dir():
        parser.error(f"--target {arguments.target} is no folder; name target/ of an earlier run, or leave it out")

    started = time.perf_counter()
    texts = read_documents(arguments.text)
    tokenizer = train_tokenizer(texts)
    documents, heldout = (tokenizer(t)["input_ids"] for t in (texts, read_documents(arguments.heldout)))
    print(
        f"{len(documents)} documents, {sum(map(len, documents))} tokens; held out {len(heldout)} documents", flush=True
    )

    unfinished = arguments.out.with_name(arguments.out.name + ".unfinished")
    tokenizer.save_pretrained(unfinished / "tokenizer")
    if arguments.target:
        shutil.copytree(arguments.target, unfinished / "target")
        target = load(unfinished / "target")
    else:
        target = store(train("target", TARGET, tokenizer, documents, heldout), unfinished / "target")
    draft = store(train("draft", DRAFT, tokenizer, documents, heldout, teacher=target), unfinished / "draft")
    minutes = (time.perf_counter() - started) / 60

    figures = measure((target, draft), heldout, tokenizer.pad_token_id)
    torch.manual_seed(0)
    sample = target.generate(
        **tokenizer(SAMPLE_PROMPT, return_tensors="pt"), max_new_tokens=200, temperature=1.0, top_k=0, top_p=1.0
    )
    print(tokenizer.decode(sample[0]))
    report = {
        "target": asdict(TARGET) | {"parameters": target.num_parameters(), "heldout_loss": figures["losses"][0]},
        "draft": asdict(DRAFT) | {"parameters": draft.num_parameters(), "heldout_loss": figures["losses"][1]},
        "heldout_tokens": figures["tokens"],
        "overlap": figures["overlap"],
        "bytes": {part.name: folder_bytes(part) for part in sorted(unfinished.iterdir())},
        "minutes": minutes,
    }
    unfinished.rename(arguments.out)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
