"""An environment with tools: it is started, played, scored and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.registry import _check_shape
from counterpoint.environments.reward import own_bounds
from counterpoint.environments.scripted import play
from counterpoint.environments.tools.definition import ToolResult, tool_from
from counterpoint.environments.tools.environment import ToolEnvironment
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.environments.workers.load import load_environment
from counterpoint.transport.records import Rollout


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


async def test_rows_tools_and_a_rubric_from_a_configuration(chat: Chat, tmp_path: Path) -> None:
    arguments = {
        "data": {"rows": [{"question": "2 + 2", "answer": "4"}]},
        "rubric": [{"kind": "exact"}],
        "tools": ["calculator"],
        "max_turns": 3,
    }
    environment = load_environment(EnvironmentConfig(name="sums", kind="tools", args=arguments))
    context = EnvironmentContext("sums", tmp_path, tmp_path, 0)
    async with started(environment, context):
        rollout = await play(environment, 0, chat, write_hermes("calculator", {"expression": "2 + 2"}), "4")
        assert rollout.reward == 1.0
        assert rollout.metrics["tools/calculator/calls"] == 1
        without = await play(environment, 0, chat, "5")
    assert without.reward == 0.0


async def found(what: str) -> ToolResult:
    """Says that the call was right."""
    return ToolResult(what, 0.25)


async def described(what: str) -> str:
    """Says what it is."""
    return what


@pytest.mark.parametrize(
    ("tools", "bounds"),
    [
        (["calculator", f"{__name__}:described"], (0.0, 1.0)),
        (["calculator", f"{__name__}:found"], None),
        ([{"kind": "mcp", "command": ["a-server"]}], (0.0, 1.0)),
        ([{"kind": "mcp", "command": ["a-server"], "rewards": True}], None),
    ],
)
def test_a_rubric_bounds_the_reward_where_no_tool_may_give_one(tools: list[Any], bounds: object) -> None:
    arguments = {
        "data": {"rows": [{"question": "2 + 2", "answer": "4"}]},
        "rubric": [{"kind": "exact"}],
        "tools": tools,
    }
    assert own_bounds(load_environment(EnvironmentConfig(name="sums", kind="tools", args=arguments))) == bounds


async def test_the_answers_reward_is_the_last_turns_and_the_sum_the_rollouts(chat: Chat) -> None:
    rollout = await play(Sums([tool_from(found)]), 0, chat, write_hermes("found", {"what": "it"}), "4")
    assert rollout.turn_rewards is not None
    assert (rollout.turn_rewards.tolist(), rollout.reward) == ([0.25, 1.0], 1.25)


async def test_a_rubric_of_turns_scores_each_but_the_last(chat: Chat, tmp_path: Path) -> None:
    arguments = {
        "data": {"rows": [{"question": "2 + 2", "answer": "4", "tests": []}]},
        "rubric": [{"kind": "exact"}],
        "turn_rubric": [{"kind": "regex", "name": "adds", "pattern": r"2 \+ 2", "weight": 0.5}],
        "tools": ["calculator", f"{__name__}:found"],
    }
    environment = load_environment(EnvironmentConfig(name="sums", kind="tools", args=arguments))
    assert own_bounds(environment) is None
    async with started(environment, EnvironmentContext("sums", tmp_path, tmp_path, 0)):
        calls = [
            write_hermes("calculator", {"expression": "2 + 2"}),
            write_hermes("calculator", {"expression": "5"}) + write_hermes("found", {"what": "it"}),
        ]
        rollout = await play(environment, 0, chat, *calls, "4")
        assert rollout.turn_rewards is not None
        assert (rollout.turn_rewards.tolist(), rollout.reward) == ([0.5, 0.25, 1.0], 1.75)
        assert (rollout.metrics["turns/adds"], rollout.metrics["turns/total"]) == (0.5, 0.25)
        assert (rollout.metrics["exact"], rollout.metrics["tools/turns"]) == (1.0, 3)
        at_once = await play(environment, 0, chat, "4")
        assert (at_once.turn_rewards, at_once.reward) == (None, 1.0)
    arguments["turn_rubric"] = [{"kind": "exact", "answers_column": "anser"}]
    with pytest.raises(ValueError, match=r"turn_rubric: part 'exact': .*'anser'; did you mean 'answer'"):
        load_environment(EnvironmentConfig(name="sums", kind="tools", args=arguments))


def test_a_key_that_rows_with_tools_do_not_take() -> None:
    config = EnvironmentConfig(
        name="sums", kind="tools", args={"tools": ["hammer"], "data": {"rows": [{"question": ""}]}}
    )
    with pytest.raises(ValueError, match="environment 'sums'"):
        load_environment(config)
