"""The command line as a test runs it: in this process, on the CPU unless told otherwise."""

import signal

import pytest
import torch

from cactus_kernels.cli import main


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A shell lets what it runs in the background, and all that this starts, ignore the signal of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def same_logging_afterwards():
    logging = pytest.importorskip("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@pytest.fixture
def command(capfd):
    """Runs the command line in this process: its exit code, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def narrow(monkeypatch):
    """A terminal of 40 columns, without colours."""
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "40", "LINES": "25", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
