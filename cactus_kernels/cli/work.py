"""What surrounds the work of a command: an error that is foreseen ends it in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .failure import Failure

ARGUMENT_ERRORS = (TypeError, ValueError, RuntimeError)


@contextmanager
def one_line(code: int, *expected: type[Exception]) -> Iterator[None]:
    """The errors that our checks raise, and a full device, end the command in one line; what is a bug keeps its trace."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Failure(str(error), 1) from error
    except expected as error:
        raise Failure(str(error), code) from error
