"""The loop of a rollout with tools: generate, parse, call the tools, tell the model what they returned, until it calls none.

    reply = await play_with_tools(model, [{"role": "user", "content": example.prompt}], tools, state)

Whatever goes wrong in a call (an exception, a deadline, a tool that does not exist, arguments that are not JSON) is told to the
model as the call's result. Only a tool that cannot work at all (`ToolUnavailable`) fails the rollout: that is no fault of the
model. `state["tools"]` counts it all; `tool_metrics` makes metrics of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.environments.base import Model, Reply, ToolCall
from counterpoint.environments.chat import Message
from counterpoint.environments.tools.definition import ToolError, ToolFunction, ToolUnavailable, as_text

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
) -> Reply:
    """Plays until the model calls no tool or `limits.max_turns` are used up; returns what its last turn says.

    Calls of one turn run at the same time.
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
        said, observed = (
            _message(reply, model.chat.decode(turn.completion_ids.tolist())),
            await _observe(reply, by_name, state, limits),
        )
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
) -> list[Message]:
    """Makes the calls and returns the messages that answer them."""
    if not reply.calls:
        # No call has been made that a message of a tool could answer.
        text = f"No tool was called. {reply.malformed}"
        return [{"role": "user", "content": _cut(text, limits.observation_characters)}]
    tasks = [asyncio.create_task(_call(call, by_name, state, limits)) for call in reply.calls]
    try:
        texts = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if reply.malformed:
        texts[-1] = f"{texts[-1]}\n\n{reply.malformed}"
    return [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(reply.calls, texts, strict=True)
    ]


async def _call(call: ToolCall, by_name: Mapping[str, ToolFunction], state: dict[str, Any], limits: ToolLimits) -> str:
    """Returns what a tool returned, or what went wrong, as text."""
    counts = state[COUNTS]
    counts["calls"][call.name] = counts["calls"].get(call.name, 0) + 1
    ours = asyncio.current_task()
    assert ours is not None
    try:
        async with asyncio.timeout(limits.call_seconds) as deadline:
            return _cut(as_text(await by_name[call.name].call(call.arguments, state)), limits.observation_characters)
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
    return _cut(f"error: {text}", limits.observation_characters)


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
