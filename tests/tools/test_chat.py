"""Conversations through templates in the manner of the paper's families, written here in short form."""

import io
import json

import pytest

pytest.importorskip("transformers")

import torch
from test_cli import command, on_the_cpu, same_logging_afterwards
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cactus_kernels import chat, runs, talk

FIXTURES = (command, on_the_cpu, same_logging_afterwards)

# name: (template, special tokens, BOS that the tokenizer itself puts first, EOS of the generation config)
FAMILIES = {
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, ["<|im_end|>", "<|endoftext|>"],
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", ["<eos>"],
    ),
    "deepseek-r1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ["<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"], "<|begin|>", ["<|end|>"],
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|begin_of_text|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
}  # fmt: skip
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    {"role": "user", "content": "Bye"},
]
RENDERED = {
    "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<think>\nhm\n</think>\n\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "deepseek-r1": "<|begin|><|User|>Hi<|Assistant|>\n\nHello<|end|><|User|>Bye<|Assistant|><think>\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\nhm\n</think>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}
END_OF_TURN = {"qwen3": "<|im_end|>", "gemma": "<end_of_turn>", "deepseek-r1": "<|end|>", "llama3": "<|eot_id|>"}


def tokenizer_of(family):
    template, special, bos, eos = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    names = {"bos_token": bos, "eos_token": eos[0], "extra_special_tokens": special}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, **{k: v for k, v in names.items() if v is not None}
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny random models on disk, each with the tokenizer and EOS of a family: a directory that holds one for each."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        tokenizer = tokenizer_of(family)
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
            )
        )  # fmt: skip
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(FAMILIES[family][3])
        model.save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
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
        ('[{"role": "user"}]', "message 0 must have a role and a content, both text"),
        ('[{"role": "user", "content": [1]}]', "message 0 must have a role and a content, both text"),
        ('[{"role": "bot", "content": "Hi"}]', "message 0 has role 'bot': use one of system, user, assistant, tool"),
        (json.dumps(TURNS[:2]), "the last message is the assistant's: end with one that is to be answered"),
    ],
)
def test_messages_that_are_none(text, says):
    with pytest.raises(ValueError, match=says):
        chat.parse_messages(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_chats(family, checkpoints, command, tmp_path):
    """The template's text, tokenized with no second BOS, goes in; every EOS, the end of a turn among them, ends it."""
    directory, tokenizer = checkpoints / family, tokenizer_of(family)
    models = ["--model", directory, "--draft", directory, "--max-new-tokens", 60, "--seed", 3, "--json"]
    (tmp_path / "messages.json").write_text(json.dumps(TURNS))
    code, out, err = command("generate", "--messages", tmp_path / "messages.json", *models)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["prompt"] == RENDERED[family] and result["messages"] == TURNS
    ends = set(tokenizer.convert_tokens_to_ids([*FAMILIES[family][3], END_OF_TURN[family]]))
    tokens = result["token_ids"]
    assert not ends & set(tokens[:-1]) and (len(tokens) == 60 or tokens[-1] in ends)

    code, out, _ = command("generate", "Bye", "--chat", *models)
    assert code == 0 and json.loads(out)["prompt"] == chat.render(tokenizer, TURNS[2:])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_end_ends_an_answer(family, checkpoints):
    """Also the end of a turn that the generation config does not name, as Gemma's here."""
    directory, tokenizer = checkpoints / family, tokenizer_of(family)
    pair = runs.load_pair(str(directory), str(directory), torch.float32, torch.device("cpu"))
    runs.end_answers(pair)
    named = {*FAMILIES[family][3], END_OF_TURN[family]}
    assert set(pair.model.generation_config.eos_token_id) == set(tokenizer.convert_tokens_to_ids(list(named)))
    settings = runs.Settings(rule=runs.make_rule("sps", None), seed=1, max_new_tokens=20)
    ids = runs.encode(pair, RENDERED[family], settings, add_special_tokens=False)
    for end in named:
        for model in pair.models:
            model.lm_head.weight.data.zero_()
            model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(end)] = 100 * model.model.norm.weight.sign()
            model.model.norm.weight.data.fill_(1.0)
            model.model.embed_tokens.weight.data.fill_(1.0)
        run = runs.run_speculative(pair, ids, settings)
        assert run.token_ids == [tokenizer.convert_tokens_to_ids(end)] and run.text == ""


def test_a_conversation_goes_on(checkpoints, command, monkeypatch):
    directory, seen = checkpoints / "llama3", []
    right = chat.render
    monkeypatch.setattr(
        talk, "render", lambda tokenizer, turns, thinking: seen.append(turns) or right(tokenizer, turns)
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nBye\n"))
    models = ["--model", directory, "--draft", directory, "--max-new-tokens", 5, "--seed", 3]
    code, out, err = command("generate", "--chat", "--system", "Be brief.", *models)
    assert (code, err) == (0, "")
    assert [[m["role"] for m in turns] for turns in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert seen[1][1]["content"] == "Hi" and seen[1][3]["content"] == "Bye"
    assert out.count(" a target forward]\n") == 2 and "Hi" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["Hi", "--chat"], "the tokenizer has no chat template: use a model that was tuned for chat"),
        (["Hi", "--messages", "m.json"], "a prompt and --messages are both given"),
        (["--messages", "./nowhere.json"], "cannot read './nowhere.json': there is no such file"),
        (["--messages", "m.json", "--system", "x"], "--system goes with --chat: put it into the messages"),
        (["Hi", "--system", "x"], "--system goes with --chat: add it"),
        (["Hi", "--no-thinking"], "--thinking goes with --chat: add it"),
        (["--chat", "--json"], "--compare and --json take one message: give it as the prompt"),
        (["Hi", "--prompt-lookup-num-tokens", "65"], "prompt-lookup-num-tokens must be in 1 .. 64, got 65"),
        (
            ["Hi", "--prompt-lookup-num-tokens", "3", "--num-assistant-tokens", "4"],
            "are both given: leave the latter out",
        ),
        (["Hi", "--prompt-lookup-num-tokens", "3", "--model", ".", "--draft", "."], "are both given: leave one out"),
    ],
)
def test_what_goes_wrong_is_one_line(command, arguments, says):
    code, out, err = command("generate", *arguments)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


def test_prompt_lookup_by_command(command, checkpoints):
    for model in ([], ["--model", checkpoints / "llama3"]):
        arguments = ["3 4 5 3 4 5 3 4", *model, "--prompt-lookup-num-tokens", 4, "--greedy", "--max-new-tokens", 20]
        code, out, err = command("generate", *arguments, "--json")
        assert (code, err) == (0, "")
        result = json.loads(out)
        assert result["settings"]["draft"] == "prompt lookup" and max(result["stats"]["drafted"]) > 0
        code, out, _ = command("generate", *arguments, "--compare", "--json")
        plain, ours = json.loads(out)["runs"]
        assert code == 0 and plain["token_ids"] == ours["token_ids"]
