"""The command `cactus-kernels`: arguments in, text and tables out. What it does is in runs.py, selfcheck.py, environment.py."""

import errno
import json as jsonlib
import os
import sys
from contextlib import contextmanager
from secrets import randbits
from typing import Annotated

import typer

from . import terminal
from .rules import strengths

PROGRAM = "cactus-kernels"
ARGUMENT_ERRORS = (TypeError, ValueError, RuntimeError)
UsageError = typer.BadParameter.__base__  # what typer raises for arguments it cannot parse; no public name

# Options that several commands take.
ModelOption = Annotated[
    str | None, typer.Option(help="Target: a directory or hub id. Needs --draft.", show_default="the embedded pair")
]
DraftOption = Annotated[str | None, typer.Option(help="Draft, a smaller model with the same tokenizer. Needs --model.")]
DtypeOption = Annotated[
    str, typer.Option(help="auto (float32 on a CPU, else the checkpoint's), float32, bfloat16 or float16.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda if there")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Speculative sampling with Cactus.")


class Failure(Exception):
    """Ends the command with one line on stderr and an exit code: 2 for bad arguments, 1 for a failure while running."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def main(argv: list[str] | None = None) -> None:
    """Runs the command and exits: 0, 1 (failed), 2 (bad arguments), 130 (interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        code = typer.main.get_command(app).main(argv or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        _fail(error.format_message(), 2)
    except Failure as error:
        _fail(str(error), error.code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left cannot be written at exit either
        if error.errno == errno.EPIPE:  # nobody reads on
            sys.exit(1)
        _fail(str(error), 1)
    if code == 130:
        print(file=sys.stderr)
    sys.exit(code or 0)


def _version(wanted):
    if wanted:
        from . import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
):
    pass


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from stdin.", show_default="a word problem")
    ] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="PROMPT is a message, in the model's chat template; none: a conversation."),
    ] = False,
    messages: Annotated[
        str | None,
        typer.Option(help='Chat about a JSON file of messages, [{"role": ..., "content": ...}]; - is stdin.'),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the --chat.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking", help="For templates with enable_thinking.", show_default="the template's"
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(help="cactus (lossy), sps (lossless), or another by name.", show_default="cactus"),
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help=f"Strength of the rule: {strengths()}.", show_default="in brackets")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Strength of cactus by its own name, at least 0; 0 is sps.", show_default="1.0")
    ] = None,
    num_assistant_tokens: Annotated[int, typer.Option(help="Tokens drafted a round, 1 to 64.")] = 5,
    prompt_lookup_num_tokens: Annotated[
        int | None, typer.Option(help="Draft as many tokens from earlier text, without a draft model.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="Above 0.", show_default="1.0")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps every token.", show_default="0")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Above 0 and at most 1, which keeps every token.", show_default="1.0")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely tokens: no sampling.")] = False,
    seed: Annotated[int | None, typer.Option(help="Repeats a run.", show_default="random, and printed")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Time plain decoding, SpS and Cactus instead.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    backend: Annotated[
        str | None, typer.Option(help="triton or torch.", show_default="triton on a GPU, else torch")
    ] = None,
):
    """Continue a prompt, or answer a message, with drafts and verification, and say what it took."""
    sampling = {"temperature": temperature, "top-k": top_k, "top-p": top_p, "rule": rule}
    sampling |= {"strength": strength, "delta": delta}
    given = [name for name, value in sampling.items() if value is not None]
    if greedy and given:
        raise Failure(f"--greedy does not sample: leave out --{' and --'.join(given)}", 2)
    if compare and rule is not None:
        raise Failure("--compare runs both rules: leave out --rule", 2)
    converse = chat and prompt is None and messages is None
    if converse and (compare or json):
        raise Failure("--compare and --json take one message: give it as the prompt", 2)
    with terminal.status("loading"):
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils import logging

        from . import runs, talk
        from .chat import render
        from .inputs import choose_backend

        hub_logging.set_verbosity_error()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with _one_line(2, *ARGUMENT_ERRORS):
            optional = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            settings = runs.Settings(
                rule=runs.make_rule("cactus" if rule is None else rule, strength, delta),
                seed=randbits(32) if seed is None else seed,
                num_assistant_tokens=num_assistant_tokens,
                prompt_lookup_num_tokens=prompt_lookup_num_tokens,
                max_new_tokens=max_new_tokens,
                greedy=greedy,
                backend=backend,
                **{name: value for name, value in optional.items() if value is not None},
            )
            on = runs.find_device(device)
            choose_backend(backend, on)
            text = runs.DEFAULT_PROMPT if prompt is None else _stdin() if prompt == "-" else prompt
            runs.check_prompt(text)
            conversation = talk.messages_of(prompt, text, chat, messages, system, thinking, _stdin)
            pair = runs.load_pair(
                model, draft, runs.find_dtype(dtype, on), on, lookup=prompt_lookup_num_tokens is not None
            )
            if conversation is not None:
                text = render(pair.tokenizer, conversation, thinking)
                runs.end_answers(pair)
            ids = runs.encode(pair, text, settings, add_special_tokens=conversation is None)
    described = {"prompt": text, "settings": pair.to_dict() | settings.to_dict()}
    if conversation is not None:
        described["messages"] = conversation
    with _one_line(1, ValueError):
        if on.type != "cpu" and not compare:
            runs.warm_up(pair, ids, settings)
        if converse:
            talk.converse(pair, settings, conversation[:-1], thinking, write=terminal.write)
            return
        if compare:
            results = runs.compare(pair, ids, settings)
        else:
            if not json and conversation is None:
                typer.secho(text, dim=True, nl=False)
            results = [runs.run_speculative(pair, ids, settings, write=None if json else terminal.write)]
    speeds = [run.tokens_per_second / results[0].tokens_per_second for run in results]
    if json and compare:
        rows = [run.to_dict() | {"speed": speed} for run, speed in zip(results, speeds, strict=True)]
        terminal.print_json(described | {"runs": rows})
    elif json:
        terminal.print_json(described | results[0].to_dict())
    elif compare:
        terminal.print_comparison(results, speeds, described["settings"], runs.why_slower(results))
    else:
        typer.echo("\n")
        terminal.print_run(results[0], described["settings"])


@app.command()
def info(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False):
    """Versions, devices, and the backend that verification takes on each."""
    with terminal.status("looking"):
        from .environment import environment

        found = environment()
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


@app.command()
def check(
    minutes: Annotated[float, typer.Option(help="Time to spend; more finds more.")] = 1.0,
    device: DeviceOption = None,
    backend: Annotated[str | None, typer.Option(help="triton or torch.", show_default="triton where it runs")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a check.", show_default="random, and printed")] = None,
):
    """Test verification on this machine: the same bits as the reference, and tokens that follow their exact law."""
    with terminal.status("loading"), _one_line(2, *ARGUMENT_ERRORS):
        from . import runs, selfcheck

        plan = selfcheck.Plan(minutes, runs.find_device(device), backend, randbits(32) if seed is None else seed)
    typer.echo(plan)
    with terminal.progress() as progress:
        report = selfcheck.run(plan, progress)
    table = terminal.table("test", "size", "result")
    for row in report.rows:
        table.add_row(*row)
    terminal.console().print(table)
    typer.echo(report.note)
    typer.echo("\n".join([f"failed: {failure}" for failure in report.failures] or ["ok"]))
    raise typer.Exit(1 if report.failures else 0)


@app.command()
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
):
    """What each rule accepts and how far it strays from the target: exact laws at the positions of a text."""
    if max_kl is not None and min_accept is not None:
        raise Failure("--max-kl and --min-accept are two questions: give one", 2)
    with terminal.status("loading"), _one_line(2, *ARGUMENT_ERRORS, ImportError):
        from transformers.utils import logging

        from . import frontier as measurement
        from . import frontier_report as report
        from . import runs

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        settings = measurement.Settings(positions, temperature, top_k, top_p, self_generated, seed)
        goal = report.Goal(max_kl, min_accept)
        documents = measurement.load_documents(text)
        for file in filter(None, (json, plot)):
            report.check_writable(file)
        if plot:
            report.check_plot(plot)
        on = runs.find_device(device)
        pair = runs.load_pair(model, draft, runs.find_dtype(dtype, on), on)
    with terminal.progress() as progress, _one_line(1, ValueError):
        found = measurement.measure(pair, documents, settings, progress)
    described = pair.to_dict() | {"text": text or "word problems of the package"} | settings.to_dict()
    if json:
        with report.replacing(json) as file:
            value = {"settings": described} | found.to_dict()
            file.write(jsonlib.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    if plot:
        with report.replacing(plot) as file:
            report.plot(found, f"{terminal.models(described)}; {settings}", file, plot)
    table = terminal.table(*report.COLUMNS)
    for row in report.rows(found):
        table.add_row(*row)
    console = terminal.console()
    console.print(table)
    console.print(f"\n{terminal.models(described)}; {settings}. {report.notes(found)}\n")
    typer.echo(goal.answer(found))
    raise typer.Exit(0 if found.complete else 130)


def _stdin():
    return sys.stdin.buffer.read().decode().removesuffix("\n")


@contextmanager
def _one_line(code, *expected):
    """The errors that our checks raise, and a full device, end the command in one line; what is a bug keeps its trace."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Failure(str(error), 1) from error
    except expected as error:
        raise Failure(str(error), code) from error


def _fail(message, code):
    line = " ".join(message.split())
    print(f"{PROGRAM}: {line}", file=sys.stderr)
    sys.exit(code)
