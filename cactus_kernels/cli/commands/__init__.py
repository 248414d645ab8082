"""The commands by name. Each is loaded when it is named: they need torch and transformers, which take seconds to load."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ... import __version__
from .. import terminal

# A command is the function of its name in the module of its name.
COMMANDS = {
    "generate": "Continue a prompt, or answer a message, with drafts and verification, and say what it took.",
    "info": "Versions, devices, and the backend that verification takes on each.",
    "check": "Test verification on this machine, its bits and its laws; or, with --model, a model against plain generate.",
    "frontier": "What each rule accepts and how far it strays from the target: exact laws at the positions of a text.",
}
QUIET: Any = {"add_completion": False, "pretty_exceptions_enable": False}


class LoadingGroup(TyperGroup):
    """Has a line on each command for the help, and loads the one that is to run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _load(name), rest


def command_line() -> Any:
    """The whole command, ready for `main`."""
    app = typer.Typer(cls=LoadingGroup, help="Speculative sampling with Cactus.", **QUIET)
    app.callback()(_options)
    for name, line in COMMANDS.items():
        app.command(name, help=line)(_stands_in)
    return typer.main.get_command(app)


def _load(name: str) -> Any:
    with terminal.status("loading"):
        function = getattr(import_module(f".{name}", __name__), name)
    app = typer.Typer(**QUIET)
    app.command(name, help=COMMANDS[name])(function)
    return typer.main.get_command(app)


def _stands_in() -> None:
    raise AssertionError("the command itself is loaded before it runs")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
