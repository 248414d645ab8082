"""`cactus-kernels frontier`."""

import json as jsonlib
from typing import Annotated

import typer

from ...tools import frontier_report as report
from ...tools.environment import find_device
from ...tools.files import check_writable, replacing
from ...tools.frontier import Frontier, MeasurementSettings, load_documents, measure
from ...tools.pair import find_dtype, load_pair
from .. import libraries, terminal
from ..failure import Failure
from ..options import DeviceOption, DraftOption, DtypeOption, ModelOption
from ..work import ARGUMENT_ERRORS, one_line


def frontier(
    model: ModelOption = None,
    draft: DraftOption = None,
    text: Annotated[
        str | None,
        typer.Option(help="UTF-8 file; blank lines part its documents.", show_default="word problems of the package"),
    ] = None,
    positions: Annotated[int, typer.Option(help="Positions of the text to measure at.")] = 500,
    self_generated: Annotated[
        bool, typer.Option("--self-generated", help="Take only 8 tokens of a document; the target writes the rest.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Above 0, for both models.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps every token.")] = 0,
    top_p: Annotated[float, typer.Option(help="Above 0 and at most 1, which keeps every token.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this times as likely as the likeliest; 0 keeps all.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what the target writes.")] = 0,
    max_kl: Annotated[
        float | None, typer.Option(help="Recommend what accepts most within so many nats.", show_default="0.1")
    ] = None,
    min_accept: Annotated[
        float | None, typer.Option(help="Recommend the least KL that accepts so large a share.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write all figures to this file.")] = None,
    plot: Annotated[str | None, typer.Option(help="Draw the curves in this .png or .svg file.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
) -> None:
    if max_kl is not None and min_accept is not None:
        raise Failure("--max-kl and --min-accept are two questions: give one", 2)
    with terminal.status("loading"), one_line(2, *ARGUMENT_ERRORS, ImportError):
        libraries.silence()
        settings = MeasurementSettings(positions, temperature, top_k, top_p, min_p, self_generated, seed)
        goal = report.Goal(max_kl, min_accept)
        documents = load_documents(text)
        _check_files(json, plot)
        on = find_device(device)
        pair = load_pair(model, draft, find_dtype(dtype, on), on)
    with terminal.progress() as progress, one_line(1, ValueError):
        found = measure(pair, documents, settings, progress)
    described = pair.to_dict() | {"text": text or "word problems of the package"} | settings.to_dict()
    heading = f"{terminal.models(described)}; {settings}"
    if json:
        with replacing(json) as file:
            value = {"settings": described} | found.to_dict()
            file.write(jsonlib.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    if plot:
        with replacing(plot) as file:
            report.plot(found, heading, file, plot)
    _print(found, heading)
    typer.echo(goal.answer(found))
    raise typer.Exit(0 if found.complete else 130)


def _check_files(json: str | None, plot: str | None) -> None:
    for file in filter(None, (json, plot)):
        check_writable(file)
    if plot:
        report.check_plot(plot)


def _print(found: Frontier, heading: str) -> None:
    terminal.print_table(report.COLUMNS, report.rows(found))
    terminal.console().print(f"\n{heading}. {report.notes(found)}\n")
