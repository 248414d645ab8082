"""What bench_verify measured, as a table and a picture."""

from pathlib import Path

from rich.table import Table


def table(report) -> Table:
    what = (
        "rows",
        "B",
        "m",
        "V",
        "way",
        "µs",
        "x ours",
        "host µs",
        "needed MB",
        "of copy speed",
        "temporaries MB",
        "launches",
    )
    shown = Table(*what, title=title(report), title_justify="left")
    for column in shown.columns[1:4] + shown.columns[5:]:
        column.justify = "right"
    last = None
    for line in report["results"]:
        case = line["case"]
        if case != last:
            shown.add_section()
        sizes = (case["rows"], str(case["B"]), str(case["m"]), f"{case['V']:,}") if case != last else ("",) * 4
        last = case
        if line["error"] is not None:
            shown.add_row(*sizes, line["way"], f"failed: {line['error'][:60]}")
            continue
        shown.add_row(
            *sizes, line["way"], _number(line["seconds"], 1e6, 1), _number(line["of_ours"], 1, 2),
            _number(line["host_seconds"], 1e6, 1), _number(line["needed_bytes"], 1e-6, 2),
            _number(line["of_copy_bandwidth"], 100, 1, " %"), _number(line["temporaries"], 1e-6, 3),
            _number(line["launches"], 1, 0),
        )  # fmt: skip
    return shown


def _number(value, factor, digits, unit=""):
    return "-" if value is None else f"{value * factor:,.{digits}f}{unit}"


def title(report) -> str:
    """What was measured, on what."""
    found = report["environment"]
    device = next(d for d in found["devices"] if d["device"].split(":")[0] == report["device"].split(":")[0])
    text = f"{device['name']}; torch {found['torch']}, triton {found['triton']}, {report['dtype']}; "
    text += f"a copy moves {report['copy_bytes_a_second'] / 1e9:,.0f} GB/s, read and written"
    if report["two_empty_launches_seconds"] is not None:
        text += f"; two empty launches take {report['two_empty_launches_seconds'] * 1e6:.1f} µs"
    return text


def notes(report) -> list:
    """What is not in the table."""
    missing, large = report["not_installed"], report["do_not_fit"]
    return [f"Peers that are not installed: {', '.join(missing)}."] * bool(missing) + [
        f"Do not fit in memory: {'; '.join(large)}."
    ] * bool(large)


def plot(report, file, name):
    """Times by case, a marker for each way, written to a binary file in the format of the name's suffix."""
    from matplotlib.figure import Figure

    cases = list({tuple(line["case"].values()): None for line in report["results"]})
    figure = Figure(figsize=(max(6.0, 1.5 + 0.35 * len(cases)), 6), layout="constrained")
    axes = figure.add_subplot()
    measured = [line for line in report["results"] if line["error"] is None]
    for i, way in enumerate({line["way"]: None for line in measured}):
        points = [(cases.index(tuple(x["case"].values())), x["seconds"] * 1e6) for x in measured if x["way"] == way]
        axes.plot(*zip(*points, strict=True), "os^vDPX*"[i % 8], label=way)
    axes.set_yscale("log")
    axes.set_ylabel("µs")
    axes.set_xticks(
        range(len(cases)), [f"{rows}\n{B} × {m}, {V:,}" for rows, B, m, V in cases], rotation=90, fontsize=7
    )
    axes.set_title(title(report), fontsize="small", wrap=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, format=Path(name).suffix.lower().removeprefix("."), dpi=120)
