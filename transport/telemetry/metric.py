"""`Metric` and `LineName`: the rows of the tables that say what each number is called, and what it means.

Each process has its tables beside what sets the numbers; `counterpoint/cli/metrics.py` lists them all.

A number may be in a process's `metrics.jsonl`, in its exposition for Prometheus, or in both. In the first its name is
`area/name`; in the second it follows OpenMetrics: prefix `counterpoint_`, base unit last, and `_total` after that for a counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["", "seconds", "bytes", "ratio", "tokens", "steps", "nats"]

PROMPT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets of what should take milliseconds."""

LONG_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Buckets of what takes seconds or minutes."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A metric family of an exposition. Each is one object, so it is compared by identity."""

    name: str
    """The name with prefix and unit; of a counter without `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    """Besides those that all metrics of a process have."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""
    most_series: int = 256
    """Most combinations of labels at once: foreign names cannot fill the database. Further ones are left out, and counted."""

    @property
    def full_name(self) -> str:
        """The name as a query has it, of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


@dataclass(frozen=True, slots=True, eq=False)
class LineName:
    """A name of numbers in a `metrics.jsonl`. `<label>` in it stands for any text."""

    pattern: str
    help: str
    metric: Metric | None = None
    """What it is in the exposition; None if it is not there."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the metric that the name itself decides; the others are in the pattern."""


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """A kind of process with an endpoint."""

    name: str
    title: str
    about: str
    """The text for people: which process it is, and its key of the port."""
    labels: Mapping[str, str]
    """Labels that all its metrics have, each with its meaning."""
    metrics: tuple[Metric, ...]
    lines: tuple[LineName, ...] = ()
    line_file: str = ""
    """The file of its lines; empty without any."""


DROPPED_SERIES = Metric(
    "counterpoint_telemetry_dropped_series",
    "gauge",
    "combinations of labels that were left out, since their metric had the most that it may have",
)
RESIDENT_MEMORY = Metric("counterpoint_resident_memory_bytes", "gauge", "resident memory of the process", "bytes")
OPEN_FILES = Metric("counterpoint_open_files", "gauge", "open file descriptors of the process")

EVERYWHERE = (DROPPED_SERIES, RESIDENT_MEMORY, OPEN_FILES)
"""What every endpoint shows of its process and of itself."""
