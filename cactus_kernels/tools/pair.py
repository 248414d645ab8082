"""The embedded model pair: a real target and a real draft that need no download."""

from pathlib import Path

import torch

ASSETS = Path(__file__).with_name("assets")


def embedded_pair(*, dtype: torch.dtype | None = None, device: torch.device | str | None = None):
    """Load the two small language models that travel with the package: `(model, assistant_model, tokenizer)`.

    Both are Llama checkpoints (`LlamaForCausalLM`) over one byte-level BPE vocabulary of 2,048 tokens, trained on the
    word problems of GSM8K. The model (the target, `q`) writes readable problems and solutions with unreliable arithmetic;
    the assistant model (the draft, `p`) has a tenth of its size and was distilled from it, so the two agree about as often
    as a real pair does. `assets/README.md` has their figures. They are meant for examples, tests and measurements of
    acceptance, not for use as models. A prompt in the form that they know:

        Question: Maria has 5 boxes of pencils.

    Their generation settings sample from the whole distribution (`do_sample=True`, `top_k=0`). The tokenizer pads on the
    left. Only files of the package are read; the models come back in eval mode, in `dtype` (`torch.float32` unless given;
    the files hold bfloat16) on `device` (the CPU unless given).
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    model, assistant_model = (
        LlamaForCausalLM.from_pretrained(ASSETS / name, dtype=dtype or torch.float32, local_files_only=True)
        .to(device or "cpu")
        .eval()
        for name in ("target", "draft")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ASSETS / "tokenizer", local_files_only=True)
    return model, assistant_model, tokenizer
