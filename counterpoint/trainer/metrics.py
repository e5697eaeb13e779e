"""The file `trainer/metrics.jsonl`: one JSON object for each trained step of all runs (metrics: `docs/training.md`)."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection, Mapping
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

    def newest(self, run_ids: Collection[str], name: str, count: int) -> dict[str, list[float]]:
        """Returns the last values of a metric by run, the last one last: at most `count`, of the last lines of the file.

        Values that were not finite, which the file cannot hold, are left out. Raises `OSError`.
        """
        found: dict[str, list[float]] = {run_id: [] for run_id in run_ids}
        for _, _, line in islice(lines_from_end(self.path), _LINES_READ):
            own = None if line is None or line.get(name) is None else found.get(str(line.get("run_id")))
            if line is not None and own is not None and len(own) < count:
                own.append(float(line[name]))
        return {run_id: values[::-1] for run_id, values in found.items()}

    def truncate(self, steps: Mapping[str, int]) -> None:
        """Removes the lines of each of these runs after its step, whose training will be repeated.

        Incomplete lines after a run's line of its step are removed, too. The file is read once for all of them, and only the
        lines since then are held in memory. Raises `OSError`.
        """
        first, awaited = None, {*steps}
        for start, _, line in lines_from_end(self.path) if awaited else ():
            if line is not None and not _beyond(line, steps):
                awaited.discard(str(line.get("run_id")))
                if not awaited:
                    break
            else:
                first = start
        if first is None:
            return
        logger.info("%s: removing the lines that runs have beyond the steps they go on from", self.path)
        with self.path.open("rb") as file:
            before = memoryview(mmap.mmap(file.fileno(), first, access=mmap.ACCESS_READ) if first else b"")
            file.seek(first)
            since = [raw for raw in file if (line := whole_object(raw)) is not None and not _beyond(line, steps)]
        write_atomically(self.path, before, *since)


def _beyond(line: Mapping[str, MetricValue], steps: Mapping[str, int]) -> bool:
    run_id = str(line.get("run_id"))
    return run_id in steps and int(line.get("step", 0)) > steps[run_id]
