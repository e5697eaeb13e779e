"""Parses the JSON of a request after its size, its number of values and its depth are known to be bounded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.messages import MOST_DEPTH, is_deep
from counterpoint.transport.exact_json import JsonError, loads

MOST_VALUES = 200_000
"""Commas and opening brackets outside of text. Each value takes up to 100 bytes of memory, and 100 ns of the event loop."""

_FEW_VALUES = 1000

MOST_LONG_DIGITS = 20_000
"""The most digits that all integers of more than 64 bits have together. Reading one takes the square of its length: up to 2 ms
of the loop for these."""

_LONG = b"0" * 20
_LONG_INTEGER = re.compile(rb"(?<![\d.])\d{20,}+")
"""Not the digits after a point, which are read in one go."""
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)

_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def parse_body(content: bytes) -> dict[str, Any]:
    """Returns the JSON object in `content`. Raises `GatewayRefused`."""
    # The count without text takes ten times as long, of the event loop. Text only adds to the first one.
    if _marks(content) > MOST_VALUES or (len(content) > MOST_LONG_DIGITS and _long_digits(content) > MOST_LONG_DIGITS):
        refuse_many("the body has", *count_values(content))
    try:
        value = loads(content)
    except JsonError as error:
        raise GatewayRefused(f"the body cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise GatewayRefused(f"the body is a {type(value).__name__}; expected a JSON object")
    if is_deep(value):
        raise GatewayRefused(f"the body has lists or objects more than {MOST_DEPTH} deep")
    return value


def count_values(content: bytes) -> tuple[int, int]:
    """Returns about how many values JSON has, and how many digits its integers of more than 64 bits, before it is parsed.

    Where there may be many, text is left out of the count.
    """
    values, digits = _marks(content), _long_digits(content)
    if values > _FEW_VALUES or digits:
        content = _TEXT.sub(b"", content)
        values = _marks(content)
        digits = sum(map(len, _LONG_INTEGER.findall(content))) if _long_digits(content) else 0
    return values, digits


def is_one_of(value: object, values: Iterable[object]) -> bool:
    """Whether a value is one of these. JSON tells 1 and true apart, Python does not."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def refuse_many(where: str, values: int, digits: int, parameter: str | None = None) -> None:
    """Raises `GatewayRefused` for more values or digits than are parsed."""
    for count, most, what in ((values, MOST_VALUES, "values"), (digits, MOST_LONG_DIGITS, "digits of long integers")):
        if count > most:
            said = f"{where} about {count} {what}; at most {most} are taken"
            raise GatewayRefused(said, status=413, parameter=parameter)


def _long_digits(content: bytes) -> int:
    """Returns how many digits stand in rows of 20 and more, rounded down to whole scores."""
    if b"0" * 5 not in content[::4].translate(_DIGITS_AS_ZEROS):  # the whole takes five times as long
        return 0
    return len(_LONG) * content.translate(_DIGITS_AS_ZEROS).count(_LONG)


def _marks(content: bytes) -> int:
    return content.count(b",") + content.count(b"[") + content.count(b"{")
