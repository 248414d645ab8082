"""mypy --strict on calls.py: every line that must be an error is one, of its kind, and no other line is.

    python tests/typing/check.py

Run from the root of the repository, where mypy finds its settings.
"""

import re
import subprocess
import sys
from pathlib import Path

CALLS = Path(__file__).with_name("calls.py")


def expected() -> dict[int, str]:
    """Kinds of errors by the number of their line."""
    lines = enumerate(CALLS.read_text(encoding="utf-8").splitlines(), 1)
    return {n: found[1] for n, line in lines if (found := re.search(r"# wrong: ([\w-]+)$", line))}


def found() -> dict[int, str]:
    """The same, as mypy says it. An error elsewhere ends the check."""
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-pretty", str(CALLS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stdout + done.stderr)
    kinds = {}
    for line in done.stdout.splitlines():
        if ": error: " in line:
            place = re.match(rf".*\b{re.escape(CALLS.name)}:(\d+): error: .*\[([\w-]+)\]$", line)
            if place is None:
                sys.exit(f"an error that is not in {CALLS.name}: {line}")
            kinds[int(place[1])] = place[2]
    return kinds


def main() -> None:
    wanted, got = expected(), found()
    for line in sorted(wanted.keys() | got.keys()):
        if wanted.get(line) != got.get(line):
            print(f"{CALLS.name}:{line}: should be {wanted.get(line, 'right')}, mypy says {got.get(line, 'right')}")
    if wanted != got:
        sys.exit(1)
    print(f"mypy --strict: {len(wanted)} wrong calls refused, no right one")


if __name__ == "__main__":
    main()
