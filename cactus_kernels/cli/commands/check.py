"""`cactus-kernels check`."""

from secrets import randbits
from typing import Annotated

import typer

from ...testing import selfcheck
from ...testing.parity import best_backend
from ...tools.environment import find_device
from .. import terminal
from ..options import DeviceOption
from ..work import ARGUMENT_ERRORS, one_line


def check(
    minutes: Annotated[float, typer.Option(help="Time to spend; more finds more.")] = 1.0,
    device: DeviceOption = None,
    backend: Annotated[str | None, typer.Option(help="triton or torch.", show_default="triton where it runs")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a check.", show_default="random, and printed")] = None,
) -> None:
    with terminal.status("loading"), one_line(2, *ARGUMENT_ERRORS):
        on = find_device(device)
        chosen = best_backend(on) if backend is None else backend
        plan = selfcheck.Plan(minutes, on, chosen, randbits(32) if seed is None else seed)
    typer.echo(plan)
    with terminal.progress() as progress:
        report = selfcheck.run(plan, progress)
    terminal.print_table(("test", "size", "result"), report.rows)
    typer.echo(report.note)
    typer.echo("\n".join([f"failed: {failure}" for failure in report.failures] or ["ok"]))
    raise typer.Exit(1 if report.failures else 0)
