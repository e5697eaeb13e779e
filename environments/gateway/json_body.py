"""Parses the JSON of a request after its size, its number of values and its depth are known to be bounded."""

from __future__ import annotations

from typing import Any

import orjson

from environments.gateway.errors import Refused

MOST_VALUES = 400_000
"""Commas and opening brackets, those inside of text included: each value takes up to 100 bytes of memory."""

MOST_DEPTH = 64
"""Of lists and objects. Templates and digests walk them by recursion."""


def parse_body(content: bytes) -> dict[str, Any]:
    """Returns the JSON object in `content`. Raises `Refused`."""
    values = content.count(b",") + content.count(b"[") + content.count(b"{")
    if values > MOST_VALUES:
        raise Refused(f"the body has about {values} values; at most {MOST_VALUES} are taken", status=413)
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(f"the body is a {type(value).__name__}; expected a JSON object")
    if is_deep(value):
        raise Refused(f"the body has lists or objects more than {MOST_DEPTH} deep")
    return value


def is_deep(value: dict[str, Any]) -> bool:
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
