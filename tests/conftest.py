"""Before triton is imported anywhere: without a GPU its kernels run in the interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)  # the tests' tensors are small; threads would only wait for one another


@pytest.fixture(scope="session")
def device():
    """Where kernels run: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def uncompiled():
    """Flex attention by its formula, in any dtype; compiling it takes seconds, and a CPU's float64 does not compile."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="session")
def bytes_tokenizer():
    """A tokenizer with a token for each byte."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
