"""Conversations, put into text by a tokenizer's own chat template."""

import json
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]  # {"role": ..., "content": ...}, and what else a template understands
Tokenizer = Any  # one of transformers, whose own types do not tell text from tokens
# What templates raise for messages that they cannot read.
REFUSALS = (TemplateError, TypeError)
ANSWER = "forty-two"  # stands for one


def parse_messages(text: str) -> list[Message]:
    """Messages from JSON, a list of dicts. Raises ValueError, naming what is wrong."""
    try:
        messages = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the messages are not JSON: {error}") from error
    check_messages(messages)
    return messages


def check_messages(messages: Any) -> None:
    """Raises ValueError unless `messages` is a conversation in which the model speaks next.

    Which roles there are, and what stands beside them (text, parts, calls of tools), is the template's to know.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError('messages must be a list, [{"role": "user", "content": "..."}]')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be a dict with a role, got {message!r}")
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: end with one that is to be answered")


def render(tokenizer: Tokenizer, messages: list[Message], thinking: bool | None = None) -> str:
    """The conversation as text, up to where the model's answer begins.

    It holds every special token that the model expects, the BOS too: tokenize it with `add_special_tokens=False`.

    Args:
        messages: as `check_messages` has them.
        thinking: whether the model shall think first, in templates that can tell it (`enable_thinking`, as in Qwen3);
            None leaves it to the template.

    Raises:
        ValueError: there is no template, it cannot tell the model whether to think, or it refuses the messages.
    """
    check_messages(messages)
    source = _template(tokenizer)
    options = {} if thinking is None else {"enable_thinking": thinking}
    if options and "enable_thinking" not in source:
        raise ValueError("the chat template has no enable_thinking: leave the choice of thinking out")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except REFUSALS as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the template writes after an assistant's turn, which ends an answer; None if there is none.

    Generation configs do not always list it among the EOS. Templates that write neither text nor parts of text show none.
    """
    for content in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        turns = [{"role": "user", "content": content("question")}, {"role": "assistant", "content": content(ANSWER)}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except REFUSALS:
            continue
        if ANSWER in text:
            after = tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False).input_ids
            return after[0] if after and after[0] in tokenizer.all_special_ids else None
    return None


def _template(tokenizer: Tokenizer) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template: use a model that was tuned for chat, or give plain text")
    return tokenizer.get_chat_template()
