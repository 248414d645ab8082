"""Calls of the loop on tiny models, what transformers gives beside them, and the pieces that several tests hand to both."""

import copy
import functools

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from cactus_kernels import speculative_generate
from support import exact
from support.models import TableModel, table_pair

ROWS = 12_000
EOS, PAD = 1, 0


def run(target, draft, prompts, **kwargs):
    """`speculative_generate` over ragged prompts (lists of ids), left-padded, with a dict returned; `Cactus(1.0)` samples."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    rule = {"rule": "cactus"} if kwargs.get("do_sample") else {}
    kwargs = {"pad_token_id": PAD, "eos_token_id": None} | rule | kwargs
    return speculative_generate(
        target, ids, assistant_model=draft, attention_mask=mask, return_dict_in_generate=True, **kwargs
    )


def outputs(out, prompts):
    """The new tokens of every row, lists without padding."""
    width = max(map(len, prompts))
    return [row[width : width + n].tolist() for row, n in zip(out.sequences, out.stats.tokens, strict=True)]


def plain(target, prompts, **kwargs):
    """The new tokens of transformers' own `generate`, each prompt alone."""
    kwargs = {"pad_token_id": PAD, "eos_token_id": None} | kwargs
    return [target.generate(torch.tensor([p]), **kwargs)[0, len(p) :].tolist() for p in prompts]


def sampled(target, draft, rows=ROWS, prompt=(3,), **kwargs):
    """Sampled tokens [rows, T] after one prompt, every row with a stream of its own."""
    kwargs = {"do_sample": True, "top_k": 0, "seed": 11, "rule": "sps", "pad_token_id": PAD} | kwargs
    ids = torch.tensor(prompt).expand(rows, -1)
    return speculative_generate(target, ids, assistant_model=draft, **kwargs)[:, len(prompt) :]


def p_value(tokens, law):
    """Of tokens [rows, T] under a law [V] * T."""
    flat = np.ravel_multi_index(tokens.numpy().T, law.shape)
    return exact.chi_square_p_value(np.bincount(flat, minlength=law.size), law.ravel())


def rows_of(model):
    return model.table.detach().double().softmax(-1).numpy()


def noisy(model, noise):
    """A copy whose weights have Gaussian noise of `noise` standard deviations: a draft that is often wrong."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter += noise * parameter.std() * torch.randn_like(parameter)
    return draft


def random_prompts(lengths, V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (n,), generator=generator).tolist() for n in lengths]


def uneven(noise=0.7):
    """Table models whose greedy texts are long, and prompts of several lengths."""
    target, draft = table_pair(16, seed=5, noise=noise)
    return target, draft, [[3], [4, 9, 9, 2], [15, 11], [7, 3, 12, 4, 5, 6]]


class Increasing(LogitsProcessor):
    """Favours token (last + 1), and refuses to read what no text can be: padding, or anything after EOS."""

    def __init__(self, prompts, eos):
        self.prompts, self.eos = [tuple(p) for p in prompts], set(eos)
        self.texts = set()

    def __deepcopy__(self, memo):
        """Rows have processors of their own; all write down here what they see."""
        twin = copy.copy(self)
        assert twin.texts is self.texts
        return twin

    def __call__(self, input_ids, scores):
        for row, text in enumerate(input_ids.tolist()):
            assert any(tuple(text[: len(p)]) == p and self.eos.isdisjoint(text[len(p) :]) for p in self.prompts), text
            self.texts.add(tuple(text))
            scores[row, (text[-1] + 1) % scores.shape[1]] += 3.0
        return scores


class Allowed:
    """A `prefix_allowed_tokens_fn` that cannot be asked about a text which it does not allow itself, as one over a trie."""

    def __init__(self, prompts, eos=None):
        self.prompts, self.eos = prompts, eos

    def __call__(self, _, text):
        text = text.tolist()
        start = next(len(p) for p in self.prompts if p == text[: len(p)])
        for k in range(start, len(text)):
            assert text[k] in self.after(text[:k]) and text[k] != self.eos, text
        return self.after(text)

    @staticmethod
    def after(text):
        return [EOS, *range(text[-1] * 7 % 5, 16, 3)]


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [EOS, 5, 6]},
    "min_length": {"min_length": 9, "eos_token_id": [EOS, 5, 6]},
    "suppress_tokens": {"suppress_tokens": [5, 8, 10]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [5, 8, 10, 3]},
    "bad_words_ids": {"bad_words_ids": [[5], [8, 10], [3, 2]]},
    "sequence_bias": {"sequence_bias": [[[5], -4.0], [[8, 10], 3.0]]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": EOS},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": Allowed(uneven()[2])},
    "prefix_allowed_tokens_fn, EOS": {"prefix_allowed_tokens_fn": Allowed(uneven()[2], EOS), "eos_token_id": EOS},
    "two at once": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "eos_token_id": [5, 6]},
}


def chain(V, *steps):
    """A model that goes from token to token for certain: `steps` are (token, next); others stay."""
    table = torch.full((V, V), -1e4)
    table[range(V), range(V)] = 0.0
    for token, following in steps:
        table[token, token] = -1e4
        table[token, following] = 0.0
    return TableModel(table)


class SumStops(StoppingCriteria):
    """Stops a row where the sum of its text, which must have no padding, is a multiple of 7."""

    def __call__(self, input_ids, scores, **kwargs):
        assert (input_ids > 0).all()
        return input_ids.sum(1) % 7 == 0


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.values.append(value.clone())

    def end(self):
        self.ended += 1


class Widths:
    """Records the width of each call of a model's forward, and its mask's shape if it is given one mask."""

    def __init__(self, model):
        self.forward, self.calls = model.forward, []
        functools.update_wrapper(self, model.forward)
        model.forward = self

    def __call__(self, **kwargs):
        mask = kwargs["attention_mask"]
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else None
        self.calls.append((kwargs["input_ids"].shape[1], shape))
        return self.forward(**kwargs)
