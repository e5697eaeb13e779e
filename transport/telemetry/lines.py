"""`LineReader`: takes a process's metrics lines, and sets the values of the metrics that their numbers are.

A gauge has the value of the newest line, and is absent if that has none. A counter grows by each line's number, from 0 at the
process's start. A histogram takes each line's number as one value. A number without a row in the catalogue is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from counterpoint.transport.telemetry.metric import LineName, Metric
from counterpoint.transport.telemetry.values import Labels, MetricValues

MOST_KNOWN = 8192
"""Names that are remembered with their rows. A line has a few hundred."""


class NameTable:
    """The rows of a process's line names, found by a name."""

    def __init__(self, rows: Iterable[LineName]) -> None:
        """Takes the rows; if several match a name, the first counts."""
        self._rows = [(row, re.compile(_expression(row.pattern), re.DOTALL)) for row in rows]
        self._known: dict[str, tuple[LineName, Mapping[str, str]] | None] = {}

    def find(self, name: str) -> tuple[LineName, Mapping[str, str]] | None:
        """Returns the row of a name, and what it has in place of the row's labels; None if there is no such row."""
        if name not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            matches = ((row, expression.fullmatch(name)) for row, expression in self._rows)
            self._known[name] = next(((row, match.groupdict()) for row, match in matches if match is not None), None)
        return self._known[name]


class LineReader:
    """Turns lines into values."""

    def __init__(self, values: MetricValues, rows: Iterable[LineName]) -> None:
        self._values = values
        self._names = NameTable(rows)
        self._lasting: dict[str, dict[tuple[Metric, Labels], float]] = {}

    def take(
        self, line: Mapping[str, Any], group: str, labels: Mapping[str, str] | None = None, lasting: bool = False
    ) -> None:
        """Takes a line. Its gauges replace those of the group's line before; with `lasting` they are added to them.

        `labels` are the labels that its names do not say, such as the run.
        """
        gauges = self._lasting.setdefault(group, {}) if lasting else {}
        for name, value in line.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if (found := self._names.find(name)) is None or (metric := found[0].metric) is None:
                continue
            given = {**(labels or {}), **found[1], **found[0].labels}
            own = tuple(given[label] for label in metric.labels)
            if metric.kind == "counter":
                self._values.add(metric, max(0.0, value), *own)
            elif metric.kind == "histogram":
                self._values.histogram(metric, *own).observe(value)
            else:
                gauges[metric, own] = value
        self._values.replace(group, gauges)


def _expression(pattern: str) -> str:
    """Returns the regular expression of a pattern: a label stands for anything but a slash, at the end and before one for all."""
    parts = re.split(r"<(\w+)>", pattern)
    expression = re.escape(parts[0])
    for label, after in zip(parts[1::2], parts[2::2], strict=True):
        free = label in ("metric", "error", "player")
        expression += f"(?P<{label}>{'.+?' if free else '[^/]+'}){re.escape(after)}"
    return expression
