"""A field of a client's message is not left out in silence on its way to a template."""

from __future__ import annotations

from typing import Any

import pytest

from counterpoint.environments import messages as module
from counterpoint.environments.gateway.messages import template_messages

FUNCTION = {"name": "look", "arguments": "{}"}
CALL = {"id": "1", "type": "function", "function": FUNCTION, "index": 0}


def part(**fields: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "go", **fields}]}


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [CALL | fields]}


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (part(cache_control="ephemeral"), ""),
        (part(caption="a cat"), "messages[0].content[0]: the field 'caption'"),
        (call(), ""),
        (call(extra_content={"a": 1}), "messages[0].tool_calls[0]: the field 'extra_content'"),
        (call(function=FUNCTION | {"parsed": 1}), "messages[0].tool_calls[0].function: the field 'parsed'"),
    ],
)
def test_a_field_of_a_client_that_is_not_known_is_named_once(
    message: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_logged", set())
    for _ in range(2):
        assert template_messages([message])
    assert [record.getMessage().partition(" is not")[0] for record in caplog.records] == [named] * bool(named)
