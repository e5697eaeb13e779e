"""The spans of one `spans.jsonl`, found by time without reading the whole file each time, and the steps that they tell of.

An index of blocks says which bytes may hold spans of a window; these are read again when one is asked for. `timeline.py` makes
lanes of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serve.readers.activity.rotated_lines import BLOCK_BYTES, Identity, RotatedLinesFollower
from transport.files.json_lines import object_in
from transport.telemetry.spans import Span, span_in

STEP = "step"
"""The name of the span of a whole step."""

INDEXED_BYTES = 64 * 2**10
"""The size of the lines in one entry of the index."""

MAX_STEPS = 50_000
"""That are known of one run; the oldest are forgotten first."""

MAX_RUNS = 2_048
"""The runs of one trainer's file whose steps are known."""

MAX_SPANS = 50_000
"""That one look returns."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Whole lines: where they are, and between which moments their spans lie."""

    file: Identity
    offset: int
    size: int
    begin: float
    end: float


class SpanFile:
    """One role's spans. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._follower = RotatedLinesFollower(path)
        self._parts: list[_Part] = []
        self._steps: dict[str, dict[int, tuple[float, float]]] = {}

    def update(self) -> None:
        """Reads what was written since the last call."""
        for block in self._follower.new_blocks():
            self._index(block.file, block.offset, block.data)
        if any(part.file not in self._follower.files for part in self._parts):
            self._parts = [part for part in self._parts if part.file in self._follower.files]

    def steps(self, run: str) -> dict[int, tuple[float, float]]:
        """Returns begin and end of the run's steps; of one that was repeated, the later ones."""
        return self._steps.get(run, {})

    def between(self, begin: float, end: float) -> Iterator[Span]:
        """Yields the spans that overlap this time, at most `MAX_SPANS`."""
        left = MAX_SPANS
        for part in self._parts:
            if part.end < begin or part.begin > end:
                continue
            for raw in self._follower.read(part.file, part.offset, part.size).splitlines(keepends=True):
                span = _span_of(raw)
                if span is not None and span.begin < end and span.end > begin:
                    yield span
                    left -= 1
                    if not left:
                        return

    def _index(self, file: Identity, offset: int, data: bytes) -> None:
        assert len(data) <= BLOCK_BYTES
        begins, ends, size = array("d"), array("d"), 0
        for raw in data.splitlines(keepends=True):
            span = _span_of(raw)
            if span is not None:
                begins.append(span.begin)
                ends.append(span.end)
                if span.name == STEP:
                    self._note_step(span)
            size += len(raw)
            if size >= INDEXED_BYTES:
                self._add(file, offset, size, begins, ends)
                offset, size = offset + size, 0
                begins, ends = array("d"), array("d")
        self._add(file, offset, size, begins, ends)

    def _add(self, file: Identity, offset: int, size: int, begins: array[float], ends: array[float]) -> None:
        if begins:
            self._parts.append(_Part(file, offset, size, min(begins), max(ends)))

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
