"""The trainer's `metrics.jsonl`, which holds the steps of all runs: the newest of each run, and where each run's lines are.

The overview needs the newest lines alone, and reads the file's end. To draw one run, all its lines are read: `TrainedLines` notes
where they begin, eight bytes a line, in one pass over the file. It parses only what it gives.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from job.inspection.metrics_lines import Line, is_number, step_of
from transport.files.appended_lines import LONGEST_LINE, AppendedLines
from transport.files.untrusted import UntrustedFileError, open_regular, parse_json

METRICS_FILE = "trainer/metrics.jsonl"

MOST_LINES = 20_000_000
"""Lines of one file that are noted."""

KEPT_STEPS = 8
"""Newest steps of a run that the overview knows of."""

LEAST_END_BYTES, END_BYTES_A_RUN, MOST_END_BYTES = 2**18, 3 * 2**12, 2**25
"""How much of the file's end is read for the overview: room for `KEPT_STEPS` lines of each run, side by side."""

_HEAD = b'{"run_id":"'
_USUAL_LINE = 2**13


@dataclass(slots=True)
class NewestTrained:
    """The newest trained steps of one run."""

    mismatch: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Step and mismatch KL."""
    raw: bytes = b""
    """The newest line."""

    @property
    def line(self) -> Line:
        """The newest line; empty if there is none."""
        return step_of(self.raw) if self.raw else {}


class TrainedEnd:
    """The newest steps of every run that was trained lately, by run id."""

    def __init__(self, directory: Path, runs: int) -> None:
        """`runs`: how many there are, about."""
        newest_bytes = min(MOST_END_BYTES, LEAST_END_BYTES + runs * END_BYTES_A_RUN)
        self._lines = AppendedLines(directory / METRICS_FILE, newest_bytes)
        self.runs: dict[str, NewestTrained] = {}

    def refresh(self) -> None:
        """Reads what was appended. Raises as `AppendedLines`."""
        for _, block in self._lines.new_blocks(self.runs.clear):
            for raw in block.splitlines():
                self._add(raw)

    def _add(self, raw: bytes) -> None:
        try:
            values = parse_json(raw)
        except UntrustedFileError:
            return
        run_id, step, mismatch = values.get("run_id"), values.get("step"), values.get("mismatch_kl")
        if not isinstance(run_id, str) or type(step) is not int or not is_number(values.get("time")):
            return
        newest = self.runs.setdefault(run_id, NewestTrained())
        newest.raw = raw
        if isinstance(mismatch, int | float) and is_number(mismatch):
            newest.mismatch.append((step, mismatch))


class TrainedLines:
    """Where the lines of each run begin."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE
        self._lines = AppendedLines(self._path)
        self._offsets: defaultdict[bytes, array[int]] = defaultdict(lambda: array("q"))
        self._count = 0
        self.generation = 0
        """Grows when all lines were given up: what was read of them no longer counts."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return 8 * self._count + 200 * len(self._offsets)

    def refresh(self) -> None:
        """Notes what was appended. Raises as `AppendedLines`."""
        for offset, block in self._lines.new_blocks(self._clear):
            for raw in block.split(b"\n"):
                if (run_id := _run_of(raw)) is not None and self._count < MOST_LINES:
                    self._offsets[run_id].append(offset)
                    self._count += 1
                offset += len(raw) + 1

    def lines_of(self, run_id: str, since: int) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of a run after the first `since`, each with its offset. Raises `OSError`, `UntrustedFileError`."""
        offsets = self._offsets.get(run_id.encode())
        if offsets is None or len(offsets) <= since:
            return
        with open_regular(self._path) as file:
            for offset in offsets[since:]:
                data = os.pread(file.fileno(), _USUAL_LINE, offset)
                if b"\n" not in data:
                    data = os.pread(file.fileno(), LONGEST_LINE + 1, offset)
                yield offset, data.partition(b"\n")[0]

    def _clear(self) -> None:
        self._offsets.clear()
        self._count = 0
        self.generation += 1


def _run_of(raw: bytes) -> bytes | None:
    """The id of a line's run, without parsing a line as our trainer writes it; None for a line without one."""
    if raw.startswith(_HEAD):
        return raw[len(_HEAD) : raw.find(b'"', len(_HEAD))]
    run_id = step_of(raw).get("run_id") if raw else None
    return run_id.encode(errors="replace") if isinstance(run_id, str) else None
