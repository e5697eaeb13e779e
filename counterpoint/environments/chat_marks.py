"""Marks by which a rendered conversation shows what its template wrote, and where: `environments.chat` looks for them.

A template is a program. What it does with a message is found out by what it makes of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Stands for a completion when the template is rendered to find the text after one. Templates trim and split the assistant's
# text, so it has no white space and no angle brackets.
_COMPLETION = "counterpoint:completion"
PROMPT: Mapping[str, Any] = {"role": "user", "content": "counterpoint:prompt"}

MARK = re.compile(r"counterpoint:\d+;")
"""A mark that `marked_messages` put in."""


@dataclass(frozen=True, slots=True)
class Closing:
    """What a template writes at the end of a turn."""

    begins: int
    """Characters before it, behind the mark: the end of the mark's own value."""
    text: str
    ids: tuple[int, ...]
    """Its ids up to and including the token that ends the turn; empty if its turns end without such a token. A completion that
    ended with a stop token has them already."""


def marks_of(calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the marks of a message that makes these calls, in order."""
    return [f"{_COMPLETION}:{number};" for number in range(len(calls))] or [_COMPLETION]


def said_message(calls: Sequence[Mapping[str, Any]], *, has_arguments: bool = True) -> dict[str, Any]:
    """An assistant's message with a mark in the arguments of each call, or else as its content."""
    if not calls:
        return {"role": "assistant", "content": _COMPLETION}
    marked = [
        {**call, "function": {**call["function"], "arguments": {"counterpoint": mark} if has_arguments else {}}}
        for call, mark in zip(calls, marks_of(calls), strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": marked}


def marked_messages(
    messages: Sequence[Mapping[str, Any]], first: int, *, answers: bool
) -> tuple[list[Mapping[str, Any]], dict[str, tuple[int, str]]]:
    """Returns the messages with marks from the one numbered `first`, and by mark the message's number and what it stands for.

    They have other ids of calls, so that conversations are equal that differ only in these. What the message before that one
    says is `_COMPLETION`, where `after_completion` divides the rendered text.
    """
    marked: list[Mapping[str, Any]] = []
    marks: dict[str, tuple[int, str]] = {}
    ids: dict[object, str] = {}

    def identity(given: object) -> str:
        return ids.setdefault(given, f"call{len(ids):05}")

    def mark(number: int, place: str) -> str:
        if number < first:
            return _COMPLETION if number == first - 1 else "text"
        marks[made := f"counterpoint:{len(marks)};"] = number, f"{place} messages[{number - first}]"
        return made

    for number, message in enumerate(messages):
        changed, role, content = dict(message), message.get("role"), message.get("content")
        calls = message.get("tool_calls") or ()
        place = f"the text of role {role} of"
        is_marked = answers or role != "assistant" or number < first
        if isinstance(content, str) and (content or role == "tool"):
            changed["content"] = mark(number, place) if is_marked else "text"
        elif isinstance(content, list):
            changed["content"] = [
                {**part, "text": mark(number, f"a part of {place}") if is_marked else "text"}
                if isinstance(part, Mapping) and part.get("text")
                else part
                for part in content
            ]
        if calls:
            changed["tool_calls"] = [
                {
                    **call,
                    **({"id": identity(call["id"])} if "id" in call else {}),
                    "function": {**call["function"], "arguments": {"counterpoint": mark(number, "a call of")}},
                }
                if isinstance(call.get("function"), Mapping)
                else call
                for call in calls
            ]
        if "tool_call_id" in message:
            changed["tool_call_id"] = identity(message["tool_call_id"])
        changed |= {name: "text" for name in ("reasoning_content", "reasoning", "thinking") if message.get(name)}
        marked.append(changed)
    return marked, marks


def after_completion(rendered: str) -> str:
    """Returns what follows the last mark of a completion; all of the text if it has none."""
    return rendered.rpartition(_COMPLETION)[2]


def alike(text: str, other: str) -> int:
    """Returns how many first characters two texts have in common."""
    return next(
        (index for index, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]),
        min(len(text), len(other)),
    )
