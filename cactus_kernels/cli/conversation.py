"""Chatting by command: from options to messages, and a conversation line by line."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from ..tools import runs
from ..tools.chat import Message, parse_messages, render
from ..tools.pair import ModelPair
from ..tools.settings import RunSettings
from . import terminal

END_OF_INPUT = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
HOW_TO_QUIT = f"Ctrl-C stops an answer. At the prompt, {END_OF_INPUT} or Ctrl-C ends the conversation."


@dataclass(frozen=True)
class Question:
    """What is to be continued or answered: options of the command, which documents them."""

    prompt: str | None
    chat: bool
    messages: str | None
    system: str | None
    thinking: bool | None

    @property
    def opens_conversation(self) -> bool:
        """Whether messages come line by line from stdin."""
        return self.chat and self.prompt is None and self.messages is None

    def read_prompt(self) -> str:
        """The prompt, or what stands for it. Raises ValueError for one that no tokenizer takes."""
        text = self.prompt
        if text is None:
            text = runs.DEFAULT_PROMPT
        elif text == "-":
            text = _stdin()
        runs.check_prompt(text)
        return text

    def read_messages(self, prompt: str) -> list[Message] | None:
        """The messages to answer, or None where the prompt, as it was read, is plain text.

        Raises ValueError for options that do not go together, and bad messages.
        """
        if self.messages is not None:
            return self._read_file(self.messages)
        if not self.chat:
            if self.system is not None or self.thinking is not None:
                raise ValueError(f"--{'system' if self.thinking is None else 'thinking'} goes with --chat: add it")
            return None
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": prompt}]

    def _read_file(self, name: str) -> list[Message]:
        if self.prompt is not None:
            raise ValueError("a prompt and --messages are both given: leave one out")
        if self.system is not None:
            raise ValueError("--system goes with --chat: put it into the messages as their first")
        if name == "-":
            return parse_messages(_stdin())
        if not Path(name).is_file():
            raise ValueError(f"cannot read {name!r}: there is no such file")
        return parse_messages(Path(name).read_text(encoding="utf-8"))


def converse(pair: ModelPair, settings: RunSettings, turns: list[Message], thinking: bool | None) -> None:
    """A conversation after `turns`: a line from stdin is a message, the end of stdin its end.

    An interrupt (Ctrl-C) stops an answer, of which the conversation keeps what was written; at the prompt it is raised.
    """
    if sys.stdin.isatty():
        typer.secho(HOW_TO_QUIT, dim=True)
    for line in _lines():
        turns = [*turns, {"role": "user", "content": line}]
        written: list[str] = []

        def write(piece: str, written: list[str] = written) -> None:
            written.append(piece)
            terminal.write(piece)

        try:
            ids = runs.encode(pair, render(pair.tokenizer, turns, thinking), settings, add_special_tokens=False)
            run = runs.run_speculative(pair, ids, settings, write=write)
        except KeyboardInterrupt:
            note = "stopped"
        else:
            rate = f"{run.tokens_per_second:.1f} tokens a second, {run.tokens_per_forward:.2f} a target forward"
            note = f"{len(run.token_ids)} tokens, {rate}"
        turns = [*turns, {"role": "assistant", "content": "".join(written)}]
        # Another random stream for the next answer.
        settings = replace(settings, seed=settings.seed + 1 if settings.seed < 2**63 - 1 else -(2**63))
        typer.secho(f"\n[{note}]", dim=True)


def _stdin() -> str:
    return sys.stdin.buffer.read().decode().removesuffix("\n")


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
