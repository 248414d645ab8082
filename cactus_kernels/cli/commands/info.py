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
    rows = [(name, value or "not installed") for name, value in found.items() if name != "devices"]
    for each in found["devices"]:
        rows += [(each["device"], each["name"]), ("", f"{each['backend'] or 'no backend'}: {each['why']}")]
    terminal.print_table(("", ""), rows)
