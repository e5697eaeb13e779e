"""Reads calls in the format of Hermes, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, without a server.

For models in tests and demonstrations, which have no server whose parser could be asked. It is the format of the built-in models'
chat template, and of Qwen's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.environments.base import Reply
from counterpoint.environments.chat import Tool
from counterpoint.environments.tools.calls import read_calls

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def parse_hermes(text: str, tools: Sequence[Tool], new_id: Callable[[], str]) -> Reply:
    """Returns what a completion says."""
    content, opening, rest = text.partition(OPENING)
    found: list[tuple[str, str]] = []
    while opening:
        written, _, following = rest.partition(CLOSING)
        try:
            call = json.loads(written)
            found.append((str(call["name"]), json.dumps(call["arguments"])))
        except (ValueError, TypeError, KeyError, RecursionError):
            return Reply(text, malformed="a call was begun, but it is not complete or not in the expected format")
        _, opening, rest = following.partition(OPENING)
    return read_calls(found, tools, new_id, content)


def write_hermes(name: str, arguments: dict[str, Any]) -> str:
    """Returns a call as a model writes it."""
    return f"{OPENING}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CLOSING}"
