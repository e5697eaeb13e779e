"""The catalogue: names by the rules of OpenMetrics, one meaning each, and a page that names only those."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from counterpoint.cli.metrics import PROCESSES
from counterpoint.transport.telemetry.exposition import Exposition
from counterpoint.transport.telemetry.lines import NameTable
from counterpoint.transport.telemetry.metric import EVERYWHERE, LineName, Metric, Process
from counterpoint.transport.telemetry.values import Histogram, MetricValues
from tests.test_docs import REPOSITORY

METRICS = [*(metric for process in PROCESSES for metric in process.metrics), *EVERYWHERE]

RESERVED = ("_total", "_created", "_bucket", "_count", "_sum", "_info", "_gcount", "_gsum")
"""Endings that OpenMetrics gives to samples."""

UNITS = ("seconds", "bytes", "ratio", "tokens", "steps", "nats")

FOREIGN = {"milliseconds", "ms", "minutes", "percent", "kilobytes", "megabytes", "mb", "share"}
"""Words that stand for no base unit."""


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_follows_openmetrics(metric: Metric) -> None:
    assert re.fullmatch(r"counterpoint(_[a-z0-9]+)+", metric.name)
    assert not metric.name.endswith(RESERVED)
    assert not FOREIGN & set(metric.name.split("_"))
    ending = metric.name.rpartition("_")[2]
    assert metric.unit == (ending if ending in UNITS else "")
    assert metric.help
    assert not metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert all(low < high for low, high in pairwise(metric.buckets))
    for label in metric.labels:
        assert re.fullmatch(r"[a-z][a-z_]*", label)
        assert label not in ("le", "quantile", "job", "instance", "counterpoint_job", "process")


def test_a_name_is_that_of_one_metric() -> None:
    names = [metric.name for process in PROCESSES for metric in process.metrics] + [each.name for each in EVERYWHERE]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_labels_of_a_process_are_no_labels_of_its_metrics(process: Process) -> None:
    for metric in process.metrics:
        assert not set(metric.labels) & set(process.labels), metric.name


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_each_row_of_a_line_names_its_metric_and_all_its_labels(process: Process) -> None:
    for row in process.lines:
        assert row.help
        assert row.metric is None or row.metric in (*process.metrics, *EVERYWHERE), row.pattern
        if row.metric is not None:
            given = {*re.findall(r"<(\w+)>", row.pattern), *row.labels}
            assert given | {"run"} == {*row.metric.labels, "run"}, row.pattern


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_a_name_of_a_row_is_found_as_that_row(process: Process) -> None:
    names = NameTable(process.lines)
    for row in process.lines:
        name = re.sub(r"<(\w+)>", r"some-\1.1", row.pattern)
        found = names.find(name)
        assert found is not None
        assert found[0] is row, f"{name} is taken for {found[0].pattern}"
    assert len({row.pattern for row in process.lines}) == len(process.lines)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_an_exposition_of_everything_parses(process: Process) -> None:
    """The parser of OpenMetrics refuses duplicates, units that are not in the name, and buckets out of order."""
    values = MetricValues((*process.metrics, *EVERYWHERE))
    for metric in process.metrics:
        labels = [f'{label} "x"\n\\' for label in metric.labels]
        match metric.kind:
            case "counter":
                values.add(metric, 1, *labels)
            case "gauge":
                values.set(metric, 1.5, *labels)
            case "histogram":
                values.histogram(metric, *labels).observe(0.3)
    text, kind = Exposition(values, dict.fromkeys(process.labels, "a")).encode("application/openmetrics-text")
    assert kind.startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}  # type: ignore[no-untyped-call]
    for metric in process.metrics:
        family = families[metric.name]
        assert (family.type, family.unit, family.documentation) == (metric.kind, metric.unit, metric.help)
        assert all(process.labels.keys() <= sample.labels.keys() for sample in family.samples)
    assert text.decode().endswith("# EOF\n")


def test_the_exposition_of_nothing_parses() -> None:
    text, _ = Exposition(MetricValues(()), {}).encode("application/openmetrics-text")
    assert list(text_string_to_metric_families(text.decode())) == []  # type: ignore[no-untyped-call]


def test_the_page_names_only_what_there_is() -> None:
    """Its tables: a name of a line or of a metric in the first cell, perhaps with a name of a metric in the second."""
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    known = {row.pattern for process in PROCESSES for row in process.lines} | {metric.full_name for metric in METRICS}
    rows = re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 10
    assert {*named, *re.findall(r"counterpoint_\w+[a-z]", page)} - known == {"counterpoint_job"}  # a label


def test_a_row_that_hides_another_is_noticed() -> None:
    """The test above can fail."""
    names = NameTable((LineName("a/<x>", "first"), LineName("a/b", "second")))
    found = names.find("a/b")
    assert found is not None
    assert found[0].pattern == "a/<x>"


def test_an_infinite_bucket_has_everything() -> None:
    metric = Metric("counterpoint_time_seconds", "histogram", "time", "seconds", buckets=(1.0,))
    values = MetricValues((metric,))
    values.histogram(metric).observe(99.0)
    assert isinstance(found := values.read()[metric][()], Histogram)
    assert found.counts == [0, 1]
