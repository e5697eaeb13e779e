"""Where each run's lines are in the trainer's `metrics.jsonl`, which holds the steps of all runs.

All who read the lines of a job's runs share one pass over the file: eight bytes a line are noted, and a line is parsed when it
is given.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from counterpoint.job.reading.metrics.metrics_lines import step_of
from counterpoint.transport.files.appended_lines import LONGEST_LINE, AppendedLines
from counterpoint.transport.files.untrusted import open_regular

METRICS_FILE = "trainer/metrics.jsonl"

MOST_LINES = 20_000_000
"""Lines of one file that are noted. Later ones are left out."""

_HEAD = re.compile(rb'\{"run_id": ?"([^"\\]*)"')
"""How our trainer's lines begin: the run is known without parsing them."""

_USUAL_LINE = 2**13
"""Bytes that are read first of a line; a longer one is read a second time."""


class TrainedLines:
    """The places at which the lines of each run begin."""

    def __init__(self, directory: Path) -> None:
        """Reads the lines of the job in `directory`."""
        self._path = directory / METRICS_FILE
        self._lines = AppendedLines(self._path)
        self._offsets: defaultdict[bytes, array[int]] = defaultdict(lambda: array("q"))
        self._count = 0
        self.generation = 0
        """Grows when all lines were given up: what was read of them no longer counts."""

    @property
    def unread(self) -> str:
        """Says that the last `refresh` did not come to the end of the file, and how far it came; empty if it did."""
        return self._lines.how_far if self._lines.more else ""

    def refresh(self, deadline: float) -> None:
        """Notes what was appended, until the monotonic clock shows `deadline`. Raises as `AppendedLines`.

        A gigabyte takes one to two seconds. The deadline may pass by the time of one look of the file, a quarter of that.
        """
        while time.monotonic() < deadline:
            self._look()
            if not self._lines.more:
                return

    def count_of(self, run_id: str) -> int:
        """Returns how many lines of a run are known."""
        return len(self._offsets.get(run_id.encode(), ()))

    def lines_of(
        self, run_id: str, since: int, until: int | None = None, every: int = 1
    ) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of a run after the first `since`, up to `until` (all), with their offsets; of `every` so many, one.

        Raises `OSError`, `UntrustedFileError`.
        """
        offsets = self._offsets.get(run_id.encode())
        if offsets is None or len(offsets) <= since:
            return
        try:
            file = open_regular(self._path)
        except FileNotFoundError:  # it was removed since the last `refresh`
            return
        with file:
            for offset in offsets[since:until:every]:
                data = os.pread(file.fileno(), _USUAL_LINE, offset)
                if b"\n" not in data:
                    data = os.pread(file.fileno(), LONGEST_LINE + 1, offset)
                yield offset, data.partition(b"\n")[0]

    def _look(self) -> None:
        for offset, block in self._lines.new_blocks(self._clear):
            begin = 0
            while begin < len(block):
                end = block.find(b"\n", begin)
                head = _HEAD.match(block, begin, end)
                run_id = head[1] if head is not None else _run_of(block[begin:end])
                if run_id is not None and self._count < MOST_LINES:
                    self._offsets[run_id].append(offset + begin)
                    self._count += 1
                begin = end + 1

    def _clear(self) -> None:
        self._offsets.clear()
        self._count = 0
        self.generation += 1


def _run_of(raw: bytes) -> bytes | None:
    """The id of the run of a line that does not begin with it, as those of our trainer do; None for a line without one."""
    run_id = step_of(raw).get("run_id")
    return run_id.encode(errors="replace") if isinstance(run_id, str) else None
