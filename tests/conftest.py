"""Before triton is imported anywhere: without a GPU its kernels run in the interpreter."""

import os

import pytest
import torch
from support import interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
interpreter.install()
torch.set_num_threads(1)  # the tests' tensors are small; threads would only wait for one another


def pytest_report_header():
    return interpreter.header()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist: what a worker counts, its controller adds up
        session.config.workeroutput["accesses"] = dict(interpreter.accesses)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    interpreter.accesses.update(getattr(node, "workeroutput", {}).get("accesses", {}))


def pytest_terminal_summary(terminalreporter):
    if interpreter.accesses:
        kinds = ", ".join(f"{count:,} {kind}s" for kind, count in sorted(interpreter.accesses.items()))
        terminalreporter.write_line(f"triton's interpreter: addresses checked of {kinds}")


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
