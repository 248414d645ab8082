"""Batched speculative decoding by cactus_kernels, in the form that transformers loads by a folder's or repository's name."""

from cactus_kernels import speculative_generate


def generate(model, inputs=None, input_ids=None, **kwargs):
    """What `model.generate(..., custom_generate="FOLDER", trust_remote_code=True)` calls, with all that it was given.

    Keywords, result and errors are those of `cactus_kernels.speculative_generate`: the keywords of `generate`, its
    assistant_model, streamer and tokenizer among them, and `rule`, `seed`, `backend`.
    """
    if inputs is not None and input_ids is not None:
        raise ValueError("inputs and input_ids are both given: leave one out")
    return speculative_generate(model, input_ids if inputs is None else inputs, **kwargs)
