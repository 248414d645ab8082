"""`cactus-kernels generate`."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from secrets import randbits
from typing import Annotated, Any, cast

import torch
import typer

from ...backends import choose_backend
from ...rules import strengths
from ...tools import runs
from ...tools.chat import Message, render
from ...tools.environment import find_device
from ...tools.pair import ModelPair, end_answers, find_dtype, load_pair
from ...tools.settings import Backend, RunSettings, make_rule, name_rule
from .. import libraries, terminal
from ..conversation import Question, converse
from ..failure import Failure
from ..options import DeviceOption, DraftOption, DtypeOption, ModelOption
from ..work import ARGUMENT_ERRORS, one_line


@dataclass(frozen=True)
class Task:
    """What is to be decoded: the prompt as text and as ids [1, P], and the messages that it was made of, if it was."""

    pair: ModelPair
    settings: RunSettings
    messages: list[Message] | None
    text: str
    ids: torch.Tensor

    @property
    def described(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        described = {"prompt": self.text, "settings": self.pair.to_dict() | self.settings.to_dict()}
        return described if self.messages is None else described | {"messages": self.messages}


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
        typer.Option(
            help='Chat about a JSON file of messages, [{"role": ..., "content": ...}], as the template has them; - is stdin.'
        ),
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
    temperature: Annotated[
        float | None, typer.Option(help="Above 0.", show_default="the model's own, as in generate")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps every token.", show_default="the model's own")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Above 0 and at most 1, which keeps every token.", show_default="the model's own"),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Keep tokens this times as likely as the likeliest; 0 keeps every token.",
            show_default="the model's own",
        ),
    ] = None,
    draft_temperature: Annotated[
        float | None,
        typer.Option(help="Of the draft alone, at least 0; 0 drafts the likeliest tokens.", show_default="temperature"),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Nats that the text may stray from the target in all; 0 is lossless.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text where it has this in it; may be given several times.")
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
) -> None:
    sampling = _given(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    of_drafts = _given(draft_temperature=draft_temperature, budget=budget)
    question = Question(prompt, chat, messages, system, thinking)
    if greedy:
        _refuse_sampling([*sampling, *of_drafts, *_given(rule=rule, strength=strength, delta=delta)])
    if compare and rule is not None:
        raise Failure("--compare runs both rules: leave out --rule", 2)
    if compare and stop:
        raise Failure("--compare goes on past the end of a text: leave out --stop", 2)
    if question.opens_conversation and (compare or json):
        raise Failure("--compare and --json take one message: give it as the prompt", 2)
    with terminal.status("loading"), one_line(2, *ARGUMENT_ERRORS):
        libraries.silence()
        settings = RunSettings(
            rule=make_rule("cactus" if rule is None else rule, strength, delta),
            named=None if rule is None else name_rule(rule, strength),
            seed=randbits(32) if seed is None else seed,
            num_assistant_tokens=num_assistant_tokens,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            max_new_tokens=max_new_tokens,
            greedy=greedy,
            backend=cast(Backend, backend),  # `_prepare` checks it
            stop=tuple(stop or ()),
            **sampling,
            **of_drafts,
        )
        task = _prepare(question, settings, Source(model, draft, dtype, find_device(device)), sampling.keys())
    if compare:
        _compare(task, json)
        return
    _warm_up(task)
    if question.opens_conversation:
        _converse(task, thinking)
    else:
        _run(task, json)


@dataclass(frozen=True)
class Source:
    """Where the models come from and go to: options of the command."""

    model: str | None
    draft: str | None
    dtype: str
    device: torch.device


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse_sampling(given: list[str]) -> None:
    if given:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise Failure(f"--greedy does not sample: leave out {options}", 2)


def _prepare(question: Question, settings: RunSettings, source: Source, given: Collection[str]) -> Task:
    """What can be checked before models are loaded is. given: settings of sampling; the others are the model's own."""
    choose_backend(settings.backend, source.device)
    text = question.read_prompt()
    messages = question.read_messages(text)
    dtype, lookup = find_dtype(source.dtype, source.device), settings.prompt_lookup_num_tokens is not None
    pair = load_pair(source.model, source.draft, dtype, source.device, lookup=lookup)
    settings = replace(settings, **{name: value for name, value in pair.sampling.items() if name not in given})
    if messages is not None:
        text = render(pair.tokenizer, messages, question.thinking)
        end_answers(pair)
    return Task(pair, settings, messages, text, runs.encode(pair, text, settings, add_special_tokens=messages is None))


def _warm_up(task: Task) -> None:
    if task.ids.device.type != "cpu":
        with one_line(1, ValueError):
            runs.warm_up(task.pair, task.ids, task.settings)


def _converse(task: Task, thinking: bool | None) -> None:
    turns = [] if task.messages is None else task.messages[:-1]  # the last one stands for what is to be typed
    with one_line(1, ValueError):
        converse(task.pair, task.settings, turns, thinking)


def _run(task: Task, json: bool) -> None:
    with one_line(1, ValueError):
        if not json and task.messages is None:
            typer.secho(task.text, dim=True, nl=False)
        write = None if json else terminal.write
        run = runs.run_speculative(task.pair, task.ids, task.settings, write=write)
    if json:
        terminal.print_json(task.described | run.to_dict())
    else:
        typer.echo("\n")
        terminal.print_run(run, task.described["settings"])


def _compare(task: Task, json: bool) -> None:
    with one_line(1, ValueError):
        plain, speculative = runs.compare(task.pair, task.ids, task.settings)
    results = [plain, *speculative]
    speeds = [run.tokens_per_second / plain.tokens_per_second for run in results]
    if json:
        rows = [run.to_dict() | {"speed": speed} for run, speed in zip(results, speeds, strict=True)]
        terminal.print_json(task.described | {"runs": rows})
        return
    why = runs.why_slower(plain, speculative)
    terminal.print_comparison(results, speeds, task.described["settings"], why)
