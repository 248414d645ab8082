"""The command from its arguments to its exit code: everything that is wrong ends in one line on stderr, a warning is one, too."""

import errno
import os
import sys
import warnings
from io import TextIOWrapper
from typing import Any, TextIO

import typer

from .commands import command_line
from .failure import Failure

PROGRAM = "cactus-kernels"
UsageError: Any = typer.BadParameter.__base__  # what typer raises for arguments it cannot parse; no public name


def run(argv: list[str]) -> int:
    """The exit code: 0, 1 (failed) or 2 (bad arguments). Raises KeyboardInterrupt."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show
            code = command_line().main(argv or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        return _fail(error.format_message(), 2)
    except Failure as error:
        return _fail(str(error), error.code)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left cannot be written at exit either
        return 1 if error.errno == errno.EPIPE else _fail(str(error), 1)  # of a closed pipe nobody reads on
    return code or 0


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning in one line, without the place in the code that it is of."""
    print(f"{PROGRAM}: {' '.join(str(message).split())}", file=sys.stderr)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"{PROGRAM}: {line}", file=sys.stderr)
    return code
