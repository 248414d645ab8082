"""`cactus-kernels info`."""

from typing import Annotated

import typer

from ...tools.environment import describe_environment
from .. import terminal


def info(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    with terminal.status("looking"):
        found = describe_environment()
    if json:
        terminal.print_json(found)
        return
    table = terminal.table("", "")
    for name, value in found.items():
        if name != "devices":
            table.add_row(name, value or "not installed")
    for each in found["devices"]:
        table.add_row(each["device"], each["name"])
        table.add_row("", f"{each['backend'] or 'no backend'}: {each['why']}")
    terminal.console().print(table)
