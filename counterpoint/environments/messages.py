"""The one form in which conversations reach chat templates, whoever wrote them: a client, a file or a dataset.

The same message is written in several ways: text as a string or in parts, absent fields as null, arguments of a call as JSON text
or as an object, with other white space. Templates write each of them differently. Here all get one form, in which histories are
compared, too. A key whose value is null counts as absent, since Parquet and `datasets` give every row the keys of all rows; in
arguments that are JSON text a null stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from counterpoint.environments.chat import Message, Tool
from counterpoint.transport.exact_json import JsonError, loads

logger = logging.getLogger(__name__)

MOST_DEPTH = 64
"""The levels that lists and objects may have. Templates and digests walk them by recursion."""

LONGEST_NAME = 256

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls", "reasoning_content", "reasoning"},
    "tool": {"name", "tool_call_id"},
}
_UNREAD = {"refusal", "annotations"}
"""Fields that answers of OpenAI's API have, or a client adds to them: without meaning for a template."""
_TRAINED = {"weight", "loss_weight", "loss_mask", "loss", "train", "training", "trainable"}
"""Fields by which others say whether a message is trained: OpenAI's and Mistral's, ms-swift's, Axolotl's, and more."""
_COLUMNS = _TRAINED | {"assistant_masks", "completion_mask", "labels"}
"""Columns of a row by which they say it, and in which 1 means trained."""
_MAY_SAY_WHAT_IS_TRAINED = re.compile(
    r"(?:(?<![a-z])|(?=[A-Z]))(?i:train|loss|mask|unmask|weight|learn|supervis|ignor)"
)
"""Words in the name of a field that may say what is trained, at the start of a word, so not in `constraints` and `glossary`."""
_PART_FIELDS = {"type", "text"}
_UNREAD_OF_PARTS = {"cache_control"}
"""What clients add for other servers, and no model reads."""
_CALL_FIELDS = {"id", "type", "function", "name", "arguments", "index"}
"""`index` is in an answer that was streamed."""
_MOST_LOGGED = 64
_logged: set[str] = set()
"""The unknown fields of parts and calls that the log has named."""
_NOTHING = ("", "null")
"""What a row has in a column of JSON text where there are no tools, or no calls."""


class Faulty(ValueError):
    """A conversation that has no such form. Its text is for its author."""

    def __init__(self, where: str, value: object, expected: str) -> None:
        super().__init__(f"{where} is {shown(value)}; {expected}")
        self.where = where
        """The field at fault."""


def shown(value: object) -> str:
    """A value that somebody sent, short enough for a message."""
    text = repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= 80 else text[:77] + "..."


def json_of(text: str) -> object:
    """Returns what a text says; None if it is not JSON."""
    try:
        return loads(text)
    except JsonError:
        return None


def is_deep(value: dict[str, Any] | list[Any]) -> bool:
    """Whether lists and objects are nested more than `MOST_DEPTH` deep in `value`. Without recursion."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


class Normaliser:
    """Gives messages and tools their form."""

    def __init__(self, *, is_row: bool, parse: Callable[[str], object] = json_of) -> None:
        """`is_row`: for a row of data, which may also have other roles and fields, lists as JSON text, and calls without an id.

        `parse` reads JSON text, and returns None for what is none.
        """
        self._is_row = is_row
        self._parse = parse

    def messages(self, messages: object) -> list[Message]:
        """Returns the messages. One of a row that is not trained has `weight` 0. Raises `Faulty`."""
        found = self._list("messages", messages)
        if not found:
            raise Faulty("messages", messages, "expected a list of at least one message {role, content}")
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(found)]

    def refuse_row(self, row: Mapping[str, Any], drawn_by: str | None) -> None:
        """Raises `Faulty` for a column that says that not all of the row is trained, except `drawn_by`, its own weight."""
        for name, given in row.items():
            if name != drawn_by and self._may_leave_out(name, given):
                raise Faulty(
                    name,
                    given,
                    "this column may say what is trained, and is not read: give the messages that are not trained "
                    'weight = 0, or leave it out, with data.columns = { messages = "messages" }; data.weight says how often a '
                    "row is drawn",
                )

    def _may_leave_out(self, name: str, given: object) -> bool:
        if name not in _COLUMNS and not _MAY_SAY_WHAT_IS_TRAINED.search(name):
            return False
        value = given if not isinstance(given, str) or (read := self._parse(given)) is None else read
        return any(
            each != 1 or name not in _COLUMNS
            if isinstance(each, int | float)
            else each not in (None, *_NOTHING) and (name in _TRAINED or isinstance(each, list))
            for each in (value if isinstance(value, list) else [value])
        )

    def tools(self, tools: object) -> list[Tool]:
        """Returns the tools; none for null. Raises `Faulty` for what is no function of OpenAI's API."""
        if tools is None or (self._is_row and tools in _NOTHING):
            return []
        if (found := self._list("tools", tools)) is None:
            raise Faulty("tools", tools, "expected a list of tools")
        made: dict[str, Tool] = {}
        for index, tool in enumerate(found):
            each = self._tool(tool, f"tools[{index}]")
            if (name := each["function"]["name"]) in made:
                raise Faulty(f"tools[{index}].function.name", name, "expected a name that no other tool has")
            made[name] = each
        return list(made.values())

    def _list(self, where: str, value: object) -> list[Any] | None:
        if self._is_row and isinstance(value, str):
            value = self._parse(value)
        return self._shallow(value, where) if isinstance(value, list) else None

    def _object(self, value: object, where: str) -> object:
        """The object, also where it stands as JSON text in a row."""
        return self._shallow(self._parse(value), where) if self._is_row and isinstance(value, str) else value

    @staticmethod
    def _shallow(value: Any, where: str) -> Any:
        if isinstance(value, dict | list) and is_deep(value):
            raise Faulty(where, value, f"expected lists and objects at most {MOST_DEPTH} deep")
        return value

    def _message(self, message: object, where: str) -> Message:
        message = self._object(message, where)
        if not isinstance(message, dict):
            raise Faulty(where, message, "expected an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not (self._is_row or role in _ROLES):
            expected = "text" if self._is_row else f"one of {', '.join(_ROLES)}"
            raise Faulty(f"{where}.role", role, f"expected {expected}")
        role = _ROLES.get(role, role)
        content = _text(message.get("content"), f"{where}.content", is_row=self._is_row)
        found: dict[str, Any] = {"role": role, "content": content}
        for name, value in message.items():
            if name in ("role", "content") or value is None or (name in _UNREAD and not value):
                continue
            if name == "tool_calls" and self._is_row and value in _NOTHING:
                continue
            if name == "tool_calls" and (role == "assistant" or self._is_row):
                if calls := self._calls(value, f"{where}.tool_calls"):
                    found["tool_calls"] = calls
            elif name in _FIELDS.get(role, ()):
                if not isinstance(value, str):
                    raise Faulty(f"{where}.{name}", value, "expected text")
                found["reasoning_content" if name == "reasoning" else name] = value
            elif self._is_row and _MAY_SAY_WHAT_IS_TRAINED.search(name):
                if not _is_trained(name, value, role, f"{where}.{name}"):
                    found["weight"] = 0
            elif self._is_row:
                found[name] = _without_nulls(value)
            else:
                raise Faulty(f"{where}.{name}", value, "this field is not known here; leave it out")
        return found

    def _calls(self, calls: object, where: str) -> list[dict[str, Any]]:
        if not isinstance(calls := self._object(calls, where), list):
            raise Faulty(where, calls, "expected a list of calls")
        return [self._call(call, f"{where}[{index}]") for index, call in enumerate(calls)]

    def _call(self, call: object, where: str) -> dict[str, Any]:
        call = self._object(call, where)
        if self._is_row and isinstance(call, dict) and call.get("function") is None and "name" in call:
            call = {"id": call.get("id"), "function": call}
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(call, dict)
            or (call.get("type") or "function") != "function"
            or not isinstance(function, dict)
        ):
            expected = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise Faulty(where, call, f"expected {expected}")
        name, identity = function.get("name"), call.get("id")
        has_identity = isinstance(identity, str) or (self._is_row and identity is None)
        if not isinstance(name, str) or not has_identity:
            raise Faulty(where, call, "its id and its function's name must be text")
        _check_known(call, _CALL_FIELDS, where, is_row=self._is_row)
        _check_known(function, _CALL_FIELDS, f"{where}.function", is_row=self._is_row)
        arguments = self._arguments(function.get("arguments") or "{}", f"{where}.function.arguments")
        made = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return made if identity is None else {"id": identity, **made}

    def _arguments(self, given: object, where: str) -> dict[str, Any]:
        parsed = self._parse(given) if isinstance(given, str) else _without_nulls(given)
        if not isinstance(parsed, dict) or is_deep(parsed):
            raise Faulty(where, given, f"expected a JSON object as text, at most {MOST_DEPTH} deep")
        return parsed

    def _tool(self, tool: object, where: str) -> dict[str, Any]:
        tool = _without_nulls(self._object(tool, where))
        if self._is_row and isinstance(tool, dict) and "function" not in tool and "name" in tool:
            tool = {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(function, dict) or tool.get("type") != "function":
            raise Faulty(where, tool, 'expected {"type": "function", "function": {...}}')
        name, at = function.get("name"), f"{where}.function.parameters"
        parameters = _without_nulls(self._object(function.get("parameters") or {}, at))
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise Faulty(f"{where}.function.name", name, f"expected a name of at most {LONGEST_NAME} characters")
        if not isinstance(function.get("description") or "", str):
            raise Faulty(f"{where}.function.description", function["description"], "expected text")
        if not isinstance(parameters, dict):
            raise Faulty(at, function["parameters"], "expected a JSON schema")
        if "parameters" in function:
            function = {**function, "parameters": parameters}
        # Every reader of columns has an order of its own. This one is that of OpenAI's documentation, and of vLLM.
        return _ordered(
            {**tool, "function": _ordered(function, "name", "description", "parameters")}, "type", "function"
        )


def _is_trained(name: str, value: object, role: str, where: str) -> bool:
    """What a field says of a message of a row. Raises `Faulty` where that cannot be done."""
    if name not in _TRAINED:
        raise Faulty(
            where, value, "this field may say what is trained, and is not known here; weight is, which is 0 or 1"
        )
    if not isinstance(value, int | float) or value not in (0, 1):
        raise Faulty(where, value, "expected 0 or 1, or false or true: a message is trained or not, and no share of it")
    if value and role != "assistant":
        raise Faulty(where, value, f"a message of role {role} is never trained; expected 0, or no such field")
    return bool(value)


def _check_known(value: Mapping[str, Any], known: Collection[str], where: str, *, is_row: bool) -> None:
    """Raises `Faulty` for another field of a row. A client's is logged, once: clients add what is for other servers."""
    for name, each in value.items():
        if name in known or each is None:
            continue
        if is_row:
            raise Faulty(f"{where}.{name}", each, "this field is not known here; leave it out")
        if name not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(name)
            logger.warning("%s: the field %s is not known here: what it says is left out", where, shown(name))


def _text(content: object, where: str, *, is_row: bool) -> str:
    """The content as one string; parts are joined by a line break, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Faulty(where, content, "expected text, or a list of parts of text")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise Faulty(f"{where}[{index}]", kind, "only parts of type text are taken")
        known = _PART_FIELDS if is_row else _PART_FIELDS | _UNREAD_OF_PARTS
        _check_known(part, known, f"{where}[{index}]", is_row=is_row)
        parts.append(part["text"])
    return "\n".join(parts)


def _without_nulls(value: Any) -> Any:
    """Returns the value without the keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _ordered(values: dict[str, Any], *first: str) -> dict[str, Any]:
    return {name: values[name] for name in first if name in values} | values
