"""The file `trainer/metrics.jsonl`: one JSON object for each trained step of all runs (metrics: `docs/training.md`)."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.json_lines import append_line, lines_from_end, whole_object

logger = logging.getLogger(__name__)

MetricValue = float | int | str

_LINES_READ = 1000
"""Lines from the end in which `MetricsFile.newest` looks."""


class MetricsFile:
    """The metrics of one trainer: appended to, except by `truncate`. One writer."""

    def __init__(self, path: Path) -> None:
        """Writes to `path`, which need not exist yet."""
        self.path = path

    def append(self, line: dict[str, MetricValue]) -> None:
        """Adds one line. Raises `OSError`."""
        append_line(self.path, line)

    def newest(self, run_id: str, name: str, count: int) -> list[float]:
        """Returns the last values of a metric of `run_id`, the last one last: at most `count`, of the last lines of the file.

        Values that were not finite, which the file cannot hold, are left out. Raises `OSError`.
        """
        lines = (line for _, _, line in islice(lines_from_end(self.path), _LINES_READ) if line is not None)
        own = (line[name] for line in lines if line.get("run_id") == run_id and line.get(name) is not None)
        return [float(value) for value in islice(own, count)][::-1]

    def truncate(self, run_id: str, step: int) -> None:
        """Removes the lines of `run_id` after `step`, whose training will be repeated.

        Incomplete lines after its line of `step` are removed, too. Only the lines since then are held in memory. Raises
        `OSError`.
        """
        first = None
        for start, _, line in lines_from_end(self.path):
            if line is not None and line.get("run_id") == run_id and not _beyond(line, run_id, step):
                break
            if line is None or _beyond(line, run_id, step):
                first = start
        if first is None:
            return
        logger.info("%s: removing the lines of run %s beyond step %d", self.path, run_id, step)
        with self.path.open("rb") as file:
            before = memoryview(mmap.mmap(file.fileno(), first, access=mmap.ACCESS_READ) if first else b"")
            file.seek(first)
            since = [raw for raw in file if (line := whole_object(raw)) is not None and not _beyond(line, run_id, step)]
        write_atomically(self.path, before, *since)


def _beyond(line: Mapping[str, MetricValue], run_id: str, step: int) -> bool:
    return line.get("run_id") == run_id and int(line.get("step", 0)) > step
