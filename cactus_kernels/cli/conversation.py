"""Chatting by command: from options to messages, and a conversation line by line."""

import sys
from dataclasses import replace
from pathlib import Path

import typer

from . import runs
from .chat import parse_messages, render


def messages_of(prompt, text, chat, messages, system, thinking, read_stdin) -> list[dict] | None:
    """The messages to answer, or None where the prompt is plain text.

    prompt, chat, messages, system, thinking: options of the command, which documents them. text: the prompt, or what
    stands for it. read_stdin: gives all of stdin. Raises ValueError for options that do not go together, and bad messages.
    """
    if messages is not None:
        if prompt is not None:
            raise ValueError("a prompt and --messages are both given: leave one out")
        if system is not None:
            raise ValueError("--system goes with --chat: put it into the messages as their first")
        if messages != "-" and not Path(messages).is_file():
            raise ValueError(f"cannot read {messages!r}: there is no such file")
        return parse_messages(read_stdin() if messages == "-" else Path(messages).read_text(encoding="utf-8"))
    if not chat:
        if system is not None or thinking is not None:
            raise ValueError(f"--{'system' if thinking is None else 'thinking'} goes with --chat: add it")
        return None
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def converse(pair, settings, turns, thinking, write) -> None:
    """A conversation after `turns`: a line from stdin is a message, the end of stdin its end. Answers go to `write`."""
    for line in _lines():
        turns = [*turns, {"role": "user", "content": line}]
        ids = runs.encode(pair, render(pair.tokenizer, turns, thinking), settings, add_special_tokens=False)
        run = runs.run_speculative(pair, ids, settings, write=write)
        turns = [*turns, {"role": "assistant", "content": run.text}]
        # Another random stream for the next answer.
        settings = replace(settings, seed=settings.seed + 1 if settings.seed < 2**63 - 1 else -(2**63))
        rate = f"{run.tokens_per_second:.1f} tokens a second, {run.tokens_per_forward:.2f} a target forward"
        typer.secho(f"\n[{len(run.token_ids)} tokens, {rate}]", dim=True)


def _lines():
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
