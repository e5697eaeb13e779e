"""Spans: what a role did from when to when, for the Gantt chart of a step.

A role adds spans as they end, which costs an append to memory; `flush`, in a thread or between two steps, writes them to a
bounded file (`files/rotated_lines.py`). A kill costs the newest second.
`docs/contracts.md` has the format. What is busy too often for a span each time goes through `intervals.py`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.transport.files.rotated_lines import RotatedLines
from counterpoint.transport.telemetry.intervals import Interval

logger = logging.getLogger(__name__)

SPANS_FILE = "spans.jsonl"
"""File of spans. In a run's directory: the spans of its orchestrator, and of the servers as it sees them. In
`trainer/`: the trainer's."""

MAX_BYTES = 8 * 2**20
"""The size of a file: some 50,000 spans."""

MAX_PENDING = 10_000
"""Spans held in memory; of more, the oldest are dropped."""

MAX_ATTRIBUTES = 16
MAX_NAME = 64
"""Characters of a role, a run, a span's name and an attribute's."""
MAX_TEXT = 256
"""Characters of an attribute's text; more are cut off."""

AttributeValue = str | int | float | bool

_OFFSET = time.time() - time.perf_counter()
"""This process's offset, for good: its spans are on one clock that never goes back, whatever sets the machine's."""


def now() -> float:
    """Returns the unix time in seconds, on this process's clock for spans."""
    return _OFFSET + time.perf_counter()


def unix_time(perf_counter: float) -> float:
    """Returns the unix time of a `time.perf_counter()` of this process, or of a `time.monotonic()`, which is the same clock."""
    return _OFFSET + perf_counter


@dataclass(frozen=True, slots=True)
class Span:
    """What `role` did from `begin` to `end`, in unix seconds."""

    role: str
    """`orchestrator`, `inference` or `trainer`."""
    name: str
    begin: float
    end: float
    run: str = ""
    """The run's id; empty if it is of none."""
    step: int = 0
    """The step it is part of; 0 if it is of none."""
    busy: float | None = None
    """Seconds that were really busy, where it stands for several intervals; None: all of it."""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)

    @property
    def interval(self) -> Interval:
        """Its time, to be added up with others."""
        return Interval(self.begin, self.end, self.end - self.begin if self.busy is None else self.busy)


class SpanLog:
    """The spans of one process. `add` and `record` are for any thread, and cost no I/O."""

    def __init__(self, path: Path, role: str, run: str = "") -> None:
        """`role` and `run` are those of spans that do not say otherwise. `path` need not exist yet."""
        self._file = RotatedLines(path, "spans", MAX_BYTES)
        self._role = role
        self._run = run
        self._pending: deque[Span] = deque(maxlen=MAX_PENDING)
        self._lock = threading.Lock()
        """Held while a thread writes."""

    def add(self, span: Span) -> None:
        """Adds a span that has ended."""
        self._pending.append(span)

    def record(
        self,
        name: str,
        begin: float,
        end: float,
        *,
        step: int = 0,
        run: str | None = None,
        role: str | None = None,
        busy: float | None = None,
        **attributes: AttributeValue,
    ) -> None:
        """Adds a span from its parts. `begin` and `end` are of `now`."""
        self.add(
            Span(
                self._role if role is None else role,
                name,
                begin,
                end,
                self._run if run is None else run,
                step,
                busy,
                attributes=attributes,
            )
        )

    def record_intervals(self, name: str, intervals: Iterable[Interval], *, step: int = 0, **more: Any) -> None:
        """Adds a span for each interval; `more` is as `record` takes it."""
        for each in intervals:
            whole = each.busy >= each.end - each.begin
            self.record(name, each.begin, each.end, step=step, busy=None if whole else each.busy, **more)

    @contextmanager
    def measure(self, name: str, *, step: int = 0, **more: Any) -> Iterator[None]:
        """Adds a span of the block, also of one that raises; `more` is as `record` takes it."""
        begin = now()
        try:
            yield
        finally:
            self.record(name, begin, now(), step=step, **more)

    def flush(self) -> None:
        """Writes what was added. Blocks: not for an event loop. Raises nothing."""
        with self._lock:
            if taken := [self._pending.popleft() for _ in range(len(self._pending))]:
                self._file.append(map(line_of, taken))


def line_of(span: Span) -> dict[str, Any]:
    """Returns the line of a span, without what it lacks, within the limits of this module."""
    line: dict[str, Any] = {
        "role": span.role[:MAX_NAME],
        "name": span.name[:MAX_NAME],
        "begin": round(span.begin, 6),
        "end": round(span.end, 6),
    }
    if span.run:
        line["run"] = span.run[:MAX_NAME]
    if span.step:
        line["step"] = span.step
    if span.busy is not None:
        line["busy"] = round(span.busy, 6)
    if span.attributes:
        line["attributes"] = _bounded(span.attributes)
    return line


def span_in(line: Mapping[str, Any]) -> Span | None:
    """Returns the span of a line that anybody may have written; None if it is none."""
    begin, end, busy = _seconds(line.get("begin")), _seconds(line.get("end")), _seconds(line.get("busy"))
    role, name, step = line.get("role"), line.get("name"), line.get("step", 0)
    if begin is None or end is None or end < begin or not isinstance(role, str) or not isinstance(name, str):
        return None
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return None
    run = value if isinstance(value := line.get("run"), str) else ""
    attributes = line.get("attributes")
    return Span(
        role[:MAX_NAME],
        name[:MAX_NAME],
        begin,
        end,
        run[:MAX_NAME],
        step,
        None if busy is None else min(busy, end - begin),
        _bounded(attributes) if isinstance(attributes, dict) else {},
    )


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _bounded(attributes: Mapping[Any, Any]) -> dict[str, AttributeValue]:
    """Returns at most `MAX_ATTRIBUTES` of them, those of a plain type, with texts cut off."""
    plain = {
        name[:MAX_NAME]: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in attributes.items()
        if isinstance(name, str) and isinstance(value, str | int | float | bool)
    }
    return dict(list(plain.items())[:MAX_ATTRIBUTES])
