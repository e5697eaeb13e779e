"""What may be in a configuration once it is drawn: JSON values, so that it can be journalled and sent to another process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from counterpoint.tune.errors import TuneError


def as_json(value: Any, where: str = "config") -> Any:
    """The value as JSON would give it back: numpy's numbers become Python's, tuples become lists. A copy.

    Raises:
        TuneError: it cannot be expressed so; the message names the key, the value and what to do.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise TuneError(
                f"{where}: {value} has more than 64 bits and would not survive the journal; pass it as a string"
            )
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TuneError(f"{where}: {value} is no JSON number; pass it as a string, or use None for it")
        return float(value)
    if isinstance(value, np.ndarray):
        return as_json(value.tolist(), where)
    if isinstance(value, list | tuple):
        return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TuneError(f"{where}: the key {key!r} is of type {type(key).__name__}; keys must be strings")
        return {key: as_json(item, f"{where}/{key}") for key, item in value.items()}
    raise TuneError(
        f"{where}: {value!r} is of type {type(value).__name__}, which cannot be written to the journal as JSON; "
        "name it by a string (functions and classes by their import path, `module:name`)"
    )


def without_numpy(value: Any) -> Any:
    """The value with Python's numbers and lists in place of numpy's, wherever they are in dicts and lists; all else as it is."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: without_numpy(each) for key, each in value.items()}
    return type(value)(map(without_numpy, value)) if type(value) in (list, tuple) else value
