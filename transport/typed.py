"""Decoded values as what they are declared to be: the one check of the fields of messages, journals and records by their types.

The bytes are bounded and read before (`transport/unpacked.py`, `transport/exact_json.py`). Here a value becomes a dataclass, a
`msgspec.Struct` or a list of such; bounds stand with the types (`Annotated[int, Meta(ge=0)]`).
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from counterpoint.transport.unpacked import shown

T = TypeVar("T")

_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
"""One step of the path with which msgspec names a part."""

_LONGEST_SAID = 100
"""Characters of what msgspec says: it quotes names and values that were found, whatever their length."""

_met: set[Any] = set()
_meeting = threading.Lock()


def met(kind: T) -> T:
    """Returns a type, which one thread at a time has msgspec meet: 0.22 does not guard that, and the process could end.

    Every type that msgspec decodes or converts to passes here, elsewhere as `msgspec.json.decode(data, type=met(Kind))`.
    """
    if kind not in _met:
        with _meeting:
            msgspec.msgpack.Decoder(kind)
            _met.add(kind)
    return kind


def typed(value: object, kind: type[T], name: str, error: type[ValueError]) -> T:
    """Returns a value as a `kind`: integers count as floats, lists as tuples, and nothing else as what it is not.

    Raises `error` that says which part of `name` is what, and what was expected.
    """
    try:
        return msgspec.convert(value, met(kind))
    except msgspec.ValidationError as problem:
        raise error(_in_words(str(problem), value, kind, name)) from None


def _in_words(problem: str, value: Any, kind: Any, name: str) -> str:
    said, _, path = problem.rpartition(" - at `") if " - at `" in problem else (problem, "", "")
    names = getattr(kind, "__struct_fields__", ())  # a struct that travels as a list has its fields by index
    # What was found, and is quoted in what msgspec says, may look like a path.
    with suppress(LookupError, TypeError, ValueError):
        for attribute, index in _STEP.findall(path.partition("[...]")[0]):  # it names no value of a dictionary further
            value = value[attribute or int(index)]
            part = attribute or (names[int(index)] if names else "")
            name, names = name + (f".{part}" if part else f"[{index}]"), ()
    said = said.partition(", got ")[0].replace("`", "")[:_LONGEST_SAID]
    said += " as keys" if path.startswith("key`") else ""
    return f"{name} is {shown(value)}; {said[0].lower()}{said[1:]}"
