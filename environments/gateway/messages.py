"""Checks the messages and tools of a chat request, and writes them as chat templates read them.

Different clients write the same message differently: text as a string or in parts, absent fields as `null`, arguments of a call
with other white space. `template_messages` gives all of them one form, which is also the form that histories are compared in.
"""

from __future__ import annotations

from typing import Any, NoReturn

import orjson

from environments.chat import Message, Tool
from environments.gateway.errors import Refused, shown
from environments.gateway.json_body import MOST_DEPTH, MOST_VALUES, count_values, is_deep

MOST_MESSAGES = 10_000
MOST_TOOLS = 512
LONGEST_NAME = 256

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls", "reasoning_content", "reasoning"},
    "tool": {"name", "tool_call_id"},
}
_UNREAD = {"refusal", "annotations"}
"""Fields that our own answers have, or a client adds to them: without meaning for a template."""


def template_messages(messages: object) -> list[Message]:
    """Returns the messages in the form that templates read. Raises `Refused`, which names the field at fault."""
    if not isinstance(messages, list) or not messages:
        raise Refused(f"messages is {shown(messages)}; expected a list of at least one message", parameter="messages")
    if len(messages) > MOST_MESSAGES:
        raise Refused(f"{len(messages)} messages; at most {MOST_MESSAGES} are taken", parameter="messages")
    arguments = _Arguments()
    return [_template_message(message, f"messages[{index}]", arguments) for index, message in enumerate(messages)]


class _Arguments:
    """Parses the arguments of a request's calls. The check of the body sees them as text, and does not count their values."""

    def __init__(self) -> None:
        self._values = 0

    def parse(self, text: str) -> object:
        """Returns what the text says; None if it is not JSON. Raises `Refused` if all that was parsed has too many values."""
        content = text.encode()
        self._values += count_values(content)
        if self._values > MOST_VALUES:
            what = f"the arguments of its calls have about {self._values} values"
            raise Refused(f"messages: {what}; at most {MOST_VALUES} are taken", status=413, parameter="messages")
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return None


def _template_message(message: object, where: str, arguments: _Arguments) -> Message:
    if not isinstance(message, dict):
        _refuse(where, message, "expected an object with role and content")
    role = _ROLES.get(message["role"]) if isinstance(message.get("role"), str) else None
    if role is None:
        _refuse(f"{where}.role", message.get("role"), f"expected one of {', '.join(_ROLES)}")
    found: dict[str, Any] = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    for name, value in message.items():
        if name in ("role", "content") or value is None or (name in _UNREAD and not value):
            continue
        if name not in _FIELDS[role]:
            _refuse(f"{where}.{name}", value, "this field is not known here; leave it out")
        if name == "tool_calls":
            if calls := _calls(value, f"{where}.tool_calls", arguments):
                found["tool_calls"] = calls
        elif not isinstance(value, str):
            _refuse(f"{where}.{name}", value, "expected text")
        else:
            found["reasoning_content" if name == "reasoning" else name] = value
    return found


def _text(content: object, where: str) -> str:
    """The content as one string; parts are joined by a line break, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, content, "expected text, or a list of parts of text")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            _refuse(f"{where}[{index}]", kind, "only parts of type text are taken")
        parts.append(part["text"])
    return "\n".join(parts)


def _calls(calls: object, where: str, arguments: _Arguments) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        _refuse(where, calls, "expected a list of calls")
    return [_call(call, f"{where}[{index}]", arguments) for index, call in enumerate(calls)]


def _call(call: object, where: str, arguments: _Arguments) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(function, dict):
        _refuse(where, call, 'expected {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    name, identity = function.get("name"), call.get("id")
    if not isinstance(name, str) or not isinstance(identity, str):
        _refuse(where, call, "its id and its function's name must be text")
    given = function.get("arguments") or "{}"
    parsed = arguments.parse(given) if isinstance(given, str) else given
    if not isinstance(parsed, dict) or is_deep(parsed):
        _refuse(f"{where}.function.arguments", given, f"expected a JSON object as text, at most {MOST_DEPTH} deep")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": parsed}}


def template_tools(tools: object) -> list[Tool]:
    """Returns the tools. Raises `Refused` for what is no function of OpenAI's API."""
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        _refuse("tools", tools, f"expected a list of at most {MOST_TOOLS} tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            _refuse(where, tool, 'expected {"type": "function", "function": {...}}')
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or name in names:
            _refuse(f"{where}.function.name", name, "expected a name that no other tool has")
        if not isinstance(function.get("description") or "", str):
            _refuse(f"{where}.function.description", function["description"], "expected text")
        if not isinstance(function.get("parameters") or {}, dict):
            _refuse(f"{where}.function.parameters", function["parameters"], "expected a JSON schema")
        names.add(name)
    return tools


def _refuse(where: str, value: object, expected: str) -> NoReturn:
    raise Refused(f"{where} is {shown(value)}; {expected}", parameter=where)
