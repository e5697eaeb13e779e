"""Values that may leave the process of a trial: JSON's, NaN and infinity included. Scalars of numpy and torch become Python's."""

from __future__ import annotations

from typing import Any

from counterpoint.tune.errors import TuneError

MAX_DEPTH = 32
"""Dicts and lists inside one another."""

_LARGEST = 2**64 - 1
_SMALLEST = -(2**63)


class NotJson(TuneError):
    """A value has no JSON form; the message names its key and its type."""


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """Returns `value` with JSON's types only. Raises `NotJson` that says which part of `where` has none."""
    kind = type(value)
    if kind is str or kind is float or kind is bool or value is None:
        return value
    if kind is int:
        if not _SMALLEST <= value <= _LARGEST:
            raise NotJson(f"{where} is an integer of more than 64 bits; report it as a float or a string")
        return value
    if depth > MAX_DEPTH:
        raise NotJson(f"{where} is more than {MAX_DEPTH} dicts and lists deep, or contains itself")
    if isinstance(value, dict):
        return json_dict(value, where, depth)
    if isinstance(value, list | tuple):
        return [json_value(part, f"{where}[{index}]", depth + 1) for index, part in enumerate(value)]
    for plain in (str, bool, int, float):
        if isinstance(value, plain):  # a subclass, such as an enumeration's member or numpy's float64
            return json_value(plain(value), where, depth + 1)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return json_value(value.item(), where, depth + 1)
    raise NotJson(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which has no JSON form; report numbers, strings, lists and dicts"
    )


def json_dict(value: dict[Any, Any], where: str, depth: int = 0) -> dict[str, Any]:
    """The same for a dict, whose keys must be strings."""
    for key in value:
        if not isinstance(key, str):
            raise NotJson(f"{where} has the key {key!r}, a {type(key).__name__}; keys must be strings")
    return {str(key): json_value(part, f"{where}[{key!r}]", depth + 1) for key, part in value.items()}
