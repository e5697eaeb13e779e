"""JSON of what an environment leaves: its state and metrics. NaN and infinities, which JSON lacks, become text.

Without that, orjson writes them as null, and nobody could tell them from what is absent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson

from counterpoint.transport.exact_json import dumps, replaced

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode_values(value: object) -> bytes:
    """Returns JSON; NaN is written as "NaN", and infinities as "Infinity" and "-Infinity".

    Raises as `dumps`.
    """
    encoded = dumps(value, option=_OPTIONS)
    return encoded if b"null" not in encoded else dumps(replaced(value, _with_text), option=_OPTIONS)


def _with_text(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
        return replaced(value.tolist(), _with_text)
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
