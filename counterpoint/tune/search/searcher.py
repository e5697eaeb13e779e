"""The contract of a searcher: what suggests configurations and learns from results, without knowing of trials. As Ray Tune's.

`SearchGenerator` makes a `SearchAlg` of it; `ConcurrencyLimiter` and `Repeater` wrap one in
another.
"""

from __future__ import annotations

from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import DEFAULT_METRIC, Result, number_in
from counterpoint.tune.search.search_alg import Learning, undefined

FINISHED = "FINISHED"
"""Returned by `suggest` instead of a configuration: there will be none any more."""


class Searcher(Learning):
    """Suggests configurations. `metric` and `mode` are lists where there are several objectives."""

    FINISHED = FINISHED

    def __init__(self, metric: str | list[str] | None = None, mode: str | list[str] | None = None) -> None:
        self.metric = metric
        self.mode = mode

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any]) -> bool:
        """Takes the experiment's metric, mode and space, if it has none of its own.

        With a mode alone, the metric is `_metric`: what a bare number is reported as. The base takes no space.

        Returns:
            False if it has its own and they are not to be replaced.
        """
        if (self.metric and metric) or (self.mode and mode):
            return False
        self.metric, self.mode = self.metric or metric, self.mode or mode
        if self.mode and not self.metric:
            self.metric = DEFAULT_METRIC
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """A configuration for the trial; None if there is none now; FINISHED if there will be none."""
        raise undefined(self, "suggest(trial_id), which returns a configuration")


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
    values = [number_in(result, metric) for metric, _ in objectives(searcher)]
    known = [float(value) for value in values if value is not None]
    return known if len(known) == len(values) else None
