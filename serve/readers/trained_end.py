"""The newest steps of every run in the trainer's `metrics.jsonl`, read from the file's end: what the overview needs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from job.inspection.metrics_lines import SHORTEST_BYTES, Line, is_number, step_of
from job.inspection.trained_lines import METRICS_FILE
from transport.files.appended_lines import AppendedLines
from transport.files.untrusted import UntrustedFileError, parse_json

KEPT_STEPS = 8
"""Newest steps of a run that the overview knows of."""

LEAST_END_BYTES, END_BYTES_A_RUN, MOST_END_BYTES = 2**18, 3 * 2**12, 2**25
"""How much of the file's end is read for the overview: room for `KEPT_STEPS` lines of each run, side by side."""


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
        if len(raw) < SHORTEST_BYTES:
            return
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
