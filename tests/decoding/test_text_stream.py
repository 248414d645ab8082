"""Text as it comes, token by token."""

import pytest

pytest.importorskip("transformers")

import torch

from cactus_kernels.decoding.outputs import TextStream


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, ids, **kwargs):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "text", ["plain", "naïve café ≤ 数学 🌵!", "🌵", "a\ufffdb", "\n\n  two  spaces "], ids=lambda text: ascii(text)
)
def test_characters_are_passed_on_whole(text):
    pieces = []
    stream = TextStream(Bytes(), pieces.append)
    stream.put(torch.tensor([list("é prompt".encode())]))
    for byte in text.encode():
        stream.put(torch.tensor([byte]))
    stream.end()
    assert "".join(pieces) == text
    assert all(pieces) and (len(pieces) == len(text) or "\ufffd" in text)


def test_half_a_character_at_the_end_is_shown_as_such():
    pieces = []
    stream = TextStream(Bytes(), pieces.append)
    stream.put(torch.tensor([[65]]))
    stream.put(torch.tensor(list("b🌵".encode())[:-1]))
    assert pieces == ["b"]
    stream.end()
    assert pieces == ["b", "\ufffd"]
