"""What may be in a configuration or a result: JSON's values, so that they can be journalled and sent to another process.

Nothing here imports numpy, which the process of a trial may never need.
"""

from __future__ import annotations

import math
from typing import Any

from counterpoint.tune.errors import TuneError

MAX_DEPTH = 32
"""Dicts and lists inside one another."""


def as_json(value: Any, where: str = "config", *, finite: bool = True, depth: int = 0) -> Any:
    """The value as JSON would give it back: scalars of numpy and torch become Python's, tuples become lists. A copy.

    A configuration is `finite`: it has no NaN and no infinity, and arrays in it become lists. A result may have NaN and infinity,
    and no arrays.

    Raises:
        TuneError: it cannot be expressed so; the message names the key, the value and what to do.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise TuneError(f"{where}: an integer of more than 64 bits would not survive the journal; give a string")
        return value
    if kind is float:
        if finite and not math.isfinite(value):
            raise TuneError(f"{where}: {value} is no JSON number; pass it as a string, or use None for it")
        return value
    if depth > MAX_DEPTH:
        raise TuneError(f"{where} is more than {MAX_DEPTH} dicts and lists deep, or contains itself")

    def inner(item: Any, name: str) -> Any:
        return as_json(item, f"{where}{name}", finite=finite, depth=depth + 1)

    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TuneError(f"{where}: the key {key!r} is of type {type(key).__name__}; keys must be strings")
        return {str.__str__(key): inner(item, f"/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [inner(item, f"[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration's member the text that it is; `str(value)` may be its name
    for plain in (int, float):
        if isinstance(value, plain):  # a subclass, such as an enumeration's member or numpy's float64
            return inner(plain(value), "")
    if _is_array(value) and (finite or value.ndim == 0):
        return inner(value.tolist(), "")
    raise TuneError(
        f"{where}: {value!r:.80} is a {kind.__module__}.{kind.__qualname__}, which has no JSON form, and nothing is pickled; "
        "give numbers, strings, lists and dicts (functions and classes by their import path, `module:name`)"
    )


def without_numpy(value: Any) -> Any:
    """The value with Python's numbers and lists in place of numpy's, wherever they are in dicts and lists; all else as it is."""
    if _is_array(value):
        return value.tolist()
    if isinstance(value, dict):
        return {key: without_numpy(each) for key, each in value.items()}
    return type(value)(map(without_numpy, value)) if type(value) in (list, tuple) else value


def _is_array(value: Any) -> bool:
    return hasattr(value, "ndim") and hasattr(value, "tolist")
