"""The reader and the writer of JSON that has a meaning: what files, models, programs and environments write.

orjson reads an integer of more than 64 bits as a float, without a word, and refuses to write one. Here integers are read and
written exactly, and a row of data keeps the text of its decimals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

MAX_DEPTH = 512
"""Objects and arrays inside one another: twice what `orjson` writes. At twice as many, `repr` raises `RecursionError`."""

MAX_WRITTEN_DEPTH = 200
"""Most levels of what is written again as a part of something else: orjson writes 254 levels."""

MAX_DIGITS = 4300
"""Most digits of an integer: Python reads and writes no longer one, since that takes the square of the time."""

_DECODER = msgspec.json.Decoder()
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonError(ValueError):
    """What is no JSON, or more than is read. Its text follows the name of what was read."""


class WrittenDecimal(float):
    """A decimal that a person wrote otherwise than Python would: 2.50 counts as 2.5, and its text is "2.50"."""

    text: str
    """The number's text, as in the file."""

    def __str__(self) -> str:
        return self.text


def loads(data: bytes | bytearray | str, max_depth: int = MAX_DEPTH) -> Any:
    """Returns the value of JSON: integers exactly, decimals as floats. Raises `JsonError`.

    Refused are NaN, infinities and halves of a character (surrogates), decimals beyond the floats, integers of
    `MAX_DIGITS` digits or more, and more than `max_depth` levels.
    """
    try:
        value = _DECODER.decode(data)
        if _brackets(data) > max_depth and is_deeper(value, max_depth):
            raise RecursionError
    except RecursionError:
        raise JsonError(f"this is JSON of objects or arrays more than {max_depth} deep") from None
    except msgspec.ValidationError:
        raise JsonError(
            f"a number is out of range: an integer of {MAX_DIGITS} digits or more, or a decimal beyond 1.8e308"
        ) from None
    except ValueError as error:  # `UnicodeDecodeError` is one
        raise JsonError(f"this is not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    return value


def read_row(data: bytes) -> Any:
    """Returns the value of JSON as `loads`. The decimals of an object have the text that they are written with."""
    row = loads(data, MAX_WRITTEN_DEPTH)
    if isinstance(row, dict) and (decimals := [name for name, value in row.items() if type(value) is float]):
        parts = raw_parts(data)
        for name in decimals:
            row[name] = written_decimal(bytes(parts[name]).decode(), row[name])
    return row


def raw_parts(data: bytes) -> dict[str, msgspec.Raw]:
    """Returns the JSON of each value of an object, unread. For what we wrote: only its brackets are checked."""
    return _PARTS.decode(data)


def written_decimal(text: str, value: float) -> float:
    """Returns `value` with the text that it is written with."""
    if text == repr(value):
        return value
    written = WrittenDecimal(value)
    written.text = text
    return written


def dumps(value: object, *, option: int = 0, default: Callable[[Any], Any] | None = None) -> bytes:
    """Returns JSON as orjson writes it, with integers of any size.

    Raises `TypeError` for what JSON cannot hold, also for an integer of more than `MAX_DIGITS` digits.
    """

    def other(each: Any) -> Any:
        if isinstance(each, WrittenDecimal):
            return orjson.Fragment(each.text)
        if default is None:
            raise TypeError(f"a {type(each).__name__} is no JSON")
        return default(each)

    try:
        return orjson.dumps(value, option=option, default=other)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise
    try:
        value = replaced(value, _as_fragment)
    except RecursionError:
        raise TypeError("lists or dictionaries are nested too deep to be written") from None
    except ValueError:  # of `str`
        raise TypeError(f"an integer of more than {MAX_DIGITS} digits cannot be written") from None
    return orjson.dumps(value, option=option, default=other)


def replaced(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns the value with `leaf` of everything in it that orjson writes as no object or array."""
    if isinstance(value, dict):
        return {str(name) if _is_long(name) else name: replaced(each, leaf) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(each, leaf) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: replaced(each, leaf) for name, each in _attributes(value).items()}
    return leaf(value)


def is_deeper(value: object, limit: int) -> bool:
    """Whether objects and arrays are nested more than `limit` deep in `value`. Without recursion."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def _brackets(data: bytes | bytearray | str) -> int:
    """Returns how many levels JSON may have. Counting is quick, and most of what is read has few brackets."""
    return data.count("[") + data.count("{") if isinstance(data, str) else data.count(b"[") + data.count(b"{")


def _is_long(value: object) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _as_fragment(value: Any) -> Any:
    if not _is_long(value):
        return value
    if len(text := str(int(value))) > MAX_DIGITS:  # with its sign, as they are counted when they are read
        raise ValueError
    return orjson.Fragment(text)


def _attributes(value: Any) -> dict[str, Any]:
    """Returns what orjson writes of a dataclass."""
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    every = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    return {name: each for name, each in every.items() if not name.startswith("_")}
