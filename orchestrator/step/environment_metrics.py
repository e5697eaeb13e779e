"""Means of the metrics that environments give their rollouts, for a step's metrics line.

An environment's metrics are foreign data. Their number, their names and their size are bounded here, and only finite numbers
count, so that no environment can fill the line or name a metric of ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from transport.records import Rollout

PREFIX = "environment/"
"""Prefix of the metrics `environment/<environment>/<metric>/mean`."""

MAX_METRICS = 64
"""Most metrics of one environment in a line: those that come first."""

MAX_NAME = 64
"""Characters of a metric's name; the rest is cut off."""

_MAX_BYTES = 65536
"""The size of a rollout's encoded metrics; of larger ones none count."""

_NO_PART_OF_A_NAME = re.compile(r"[^A-Za-z0-9_./-]")


def environment_metrics(completed: Sequence[Rollout]) -> dict[str, float]:
    """Returns the mean of each metric over the completed rollouts of its environment that have it."""
    values: dict[str, dict[str, list[float]]] = {}
    for rollout in completed:
        of_environment = values.setdefault(rollout.environment, {})
        for name, value in _numbers(_metrics_of(rollout)):
            if name in of_environment or len(of_environment) < MAX_METRICS:
                of_environment.setdefault(name, []).append(value)
    return {
        f"{PREFIX}{environment}/{name}/mean": mean
        for environment, of_environment in sorted(values.items())
        for name, numbers in sorted(of_environment.items())
        if math.isfinite(mean := math.fsum(number / len(numbers) for number in numbers))
    }


def _metrics_of(rollout: Rollout) -> Mapping[Any, Any]:
    """Returns the metrics as they were when the group was finalized."""
    if rollout.saved is None:
        return rollout.metrics
    if len(rollout.saved.metrics) > _MAX_BYTES:
        return {}
    metrics = orjson.loads(rollout.saved.metrics)
    return metrics if isinstance(metrics, dict) else {}


def _numbers(metrics: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(name, str) and name and isinstance(value, int | float):
            try:
                number = float(value)
            except OverflowError:  # an int beyond the floats
                continue
            if math.isfinite(number):
                yield _NO_PART_OF_A_NAME.sub("_", name)[:MAX_NAME], number
