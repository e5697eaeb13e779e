"""The loop of a rollout with tools: generate, parse, call the tools, tell the model what they returned, until it calls none.

    reply = await play_with_tools(model, [{"role": "user", "content": example.prompt}], tools, state)

Whatever goes wrong in a call (an exception, a deadline, a tool that does not exist, arguments that are not JSON) is told to the
model as the call's result. Only a tool that cannot work at all (`ToolUnavailable`) fails the rollout: that is no fault of the
model. `state["tools"]` counts it all; `tool_metrics` makes metrics of that. A turn gets the rewards that the results of its calls
carry (`ToolResult`); `with_answer` adds that of the last one.
"""

from __future__ import annotations

import asyncio
import math
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

from counterpoint.environments.base import Model, Reply, Score, ToolCall
from counterpoint.environments.chat import Message
from counterpoint.environments.reward import Reward
from counterpoint.environments.tools.definition import ToolError, ToolFunction, ToolResult, ToolUnavailable, as_text
from counterpoint.transport.records import Rollout

COUNTS = "tools"
"""The key of a rollout's state that holds the counts."""

_CUT = "\n[cut: {} of {} characters are left out]"


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds of one rollout."""

    max_turns: int = 10
    """Most model calls of a rollout."""
    call_seconds: float = 60.0
    """Deadline of one call of a tool."""
    observation_characters: int = 8192
    """Longest result that the model is told; the middle of a longer one is cut out."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.call_seconds <= 0 or self.observation_characters < 1:
            raise ValueError("max_turns, call_seconds and observation_characters must be positive")


async def play_with_tools(
    model: Model,
    messages: Sequence[Message],
    tools: Sequence[ToolFunction],
    state: dict[str, Any],
    limits: ToolLimits | None = None,
    turn_reward: Callable[[str], Awaitable[float]] | None = None,
) -> Reply:
    """Plays until the model calls no tool or `limits.max_turns` are used up; returns what its last turn says.

    Calls of one turn run at the same time. `turn_reward` says, of the text of each turn but the last, what it is worth besides
    the rewards of its calls. Raises `ValueError` for a reward that is no finite number.
    """
    limits = limits or ToolLimits()
    by_name = _by_name(tools)
    definitions = [tool.definition for tool in tools]
    counts = state.setdefault(COUNTS, {"turns": 0, "malformed": 0, "calls": {}, "errors": {}})
    history = [*messages]
    prompt_ids: Sequence[int] = model.chat.start(messages, definitions)
    while True:
        turn = await model.generate(prompt_ids)
        counts["turns"] += 1
        reply = await model.parse(turn, definitions)
        if reply.malformed:
            counts["malformed"] += 1
        if counts["turns"] >= limits.max_turns or not (reply.calls or reply.malformed):
            return reply
        text = model.chat.decode(turn.completion_ids.tolist())
        said, (observed, rewards) = _message(reply, text), await _observe(reply, by_name, state, limits)
        if turn_reward is not None:
            rewards.append(await turn_reward(text))
        if rewards:
            model.reward(math.fsum(rewards), turn)
        history += [said, *observed]
        try:
            prompt_ids = model.chat.extend(turn, observed, definitions, said.get("tool_calls", ()))
        except ValueError:  # a template that cannot continue a turn: from the text, as at the gateway
            prompt_ids = model.chat.start(history, definitions)


def _message(reply: Reply, text: str) -> Message:
    """Returns the message that a turn is. Calls that cannot be read are text."""
    if not reply.calls:
        return {"role": "assistant", "content": text}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]
    return {"role": "assistant", "content": reply.content, "tool_calls": calls}


def _by_name(tools: Sequence[ToolFunction]) -> dict[str, ToolFunction]:
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) != len(tools):
        names = sorted(tool.name for tool in tools)
        raise ValueError(f"two tools have the same name: {', '.join(names)}")
    return by_name


async def _observe(
    reply: Reply, by_name: Mapping[str, ToolFunction], state: dict[str, Any], limits: ToolLimits
) -> tuple[list[Message], list[float]]:
    """Makes the calls. Returns the messages that answer them, and the rewards that their results carry."""
    if not reply.calls:
        # No call has been made that a message of a tool could answer.
        text = f"No tool was called. {reply.malformed}"
        return [{"role": "user", "content": _cut(text, limits.observation_characters)}], []
    tasks = [asyncio.create_task(_call(call, by_name, state, limits)) for call in reply.calls]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    texts = [result.content for result in results]
    if reply.malformed:
        texts[-1] = f"{texts[-1]}\n\n{reply.malformed}"
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(reply.calls, texts, strict=True)
    ]
    pairs = zip(reply.calls, results, strict=True)
    return messages, [_reward(call.name, result.reward) for call, result in pairs if result.reward is not None]


@dataclass(frozen=True, slots=True)
class _Told:
    """What a call came to: text for the model, and a reward if the tool gave one, which nobody has checked."""

    content: Any
    reward: object = None


def _reward(tool: str, reward: object) -> float:
    with suppress(OverflowError):  # an integer of over 308 digits
        if isinstance(reward, Real) and math.isfinite(float(reward)):
            return float(reward)
    raise ValueError(f"tool {tool!r}: its result has the reward {reprlib.repr(reward)}; expected a finite number")


async def _call(
    call: ToolCall, by_name: Mapping[str, ToolFunction], state: dict[str, Any], limits: ToolLimits
) -> _Told:
    """Returns what a tool returned, or what went wrong."""
    counts = state[COUNTS]
    counts["calls"][call.name] = counts["calls"].get(call.name, 0) + 1
    ours = asyncio.current_task()
    assert ours is not None
    try:
        async with asyncio.timeout(limits.call_seconds) as deadline:
            returned = await by_name[call.name].call(call.arguments, state)
            told = returned if isinstance(returned, ToolResult) else _Told(returned)
            return _Told(_cut(as_text(told.content), limits.observation_characters), told.reward)
    except asyncio.CancelledError as error:
        if ours.cancelling():
            raise
        problem: BaseException = error
    except ToolUnavailable:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool may fail in any way; the rollout goes on
        problem = error
    counts["errors"][call.name] = counts["errors"].get(call.name, 0) + 1
    if isinstance(problem, TimeoutError) and deadline.expired():
        text = f"no result within {limits.call_seconds:g} s"
    else:
        text = str(problem) if isinstance(problem, ToolError) else f"{type(problem).__name__}: {_say(problem)}"
    return _Told(_cut(f"error: {text}", limits.observation_characters))


def _say(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception of a tool that does not print
        return "it does not print"


def _cut(text: str, limit: int) -> str:
    """Returns a text of about at most `limit` characters: its beginning and its end. Half a character in it becomes a `?`."""
    if len(text) > limit:
        half = limit // 2
        text = text[:half] + _CUT.format(len(text) - 2 * half, len(text)) + "\n" + text[len(text) - half :]
    return text.encode(errors="replace").decode()


def with_answer(rollout: Rollout, reward: float) -> Score:
    """Returns what `score` is to return if the last turn, the answer, is worth `reward`: a number if no turn has a reward yet."""
    given = rollout.turn_rewards
    return reward if given is None else Reward(turns=[*given.tolist()[:-1], reward])


def tool_metrics(state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the counts of a rollout as metrics: turns, malformed turns, and calls and errors of each tool."""
    counts = state.get(COUNTS)
    if not counts:
        return {}
    metrics = {"tools/turns": float(counts["turns"]), "tools/malformed": float(counts["malformed"])}
    for kind in ("calls", "errors"):
        metrics[f"tools/{kind}"] = float(sum(counts[kind].values()))
        metrics |= {f"tools/{name}/{kind}": float(count) for name, count in counts[kind].items()}
    return metrics
