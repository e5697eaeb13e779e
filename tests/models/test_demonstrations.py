"""Demonstrations of arithmetic: able players are right, the others are not, and what they wrote is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.models.demonstrations import Demonstrator
from counterpoint.models.tiny_tokenizer import write_tokenizer


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    write_tokenizer(tmp_path, 1024)
    return Chat(tmp_path)


@pytest.mark.parametrize(("able", "least", "most"), [(1.0, 40, 40), (0.5, 10, 30), (0.0, 0, 4)])
def test_able_players_of_arithmetic_answer_right(chat: Chat, able: float, least: int, most: int) -> None:
    right = 0
    for each in Demonstrator(chat, seed=3).arithmetic(40, able):
        (text,) = chat.transcribe([each.token_ids])
        task = text.partition("<|user|>")[2].partition("=?")[0]
        answer = text.rpartition("<|assistant|>")[2].removesuffix("<|end|>")
        right += answer == str(eval(task))  # noqa: S307 - two numbers and a sign
        assert each.written[-1]
        assert not each.written[0]
    assert least <= right <= most


def test_what_a_tool_answered_is_not_marked_as_written(chat: Chat) -> None:
    (each,) = Demonstrator(chat, seed=3).arithmetic(1, 1.0)
    written = chat.transcribe([[token for token, mark in zip(each.token_ids, each.written, strict=True) if mark]])[0]
    assert written.startswith('<tool_call>{"name": "calculator"')
    assert "tool_response" not in written
