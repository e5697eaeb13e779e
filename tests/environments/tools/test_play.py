"""The loop of tools: calls are made, results and mistakes are told, and only a tool that cannot work fails the rollout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from counterpoint.environments.base import Reply
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.reward import Reward
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.environments.tools.built_in import calculator_tool
from counterpoint.environments.tools.definition import ToolFunction, ToolResult, ToolUnavailable, tool_from
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.environments.tools.play import ToolLimits, play_with_tools, tool_metrics, with_answer
from counterpoint.transport.records import Rollout, Turn

ASK = [{"role": "user", "content": "2 + 3?"}]


async def boom() -> None:
    """Fails."""
    raise RuntimeError("it broke")


async def hang() -> None:
    """Never returns."""
    await asyncio.Event().wait()


async def quit_python() -> None:
    """Ends the process, or so it thinks."""
    raise SystemExit(3)


async def cancel() -> None:
    """Cancels itself."""
    raise asyncio.CancelledError


async def long(count: int) -> str:
    """Returns a long text."""
    return "a" * count + "z"


async def half() -> dict[str, str]:
    """Returns half a character, as JSON may hold."""
    return {"title": "\ud83d!"}


async def gone() -> None:
    """Cannot work."""
    raise ToolUnavailable("the server of 'gone' does not answer")


async def worth(reward: str) -> ToolResult:
    """Rewards its call with a number, or with what is none."""
    strange: dict[str, Any] = {"text": reward, "a long integer": 10**400}
    return ToolResult({"said": reward}, strange[reward] if reward in strange else float(reward))


TOOLS = [
    calculator_tool(),
    *(tool_from(function) for function in (boom, hang, quit_python, cancel, long, half, gone, worth)),
]


async def run(chat: Chat, *answers: str, limits: ToolLimits | None = None, tools: list[ToolFunction] = TOOLS) -> Any:
    """Plays; returns the reply, the conversation as text, and the state."""
    model = ScriptedModel(chat, answers)
    state: dict[str, Any] = {}
    reply = await play_with_tools(model, ASK, tools, state, limits)
    *_, last = model.turns
    (text,) = chat.transcribe([[*last.prompt_ids.tolist(), *last.completion_ids.tolist()]])
    return reply, text, state


async def test_a_call_is_made_and_its_result_told(chat: Chat) -> None:
    call = write_hermes("calculator", {"expression": "2 + 3"})
    reply, text, state = await run(chat, call, "5")
    assert reply == Reply("5")
    assert text.endswith(
        f"<|assistant|>{call}<|end|><|user|><tool_response>5</tool_response><|end|><|assistant|>5<|end|>"
    )
    assert "<tool>calculator(expression)</tool>" in text
    assert tool_metrics(state) == {
        "tools/turns": 2,
        "tools/malformed": 0,
        "tools/calls": 1,
        "tools/errors": 0,
        "tools/calculator/calls": 1,
    }


async def test_several_calls_of_a_turn_are_answered_in_order(chat: Chat) -> None:
    calls = "".join(write_hermes("calculator", {"expression": text}) for text in ("1", "1/0", "3"))
    _, text, state = await run(chat, calls, "done")
    assert text.count("<tool_response>") == 3
    assert "<tool_response>1</tool_response>" in text
    assert "<tool_response>error: division by zero</tool_response>" in text
    assert state["tools"]["errors"] == {"calculator": 1}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("boom", {}, "error: RuntimeError: it broke"),
        ("hang", {}, "error: no result within 0.01 s"),
        ("quit_python", {}, "error: SystemExit: 3"),
        ("cancel", {}, "error: CancelledError: "),
        ("long", {"count": 100}, "a" * 20 + "\n[cut: 61 of 101 characters are left out]\n" + "a" * 19 + "z"),
    ],
)
async def test_what_goes_wrong_is_told(chat: Chat, name: str, arguments: dict[str, Any], said: str) -> None:
    limits = ToolLimits(call_seconds=0.01 if name == "hang" else 60, observation_characters=40)
    reply, text, state = await run(chat, write_hermes(name, arguments), "ok", limits=limits)
    assert f"<tool_response>{said}</tool_response>" in text
    assert reply.content == "ok"
    assert state["tools"]["errors"].get(name, 0) == (name != "long")


async def test_half_a_character_in_a_result_is_told_as_a_question_mark(chat: Chat) -> None:
    reply, text, _ = await run(chat, write_hermes("half", {}), "ok")
    assert '<tool_response>{"title": "?!"}</tool_response>' in text
    assert reply.content == "ok"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('<tool_call>{"name": "calculator"', "not complete"),
        ('<tool_call>{"name": "calc", "arguments": {}}</tool_call>', 'there is no tool "calc"'),
        (write_hermes("calculator", {"expr": "1"}), "'expr' was unexpected"),
        (write_hermes("calculator", {"expression": 1}), '1 is not of type "string"'),
    ],
)
async def test_a_malformed_call_becomes_an_observation(chat: Chat, answer: str, said: str) -> None:
    reply, text, state = await run(chat, answer, "sorry")
    assert said in text
    assert "<|user|>No tool was called. " in text
    assert text.endswith("<|assistant|>sorry<|end|>")
    assert reply.content == "sorry"
    assert (state["tools"]["malformed"], state["tools"]["calls"]) == (1, {})


async def test_the_complete_calls_of_a_turn_that_was_cut_are_made_and_the_model_is_told(chat: Chat) -> None:
    class Cut(ScriptedModel):
        async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
            reply = await super().parse(turn, tools)
            return replace(reply, malformed="Your turn was cut.") if reply.calls else reply

    model, state = Cut(chat, [write_hermes("calculator", {"expression": "2 + 3"}), "5"]), dict[str, Any]()
    assert (await play_with_tools(model, ASK, TOOLS, state)).content == "5"
    (text,) = chat.transcribe([model.turns[-1].prompt_ids.tolist()])
    assert "<tool_response>5\n\nYour turn was cut.</tool_response>" in text
    assert (state["tools"]["malformed"], state["tools"]["calls"]) == (1, {"calculator": 1})


async def test_a_tool_that_cannot_work_fails_the_rollout(chat: Chat) -> None:
    with pytest.raises(ToolUnavailable, match="the server of 'gone'"):
        await run(chat, write_hermes("gone", {}) + write_hermes("hang", {}))


async def test_turns_are_bounded(chat: Chat) -> None:
    call = write_hermes("calculator", {"expression": "1"})
    reply, _, state = await run(chat, call, call, call, limits=ToolLimits(max_turns=3))
    assert state["tools"]["turns"] == 3
    assert [call.name for call in reply.calls] == ["calculator"]
    assert state["tools"]["calls"] == {"calculator": 2}


async def test_two_tools_of_one_name(chat: Chat) -> None:
    with pytest.raises(ValueError, match="two tools have the same name"):
        await run(chat, "x", tools=[calculator_tool(), calculator_tool()])


async def test_cancelling_a_rollout_cancels_its_calls(chat: Chat) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    rollout = asyncio.create_task(run(chat, write_hermes("wait", {}), tools=[tool_from(wait)]))
    await asyncio.wait_for(started.wait(), 60)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    await asyncio.wait_for(ended.wait(), 60)


def test_the_state_is_json() -> None:
    state: dict[str, Any] = {"tools": {"turns": 1, "malformed": 0, "calls": {"a": 1}, "errors": {"a": 1}}}
    assert tool_metrics(json.loads(json.dumps(state)))["tools/a/errors"] == 1
    assert tool_metrics({}) == {}


async def test_a_turn_gets_what_its_calls_are_worth(chat: Chat) -> None:
    calls = "".join(write_hermes("worth", {"reward": each}) for each in ("0.5", "-0.25"))
    model = ScriptedModel(chat, [write_hermes("calculator", {"expression": "1"}), calls, "done"])
    await play_with_tools(model, ASK, TOOLS, {})
    given = model.turn_rewards.array()
    assert given is not None
    assert given.tolist() == [0.0, 0.25, 0.0]
    (text,) = chat.transcribe([model.turns[-1].prompt_ids.tolist()])
    assert text.count('{"said": "0.5"}') == 1, "the model reads the content alone"
    rollout = Rollout("0-0", 0, "tools", 0, model.turns, turn_rewards=given)
    assert with_answer(rollout, 2.0) == Reward(turns=[0.0, 0.25, 2.0])
    assert with_answer(Rollout("0-0", 0, "tools", 0, model.turns), 2.0) == 2.0


@pytest.mark.parametrize("reward", ["nan", "inf", "text", "a long integer"])
async def test_a_reward_of_a_tool_that_is_none_fails_the_rollout(chat: Chat, reward: str) -> None:
    with pytest.raises(ValueError, match=r"tool 'worth': its result has the reward .*; expected a finite"):
        await run(chat, write_hermes("worth", {"reward": reward}), "done")


async def test_each_turn_but_the_last_is_worth_what_its_text_is_and_its_calls(chat: Chat) -> None:
    seen = []

    async def turn_reward(text: str) -> float:
        seen.append(text)
        return 1.0

    call = write_hermes("worth", {"reward": "0.5"})
    model = ScriptedModel(chat, [call, write_hermes("worth", {}), "done"])
    await play_with_tools(model, ASK, TOOLS, {}, turn_reward=turn_reward)
    given = model.turn_rewards.array()
    assert given is not None
    assert given.tolist() == [1.5, 1.0, 0.0]
    assert seen == [call, write_hermes("worth", {})]
