"""Chatting by command."""

import io
import json
import signal
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from support.families import END_OF_TURN, FAMILIES, RENDERED, TURNS, save_checkpoints, tokenizer_of

from cactus_kernels.cli import conversation
from cactus_kernels.tools import chat, runs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    save_checkpoints(root)
    return root


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


def test_a_conversation_goes_on(checkpoints, command, monkeypatch):
    directory, seen = checkpoints / "llama3", []
    right = chat.render
    monkeypatch.setattr(
        conversation, "render", lambda tokenizer, turns, thinking: seen.append(turns) or right(tokenizer, turns)
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


def interrupts(pieces):
    """Stands for `run_speculative`: writes, and is interrupted (Ctrl-C)."""

    def run(pair, ids, settings, write):
        for piece in pieces:
            write(piece)
        raise KeyboardInterrupt

    return run


def test_an_interrupt_stops_an_answer_and_keeps_the_conversation(checkpoints, command, monkeypatch):
    directory, seen = checkpoints / "llama3", []
    right, whole = chat.render, runs.run_speculative
    answers = iter([interrupts(["One", " two"]), interrupts([]), whole])
    monkeypatch.setattr(
        conversation, "render", lambda tokenizer, turns, thinking: seen.append(turns) or right(tokenizer, turns)
    )
    monkeypatch.setattr(runs, "run_speculative", lambda *args, **kwargs: next(answers)(*args, **kwargs))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nGo on\nBye\n"))
    models = ["--model", directory, "--draft", directory, "--max-new-tokens", 5, "--seed", 3]
    code, out, err = command("generate", "--chat", *models)
    assert (code, err) == (0, "")
    assert [m["content"] for m in seen[2]] == ["Hi", "One two", "Go on", "", "Bye"]
    assert out.startswith("One two\n[stopped]\n\n[stopped]\n") and out.count(" a target forward]\n") == 1


def test_an_interrupt_at_the_prompt_ends_a_conversation_that_said_so(checkpoints, command, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", interrupted)
    directory = checkpoints / "llama3"
    code, out, err = command("generate", "--chat", "--model", directory, "--draft", directory)
    assert (code, err) == (130, "\n") and "stopped" not in out
    assert out.splitlines()[0] == "Ctrl-C stops an answer. At the prompt, Ctrl-D or Ctrl-C ends the conversation."


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_a_signal_in_the_middle_of_an_answer(checkpoints):
    directory = str(checkpoints / "llama3")
    arguments = [
        "generate",
        "--chat",
        "--model",
        directory,
        "--draft",
        directory,
        "--max-new-tokens",
        "400",
        "--seed",
        "3",
    ]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", "from cactus_kernels.cli import main; main()", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # of the answer
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"Bye\n", timeout=120)
    assert (process.returncode, err) == (0, b"")
    assert out.count(b"\n[stopped]\n") == 1 and out.count(b" a target forward]\n") == 1


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
