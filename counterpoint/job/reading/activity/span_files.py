"""The spans of one `spans.jsonl`, found by time without reading the whole file each time, and the steps that they tell of.

An index of blocks says which bytes may hold spans of a window; these are read again when one is asked for. `timeline.py` makes
lanes of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from counterpoint.transport.files.place import Place
from counterpoint.transport.files.rotated_lines import RotatedReader
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in
from counterpoint.transport.telemetry.spans import Span, span_in

STEP = "step"
"""The name of the span of a whole step."""

NEWEST_BYTES = 32 * 2**20
"""The bytes read at the end of a file met anew. Its writer keeps it far smaller."""

INDEXED_BYTES = 64 * 2**10
"""The size of the lines in one entry of the index."""

MAX_STEPS = 50_000
"""Most steps remembered of one run; the oldest are forgotten first."""

MAX_RUNS = 2_048
"""The runs of one trainer's file whose steps are known."""

MAX_SPANS = 50_000
"""Most spans that one look returns."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Whole lines: where they end, and between which moments their spans lie."""

    file: int
    behind: Place
    size: int
    begin: float
    end: float


class SpanFile:
    """One role's spans. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._reader = RotatedReader(path, NEWEST_BYTES)
        self._parts: list[_Part] = []
        self._steps: dict[str, dict[int, tuple[float, float]]] = {}

    def update(self) -> None:
        """Reads what was written since the last call; nothing, while a file is there that cannot be read."""
        with suppress(OSError, UntrustedFileError):
            for place, block in self._reader.new_blocks():
                self._index(place, block)
        self._parts = [part for part in self._parts if part.file >= self._reader.file - 1]

    def steps(self, run: str) -> dict[int, tuple[float, float]]:
        """Returns begin and end of the run's steps; of one that was repeated, the later ones."""
        return self._steps.get(run, {})

    def between(self, begin: float, end: float) -> Iterator[Span]:
        """Yields the spans that overlap this time, at most `MAX_SPANS`."""
        left = MAX_SPANS
        for part in self._parts:
            if part.end < begin or part.begin > end:
                continue
            for raw in self._reader.read_before(part.behind, part.size).splitlines(keepends=True):
                span = _span_of(raw)
                if span is not None and span.begin < end and span.end > begin:
                    yield span
                    left -= 1
                    if not left:
                        return

    def _index(self, place: Place, data: bytes) -> None:
        begins, ends, first, size = array("d"), array("d"), 0, 0
        for raw in data.splitlines(keepends=True):
            span = _span_of(raw)
            if span is not None:
                begins.append(span.begin)
                ends.append(span.end)
                if span.name == STEP:
                    self._note_step(span)
            size += len(raw)
            if size - first >= INDEXED_BYTES or size == len(data):
                place = place.plus(data[first:size])
                if begins:
                    part = _Part(self._reader.file, place, size - first, min(begins), max(ends))
                    self._parts.append(part)
                begins, ends, first = array("d"), array("d"), size

    def _note_step(self, span: Span) -> None:
        steps = self._steps.get(span.run)
        if steps is None:
            if len(self._steps) >= MAX_RUNS:
                return
            steps = self._steps[span.run] = {}
        steps.pop(span.step, None)  # of one that was repeated, the later time, in its place
        steps[span.step] = (span.begin, span.end)
        if len(steps) > MAX_STEPS:
            del steps[next(iter(steps))]


def _span_of(raw: bytes) -> Span | None:
    line = object_in(raw)
    return None if line is None else span_in(line)
