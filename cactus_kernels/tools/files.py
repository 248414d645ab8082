"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def check_writable(path: str) -> None:
    """Raises ValueError where a file cannot be put."""
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ValueError(f"cannot write {path!r}: it must name a file in a directory that exists")


@contextmanager
def replacing(name: str) -> Iterator[IO[bytes]]:
    """A binary file to write, which takes the place of the one named once it is whole."""
    path = Path(name).absolute()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
