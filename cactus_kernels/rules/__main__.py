"""Write the table of rules into README.md: `python -m cactus_kernels.rules`, from the root of the repository."""

import sys
from pathlib import Path

from .registry import table

README = Path("README.md")


def main() -> None:
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    head, line, rest = text.partition(table().split("\n")[0])
    if not line:
        sys.exit(f"{README.resolve()} holds no table of rules: run this from the root of the repository")
    *_, tail = rest.partition("\n\n")
    README.write_text(f"{head}{table()}\n\n{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
