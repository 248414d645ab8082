"""What the command prints: text, tables, bars, JSON."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table

if TYPE_CHECKING:
    from ..tools.runs import Run, SpeculativeRun

# What a model writes must not steer the terminal.
CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


UNLIMITED = 10_000  # columns


def write(piece: str) -> None:
    typer.echo(piece.translate(CONTROLS), nl=False)


def console(stderr: bool = False) -> Console:
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = max(made.width, 120)  # a file or a pipe has no edge
    return made


def status(what: str) -> Status:
    """A word on what takes time, on a terminal only, gone when it is done."""
    return console(stderr=True).status(f"{what} ...")


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal: a function to tell what is done and the share that is over."""
    errors = console(stderr=True)
    if not errors.is_terminal:
        yield lambda what, share: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows under the names of their columns; where the terminal is too narrow for them, row by row, each of several lines."""
    made, rows = console(), list(rows)
    lines = _table(columns, rows)
    width = made.measure(lines, options=made.options.update(width=UNLIMITED)).maximum
    if not made.is_terminal:
        made.width = max(made.width, width)
        with made.capture() as captured:
            made.print(lines)
        # A table is padded to its width.
        typer.echo("".join(line.rstrip() + "\n" for line in captured.get().splitlines()), nl=False)
    elif any(columns) and width > made.width:
        named = sum(not c for c in columns[1:]) + 1  # columns without a name belong to that of the row
        before = ""
        for name, *row in rows:
            before = name or before
            made.print(" ".join([before, *row[: named - 1]]), style="bold")
            made.print(
                _table(("", ""), [(f"  {c}", x) for c, x in zip(columns[named:], row[named - 1 :], strict=True)])
            )
    else:
        made.print(lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(box=None, pad_edge=False, show_header=any(columns), padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        made.add_column(
            name, style="bold" if i == 0 else None, no_wrap=i == 0, justify="right" if i and name else "left"
        )
    for row in rows:
        made.add_row(*row)
    return made


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def print_run(run: "SpeculativeRun", settings: dict[str, Any]) -> None:
    stats = run.stats
    rows = {"decoding": _decoding(run.decoding, settings)}
    rows["tokens"] = f"{len(run.token_ids)} in {run.seconds:.2f} s, {run.tokens_per_second:.1f} a second"
    rows["target forwards"] = f"{stats.target_forwards}, {run.tokens_per_forward:.2f} tokens each"
    rows["acceptance rate"] = (
        f"{_percent(run.acceptance_rate)}, {sum(stats.accepted)} of {sum(stats.drafted)} drafted tokens"
    )
    rows["time"] = ", ".join(f"{name} {_percent(part / run.seconds)}" for name, part in run.time_split.items())
    caches = f"caches {_megabytes(stats.target_cache_bytes + stats.draft_cache_bytes)}"
    peak = "" if stats.peak_memory_bytes is None else f"; at most {_megabytes(stats.peak_memory_bytes)} in all"
    rows["memory"] = f"{caches}{peak}"
    if stats.budget is not None and stats.spent is not None:
        rows["budget"] = f"{stats.spent[0]:.2f} of {stats.budget[0]:g} nats"
    rows["models"] = models(settings)
    if not settings["greedy"]:
        rows["seed"] = str(settings["seed"])
    print_table(("", ""), rows.items())


def print_comparison(
    results: "list[Run]", speeds: list[float], settings: dict[str, Any], why_slower: str | None
) -> None:
    columns = ("decoding", "tokens", "seconds", "tokens/s", "tokens/forward", "accepted", "speed")
    rows = [
        (
            _decoding(run.decoding, settings),
            str(len(run.token_ids)),
            f"{run.seconds:.2f}",
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_forward:.2f}",
            _percent(run.acceptance_rate),
            f"{speed:.2f}x",
        )
        for run, speed in zip(results, speeds, strict=True)
    ]
    print_table(columns, rows)
    out = console()
    seed = "greedy" if settings["greedy"] else f"seed {settings['seed']}"
    drafts = settings["prompt_lookup_num_tokens"] or settings["num_assistant_tokens"]
    notes = [f"{models(settings)}; {drafts} drafted tokens a round; {seed}."]
    notes.append("All are timed to the same number of tokens, past the end of the text.")
    if settings["delta"]:
        notes.append("sps follows the target's distribution, as plain decoding does; cactus is lossy.")
    out.print("\n" + "\n".join(notes))
    if why_slower:
        out.print(f"\n{why_slower}")


def _decoding(name: str, settings: dict[str, Any]) -> str:
    if name != settings["rule"] or settings["strength"] is None:
        return name
    return f"{name}, {'strength' if settings['delta'] is None else 'delta'} {settings['strength']:g}"


def models(settings: dict[str, Any]) -> str:
    return f"{settings['model']}, {settings['draft']}; {settings['device']}, {settings['dtype']}"


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
