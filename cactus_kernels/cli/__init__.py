"""The command `cactus-kernels`: arguments in, text and tables out. What it does is in `tools` and `testing`."""

import sys

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> None:
    """Runs the command and exits: 0, 1 (failed), 2 (bad arguments), 130 (interrupted)."""
    try:
        from .program import run  # noqa: PLC0415 (an interrupt while it loads must end quietly, too)

        code = run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        print(file=sys.stderr)
    sys.exit(code)
