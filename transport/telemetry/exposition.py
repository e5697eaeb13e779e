"""The exposition of a process's values, in the formats that Prometheus asks for. Importing it imports `prometheus_client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import metrics_core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.telemetry.metric import Metric
from counterpoint.transport.telemetry.values import Histogram, Labels, MetricValues


class Exposition(Collector):
    """The values of a process as metric families, each series with the labels of the process."""

    def __init__(self, values: MetricValues, labels: Mapping[str, str]) -> None:
        self._values = values
        self._labels = dict(labels)

    def collect(self) -> Iterator[metrics_core.Metric]:
        """Yields the families, in the order of the catalogue. The thread rests between them, for a loop that needs the GIL."""
        for metric, series in yielding_gil(self._values.read().items()):
            family = metrics_core.Metric(metric.name, metric.help, metric.kind, metric.unit)
            for labels, value in series.items():
                _add(family, metric, self._named(metric, labels), value)
            yield family

    def encode(self, accept: str) -> tuple[bytes, str]:
        """Returns the text in the format that an `Accept` header prefers, and its content type."""
        encoder: Callable[[Collector], bytes]
        encoder, content_type = choose_encoder(accept)
        return encoder(self), content_type

    def _named(self, metric: Metric, labels: Labels) -> dict[str, str]:
        return {**self._labels, **dict(zip(metric.labels, labels, strict=True))}


def _add(family: metrics_core.Metric, metric: Metric, labels: dict[str, str], value: float | Histogram) -> None:
    if not isinstance(value, Histogram):
        family.add_sample(metric.full_name, labels, float(value))
        return
    total, counts = value.total, list(accumulate(list(value.counts)))
    for bound, count in zip((*map(_number, value.bounds), "+Inf"), counts, strict=True):
        family.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    family.add_sample(f"{metric.name}_sum", labels, total)
    family.add_sample(f"{metric.name}_count", labels, counts[-1])


def _number(bound: float) -> str:
    return repr(float(bound))
