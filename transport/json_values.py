"""JSON of what an environment leaves: its state and metrics. NaN and infinities, which JSON lacks, become text.

Without that, orjson writes them as null, and nobody could tell them from what is absent.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import orjson

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode_values(value: object) -> bytes:
    """Returns JSON; NaN is written as "NaN", and infinities as "Infinity" and "-Infinity".

    Raises `TypeError` for what JSON cannot hold.
    """
    encoded = orjson.dumps(value, option=_OPTIONS)
    return encoded if b"null" not in encoded else orjson.dumps(_with_text(value), option=_OPTIONS)


def _with_text(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = value.tolist() if not np.isfinite(value).all() else value
    if isinstance(value, float | np.floating):
        return value if math.isfinite(value) else _text(float(value))
    if isinstance(value, dict):
        return {name: _with_text(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _with_text(each) for name, each in _attributes(value).items()}
    return value


def _attributes(value: Any) -> dict[str, Any]:
    """Returns what orjson writes of a dataclass."""
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    every = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    return {name: each for name, each in every.items() if not name.startswith("_")}


def _text(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
