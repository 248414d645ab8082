"""Conversations as text: templates, their ends of a turn, and what they refuse."""

import json

import pytest

pytest.importorskip("transformers")

import torch
from support.families import END_OF_TURN, FAMILIES, RENDERED, TURNS, save_checkpoints, tokenizer_of

from cactus_kernels.tools import chat, runs
from cactus_kernels.tools.pair import end_answers, load_pair
from cactus_kernels.tools.settings import RunSettings, make_rule


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    save_checkpoints(root)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_become_the_familys_own_text(family):
    tokenizer = tokenizer_of(family)
    text = chat.render(tokenizer, TURNS)
    assert text == RENDERED[family]
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    if FAMILIES[family][2] is not None:
        assert ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer(text).input_ids.count(tokenizer.bos_token_id) == 2
    assert chat.end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(END_OF_TURN[family])


def test_thinking_is_the_templates_to_know():
    qwen, deepseek = tokenizer_of("qwen3"), tokenizer_of("deepseek-r1")
    assert chat.render(qwen, TURNS, thinking=True) == RENDERED["qwen3"]
    assert chat.render(qwen, TURNS, thinking=False) == RENDERED["qwen3"] + "<think>\n\n</think>\n\n"
    with pytest.raises(ValueError, match="the chat template has no enable_thinking: leave the choice"):
        chat.render(deepseek, TURNS, thinking=False)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "deepseek-r1"])
def test_a_system_message_where_there_is_one(family):
    assert "Be brief." in chat.render(tokenizer_of(family), [{"role": "system", "content": "Be brief."}, *TURNS])


def test_what_a_template_refuses():
    system = [{"role": "system", "content": "Be brief."}, *TURNS]
    with pytest.raises(ValueError, match="the chat template refuses these messages: System role not supported"):
        chat.render(tokenizer_of("gemma"), system)
    plain = tokenizer_of("gemma")
    plain.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        chat.render(plain, TURNS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the messages are not JSON"),
        ("[]", "messages must be a list"),
        ('"Hi"', "messages must be a list"),
        ('{"role": "user", "content": "Hi"}', "messages must be a list"),
        ('["Hi"]', "message 0 must be a dict with a role, got 'Hi'"),
        ('[{"content": "Hi"}]', "message 0 must be a dict with a role, got {'content': 'Hi'}"),
        ('[{"role": 1, "content": "Hi"}]', "message 0 must be a dict with a role, got {'role': 1"),
        (json.dumps(TURNS[:2]), "the last message is the assistant's: end with one that is to be answered"),
    ],
)
def test_messages_that_are_none(text, says):
    with pytest.raises(ValueError, match=says):
        chat.parse_messages(text)


# In the manner of templates that know more than role and text.
RICH = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else '<|' + part.type + '|>' }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"x": 1}}}
UNDERSTOOD = {
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}]}],
        "<user>Look: <|image|>",
    ),
    "a call": (
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}],
        '<user>Hi<assistant>sum({"x": 1})<tool>2',
    ),
    "a call without content": (
        [ASKED, {"role": "assistant", "tool_calls": [CALL]}, {"role": "ipython", "content": "2"}],
        '<user>Hi<assistant>sum({"x": 1})<ipython>2',
    ),
    "a developer": ([{"role": "developer", "content": "Be brief."}, ASKED], "<developer>Be brief.<user>Hi"),
    "a developer's word at the end": (
        [ASKED, {"role": "developer", "content": "Be brief."}],
        "<user>Hi<developer>Be brief.",
    ),
}


@pytest.mark.parametrize(("messages", "text"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_what_a_template_understands_is_its_business(messages, text):
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = RICH
    assert chat.render(tokenizer, chat.parse_messages(json.dumps(messages))) == text + "<assistant>"


@pytest.mark.parametrize("template", ["{{ '<' + messages[0].content }}", "{{ messages[0].content.split('x') }}"])
def test_what_a_template_cannot_read_is_refused(template):
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="the chat template refuses these messages: "):
        chat.render(tokenizer, UNDERSTOOD["parts"][0])


PARTS_ALONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (PARTS_ALONE, "<|im_end|>"),
        ("{{ messages[1].content[0]['text'] + '<|im_end|>' }}", "<|im_end|>"),
        ("<|im_start|>{{ messages[0].content }}", None),
        ("{{ raise_exception('a system message is needed') }}", None),
    ],
    ids=["loop", "index", "no answers", "refused"],
)
def test_the_end_of_a_turn_in_templates_that_take_parts_or_no_answer(template, end):
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = template
    assert chat.end_of_turn(tokenizer) == (None if end is None else tokenizer.convert_tokens_to_ids(end))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_end_ends_an_answer(family, checkpoints):
    """Also the end of a turn that the generation config does not name, as Gemma's here."""
    directory, tokenizer = checkpoints / family, tokenizer_of(family)
    pair = load_pair(str(directory), str(directory), torch.float32, torch.device("cpu"))
    end_answers(pair)
    named = {*FAMILIES[family][3], END_OF_TURN[family]}
    assert set(pair.model.generation_config.eos_token_id) == set(tokenizer.convert_tokens_to_ids(list(named)))
    settings = RunSettings(rule=make_rule("sps", None), seed=1, max_new_tokens=20)
    ids = runs.encode(pair, RENDERED[family], settings, add_special_tokens=False)
    for end in named:
        for model in pair.models:
            model.lm_head.weight.data.zero_()
            model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(end)] = 100 * model.model.norm.weight.sign()
            model.model.norm.weight.data.fill_(1.0)
            model.model.embed_tokens.weight.data.fill_(1.0)
        run = runs.run_speculative(pair, ids, settings)
        assert run.token_ids == [tokenizer.convert_tokens_to_ids(end)] and run.text == ""
