"""`MetricValues`: the present values of a process's metrics. Its loop writes them without a lock, a scrape's thread reads them.

One thread writes. The reader copies a dictionary or a list in one call of the interpreter, which no other thread interrupts, so
a scrape never makes the writer wait. A histogram's count is the sum of the buckets that were copied: it always agrees with them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from counterpoint.transport.telemetry.metric import DROPPED_SERIES, Metric

Labels = tuple[str, ...]
"""Values of a metric's labels, in their order."""

OTHER = "other"
"""The last label of a counter's further series, once there are `most_series`."""

LONGEST_LABEL = 128
"""Characters of a label's value; the rest is cut off."""


class Histogram:
    """A cumulative histogram of the process."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Adds one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_stall(self, lag: float, interval: float, most: int) -> None:
        """Adds the values lag, lag - interval, ... down to 0, at most so many: all samples that were due while one waited.

        As `counterpoint/run/loop_health/lag.py`:`samples_of`, at a cost that does not grow with the stall.
        """
        number = min(int(lag / interval) + 1, most)
        if number == 1:
            self.observe(lag)
            return
        below = 0
        for index, bound in enumerate((*self.bounds, math.inf)):
            above = 0 if bound >= lag else min(number, math.ceil((lag - bound) / interval))
            self.counts[index] += number - above - below
            below = number - above
        self.total += number * lag - interval * number * (number - 1) / 2


Read = Callable[[], Iterable[tuple[Metric, Labels, "float | Histogram"]]]
"""What a scrape asks, in its own thread: it reads what nobody changes, and blocks on nothing that a loop holds."""


class MetricValues:
    """The values of the metrics of one process."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Counters and histograms without labels begin at 0; what else has no value yet is not there."""
        self._series: dict[Metric, dict[Labels, float | Histogram]] = {metric: {} for metric in metrics}
        self._groups: dict[str, Mapping[tuple[Metric, Labels], float]] = {}
        self._sources: tuple[Read, ...] = ()
        self._dropped = 0
        for metric, series in self._series.items():
            if not metric.labels and metric.kind != "gauge":
                series[()] = 0.0 if metric.kind == "counter" else Histogram(metric.buckets)

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Adds to a counter."""
        series = self._series[metric]
        key = _short(labels)
        if key not in series and len(series) >= metric.most_series:
            self._dropped += 1
            key = (*key[:-1], OTHER)
        series[key] = series.get(key, 0.0) + amount  # type: ignore[operator]

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Sets a gauge."""
        series, key = self._series[metric], _short(labels)
        if key not in series and len(series) >= metric.most_series:
            self._dropped += 1
            return
        series[key] = value

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """Returns the histogram of a metric, to observe into."""
        series, key = self._series[metric], _short(labels)
        found = series.get(key)
        if found is None:
            found = Histogram(metric.buckets)
            if len(series) < metric.most_series:
                series[key] = found
            else:
                self._dropped += 1
        assert isinstance(found, Histogram)
        return found

    def attach(self, metric: Metric, histogram: Histogram) -> None:
        """Shows a histogram that another object observes into."""
        self._series[metric][()] = histogram

    def replace(self, group: str, values: Mapping[tuple[Metric, Labels], float]) -> None:
        """Shows these values of gauges, in place of those that the group had."""
        for metric, _ in values:
            assert metric in self._series, metric.name
        self._groups = {**self._groups, group: dict(values)}

    def drop_group(self, group: str) -> None:
        """Shows the values of the group no more."""
        self._groups = {name: values for name, values in self._groups.items() if name != group}

    def forget(self, label: str, value: str) -> None:
        """Drops every series with this value of the label."""
        for metric, series in self._series.items():
            if label in metric.labels:
                at = metric.labels.index(label)
                self._series[metric] = {key: each for key, each in series.items() if key[at] != value}

    def on_scrape(self, read: Read) -> None:
        """Has each scrape show also what `read` returns then."""
        self._sources = (*self._sources, read)

    def read(self) -> dict[Metric, dict[Labels, float | Histogram]]:
        """Returns all present values. For the thread of a scrape."""
        shown = {metric: series.copy() for metric, series in self._series.copy().items()}
        dropped = self._dropped
        for group in self._groups.values():
            for (metric, labels), value in group.items():
                dropped += not _put(shown, metric, labels, value)
        for read in self._sources:
            for metric, labels, found in read():
                dropped += not _put(shown, metric, labels, found)
        if DROPPED_SERIES in shown:
            shown[DROPPED_SERIES] = {(): dropped}
        return {metric: series for metric, series in shown.items() if series}


def _put(
    shown: dict[Metric, dict[Labels, float | Histogram]], metric: Metric, labels: Labels, value: float | Histogram
) -> bool:
    series, key = shown[metric], _short(labels)
    if key not in series and len(series) >= metric.most_series:
        return False
    series[key] = value
    return True


def _short(labels: Sequence[str]) -> Labels:
    return tuple(label[:LONGEST_LABEL] for label in labels)
