"""A target, its draft and their tokenizer: loaded from checkpoints, or the pair that travels with the package."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ..decoding.cache.support import check_rollback
from ..decoding.models import check_same_tokenizer
from ..decoding.prepared import eos_ids
from .chat import Tokenizer, end_of_turn

Model = Any  # a causal language model of transformers, whose own types do not know `generate`

ASSETS = Path(__file__).parents[1] / "assets"
DTYPES = ("auto", "float32", "bfloat16", "float16")
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # of `generate` where a config says nothing
VOCABULARIES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")  # files that tokenizers are in
LOOKUP = "prompt lookup"  # what stands for the name of a draft model


@dataclass(frozen=True)
class ModelPair:
    """A target, its draft (None with prompt lookup) and their tokenizer, loaded; and the names they were asked for by.

    sampling: how `generate` samples from the target unless it is told otherwise: by the settings of the target's own
        generation_config, which keeps none of them here.
    """

    model: Model
    assistant_model: Model | None
    tokenizer: Tokenizer
    model_name: str
    assistant_name: str
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,) if self.assistant_model is None else (self.model, self.assistant_model)

    def to_dict(self) -> dict[str, str]:
        """What was loaded and how, ready for JSON."""
        return {
            "model": self.model_name,
            "draft": self.assistant_name,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }


def embedded_pair(
    *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> tuple[Model, Model, Tokenizer]:
    """Load the two small language models that travel with the package: `(model, assistant_model, tokenizer)`.

    Both are Llama checkpoints (`LlamaForCausalLM`) over one byte-level BPE vocabulary of 2,048 tokens, trained on the
    word problems of GSM8K. The model (the target, `q`) writes readable problems and solutions with unreliable arithmetic;
    the assistant model (the draft, `p`) has a tenth of its size and was distilled from it, so the two agree about as often
    as a real pair does. `assets/README.md` has their figures. They are meant for examples, tests and measurements of
    acceptance, not for use as models. A prompt in the form that they know:

        Question: Maria has 5 boxes of pencils.

    Their generation settings are the sampling of the paper: `do_sample=True`, temperature 0.6, top_k 20, top_p 0.95. For the
    whole distribution pass `temperature=1.0, top_k=0, top_p=1.0`. The tokenizer pads on the left. Only files of the package
    are read; the models come back in eval mode, in `dtype` (`torch.float32` unless given; the files hold bfloat16, which
    "auto" keeps) on `device` (the CPU unless given).
    """
    llama: Any = LlamaForCausalLM
    model, assistant_model = (
        llama.from_pretrained(ASSETS / name, dtype=dtype or torch.float32, local_files_only=True)
        .to(device or "cpu")
        .eval()
        for name in ("target", "draft")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ASSETS / "tokenizer", local_files_only=True)
    return model, assistant_model, tokenizer


def find_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """A dtype from its name; "auto" is float32 on a CPU and the checkpoint's own on a GPU. Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def load_pair(
    model_name: str | None,
    assistant_name: str | None,
    dtype: torch.dtype | str,
    device: torch.device,
    lookup: bool = False,
) -> ModelPair:
    """Two checkpoints by their directories or hub ids, or the embedded pair. Raises ValueError, naming what is wrong.

    lookup: whether drafts come from the text, so that there is no draft model.
    """
    if lookup and assistant_name is not None:
        raise ValueError("--draft and --prompt-lookup-num-tokens are both given: leave one out")
    if not lookup and (model_name is None) != (assistant_name is None):
        given, missing = ("--model", "--draft") if assistant_name is None else ("--draft", "--model")
        raise ValueError(f"{given} needs {missing}: give both, or neither for the embedded pair")
    if model_name is None:
        model, assistant_model, tokenizer = embedded_pair(dtype=dtype, device=device)
        pair = ModelPair(model, assistant_model, tokenizer, "embedded target", "embedded draft")
        if lookup:
            pair = replace(pair, assistant_model=None, assistant_name=LOOKUP)
    elif assistant_name is None:
        pair = _load_target(model_name, dtype, device)
    else:
        pair = _load_both(model_name, assistant_name, dtype, device)
    pair = replace(pair, sampling=_own_sampling(pair.model.generation_config))
    for model in pair.models:
        check_rollback(model)
        _keep_special_tokens_alone(model, pair.tokenizer)
    return pair


def end_answers(pair: ModelPair) -> None:
    """Has the pair end where its chat template ends an assistant's turn, too."""
    end, config = end_of_turn(pair.tokenizer), pair.model.generation_config
    ids = eos_ids(config)
    if end is not None and end not in ids:
        config.eos_token_id = [*ids, end]
        config.pad_token_id = end if config.pad_token_id is None else config.pad_token_id


def _load_target(name: str, dtype: torch.dtype | str, device: torch.device) -> ModelPair:
    _load(AutoConfig, name)
    tokenizer = _load(AutoTokenizer, name)
    return ModelPair(_load_model(name, dtype, device), None, tokenizer, name, LOOKUP)


def _load_both(name: str, assistant_name: str, dtype: torch.dtype | str, device: torch.device) -> ModelPair:
    # Configs and tokenizers first: they are small, and most mistakes show there.
    for each in (name, assistant_name):
        _load(AutoConfig, each)
    tokenizer, assistant_tokenizer = (_load(AutoTokenizer, each) for each in (name, assistant_name))
    check_same_tokenizer(tokenizer, assistant_tokenizer)
    model, assistant_model = (_load_model(each, dtype, device) for each in (name, assistant_name))
    return ModelPair(model, assistant_model, tokenizer, name, assistant_name)


def _load_model(name: str, dtype: torch.dtype | str, device: torch.device) -> Model:
    return _load(AutoModelForCausalLM, name, dtype=dtype).to(device).eval()


def _load(loader: Any, name: str, **kwargs: Any) -> Any:
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ValueError(f"cannot load {name!r}: there is no such directory")
    try:
        return loader.from_pretrained(name, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        why = " ".join(str(error).split())
        if (
            loader is AutoTokenizer
            and Path(name).is_dir()
            and not any(next(Path(name).glob(f), None) for f in VOCABULARIES)
        ):
            why = "the directory holds no tokenizer: save it there, tokenizer.save_pretrained(directory)"
        raise ValueError(f"cannot load {name!r}: {why}") from error


def _own_sampling(config: GenerationConfig) -> dict[str, Any]:
    own = {name: getattr(config, name, None) for name in SAMPLING}
    return SAMPLING | {name: value for name, value in own.items() if value is not None}


def _keep_special_tokens_alone(model: Model, tokenizer: Tokenizer) -> None:
    """Of a checkpoint's own settings the special tokens count, and its sampling where a run does not say otherwise."""
    config = model.generation_config
    eos = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
    pad = tokenizer.pad_token_id
    if pad is None and eos is not None:
        pad = eos if isinstance(eos, int) else eos[0]
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=pad)
