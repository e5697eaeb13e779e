"""An environment with tools: it is started, played, scored and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.base import EnvironmentContext, Example
from environments.chat import Chat
from environments.registry import _check_shape
from environments.scripted import play
from environments.tools.definition import tool_from
from environments.tools.environment import ToolEnvironment
from environments.tools.hermes import write_hermes
from transport.records import Rollout


async def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


class Sums(ToolEnvironment):
    """One sum."""

    def __len__(self) -> int:
        return 1

    def example(self, index: int) -> Example:
        return Example(index, "2 + 2", "4")

    async def reward(self, example: Example, rollout: Rollout, answer: str) -> float:
        return float(answer == example.answer)


async def test_a_rollout(chat: Chat, tmp_path: Path) -> None:
    environment = Sums(["calculator", tool_from(double)], system_prompt="Use the tools.")
    _check_shape(environment, "sums", "here")
    await environment.start(EnvironmentContext("sums", tmp_path, tmp_path, 0))
    calls = write_hermes("calculator", {"expression": "2 + 2"}) + write_hermes("double", {"number": 2})
    rollout = await play(environment, 0, chat, calls, "4")
    assert rollout.reward == 1.0
    assert rollout.metrics["tools/double/calls"] == 1
    (prompt,) = chat.transcribe([rollout.turns[0].prompt_ids.tolist()])
    assert prompt.startswith(
        "<|system|>Use the tools.<tool>calculator(expression)</tool><tool>double(number)</tool><|end|>"
    )
    await environment.close()


async def test_a_rollout_that_ends_with_a_call_has_no_answer(chat: Chat) -> None:
    rollout = await play(Sums(["calculator"], max_turns=1), 0, chat, write_hermes("calculator", {"expression": "4"}))
    assert (rollout.reward, rollout.state["answer"]) == (0.0, "")


def test_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Sums(max_turns=0)
