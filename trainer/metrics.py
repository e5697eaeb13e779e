"""`trainer/metrics.jsonl`: one JSON object a trained step, under the design's metric names, of all runs of this trainer."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import orjson

from transport.atomic import write_atomically

logger = logging.getLogger(__name__)

MetricValue = float | int | str


class MetricsFile:
    """Append-only but for `truncate`. One writer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: dict[str, MetricValue]) -> None:
        """Adds one line in a single write, so that a reader never sees half of one. Raises `OSError`."""
        data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        if written != len(data):
            raise OSError(
                f"{self.path}: only {written} of {len(data)} bytes of a metrics line were written; is the disk full?"
            )

    def truncate(self, run_id: str, step: int) -> None:
        """Removes the lines of `run_id` beyond `step`, whose training is to be repeated, and a last line that was cut short."""
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and not _beyond(orjson.loads(line), run_id, step)]
        if len(kept) != len(lines):
            logger.info(
                "%s: removed %d lines of run %s beyond step %d", self.path, len(lines) - len(kept), run_id, step
            )
            write_atomically(self.path, b"".join(kept))


def _beyond(line: dict[str, MetricValue], run_id: str, step: int) -> bool:
    return line["run_id"] == run_id and int(line["step"]) > step
