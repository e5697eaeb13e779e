"""What a searcher maximizes or minimizes: one metric or several, each with its mode, and their values in a result."""

from __future__ import annotations

import math
from typing import Any

from tune.errors import TuneError
from tune.result import Result, lookup
from tune.search.searcher import Searcher


def objectives(searcher: Searcher) -> list[tuple[str, str]]:
    """The metrics with their modes. Raises `TuneError` when there are none, or a mode is no `min` or `max`."""
    metrics, modes = (
        [value] if isinstance(value, str) else list(value or []) for value in (searcher.metric, searcher.mode)
    )
    if not metrics or len(metrics) != len(modes) or set(modes) - {"min", "max"}:
        raise TuneError(
            f"{type(searcher).__name__} has metric={searcher.metric!r} and mode={searcher.mode!r}; give it or run() a "
            "metric, and 'min' or 'max' for each"
        )
    return list(zip(metrics, modes, strict=True))


def values_in(searcher: Searcher, result: Result | None) -> list[float] | None:
    """The values of the metrics; None if one is missing or no finite number."""
    values: list[Any] = [lookup(result or {}, metric) for metric, _ in objectives(searcher)]
    if any(
        isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) for value in values
    ):
        return None
    return [float(value) for value in values]
