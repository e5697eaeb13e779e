"""Decoded values as what they are declared to be: the one check of the fields of messages, journals and records by their types.

The bytes are bounded and read before (`transport/unpacked.py`, `transport/exact_json.py`). Here a value becomes a dataclass, a
`msgspec.Struct` or a list of such; bounds stand with the types (`Annotated[int, Meta(ge=0)]`).
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from counterpoint.transport.unpacked import shown

T = TypeVar("T")

_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
"""One step of the path with which msgspec names a part."""


def typed(value: object, kind: type[T], name: str, error: type[ValueError]) -> T:
    """Returns a value as a `kind`: integers count as floats, lists as tuples, and nothing else as what it is not.

    Raises `error` that says which part of `name` is what, and what was expected.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        raise error(_in_words(str(problem), value, name)) from None


def _in_words(problem: str, value: Any, name: str) -> str:
    said, _, path = problem.partition(" - at `")
    for attribute, index in _STEP.findall(path.partition("[...]")[0]):  # msgspec names no value of a dictionary further
        value = value[attribute or int(index)]
        name += f".{attribute}" if attribute else f"[{index}]"
    said = said.partition(", got ")[0].replace("`", "") + (" as keys" if path.startswith("key`") else "")
    return f"{name} is {shown(value)}; {said[0].lower()}{said[1:]}"
