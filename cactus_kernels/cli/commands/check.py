"""`cactus-kernels check`."""

from secrets import randbits
from typing import Annotated

import typer

from ...testing import selfcheck
from ...testing.parity import best_backend
from ...tools.environment import find_device
from .. import terminal
from ..failure import Failure
from ..options import DeviceOption, DraftOption, DtypeOption
from ..work import ARGUMENT_ERRORS, one_line


def check(
    minutes: Annotated[float | None, typer.Option(help="Time to spend; more finds more.", show_default="1.0")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Compare this model, a directory or hub id, with plain generate instead: tokens and scores."),
    ] = None,
    draft: DraftOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="With --model: tokens of each text.")] = 64,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    backend: Annotated[str | None, typer.Option(help="triton or torch.", show_default="triton where it runs")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a check.", show_default="random, and printed")] = None,
) -> None:
    if model is not None or draft is not None:
        given = {"--minutes": minutes, "--backend": backend, "--seed": seed}
        if beside := [name for name, value in given.items() if value is not None]:
            raise Failure(f"--model compares models, not verification: leave out {' and '.join(beside)}", 2)
        failures = _compare(model, draft, max_new_tokens, dtype, device)
    else:
        failures = _verify(1.0 if minutes is None else minutes, device, backend, seed)
    typer.echo("\n".join([f"failed: {failure}" for failure in failures] or ["ok"]))
    raise typer.Exit(1 if failures else 0)


def _verify(minutes: float, device: str | None, backend: str | None, seed: int | None) -> list[str]:
    with terminal.status("loading"), one_line(2, *ARGUMENT_ERRORS):
        on = find_device(device)
        chosen = best_backend(on) if backend is None else backend
        plan = selfcheck.Plan(minutes, on, chosen, randbits(32) if seed is None else seed)
    typer.echo(plan)
    with terminal.progress() as progress:
        report = selfcheck.run(plan, progress)
    terminal.print_table(("test", "size", "result"), report.rows)
    typer.echo(report.note)
    return report.failures


def _compare(model: str | None, draft: str | None, count: int, dtype: str, device: str | None) -> list[str]:
    with terminal.status("loading"), one_line(2, *ARGUMENT_ERRORS):
        from ...tools import model_check, pair  # noqa: PLC0415 (transformers takes seconds to load, and verification needs none)
        from .. import libraries  # noqa: PLC0415

        if count < 1:
            raise ValueError(f"max-new-tokens must be at least 1, got {count}")
        libraries.silence()
        on = find_device(device)
        loaded = pair.load_pair(model, draft, pair.find_dtype(dtype, on), on, lookup=draft is None)
    typer.echo(
        f"Comparing greedy decoding with plain generate, {loaded.model.dtype} on {loaded.model.device}.".replace(
            "torch.", ""
        )
    )
    with terminal.progress() as progress, one_line(1, ValueError):
        found = model_check.compare_models(loaded, count, progress)
    terminal.print_table(model_check.COLUMNS, [c.cells for c in found])
    typer.echo(
        "Scores: their root mean square difference, as a share of their spread, and the largest difference of two."
    )
    if any(c.differs for c in found):
        typer.echo(
            "Where a token is another one and scores are not apart, rounding chose between two nearly equal ones."
        )
    if window := model_check.window_not_reached(loaded, count):
        typer.echo(f"No text ran past the sliding window of {window} tokens: --max-new-tokens {window} would.")
    return [c.failure for c in found if c.failure]
