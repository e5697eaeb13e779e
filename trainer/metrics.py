"""`trainer/metrics.jsonl`: one JSON object a trained step, under the design's metric names, of all runs of this trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from transport.atomic import write_atomically
from transport.lines import append_line, read_lines

logger = logging.getLogger(__name__)

MetricValue = float | int | str


class MetricsFile:
    """Append-only but for `truncate`. One writer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: dict[str, MetricValue]) -> None:
        """Adds one line. Raises `OSError`."""
        append_line(self.path, line)

    def truncate(self, run_id: str, step: int) -> None:
        """Removes the lines of `run_id` beyond `step`, whose training is to be repeated, and lines that are torn."""
        kept = [raw for raw, line in read_lines(self.path) if not _beyond(line, run_id, step)]
        before = self.path.stat().st_size if self.path.exists() else 0
        if sum(map(len, kept)) != before:
            logger.info("%s: removed the lines of run %s beyond step %d", self.path, run_id, step)
            write_atomically(self.path, *kept)


def _beyond(line: Mapping[str, MetricValue], run_id: str, step: int) -> bool:
    return line.get("run_id") == run_id and int(line.get("step", 0)) > step
