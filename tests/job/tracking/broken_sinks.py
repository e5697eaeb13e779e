"""Sinks that fail. They note what they took in a file, so that tests can see it."""

from __future__ import annotations

import threading

from counterpoint.job.tracking.rows import Evaluation, Sink, SinkSpec, TrackedRow


class NotingSink(Sink):
    """Keeps the steps that it took in a file, a line each."""

    def __init__(self, spec: SinkSpec, identity: str) -> None:
        self.file = spec.directory / "steps"

    def last_step(self, run_id: str, saved: int) -> int:
        return max(map(int, self.file.read_text().split()), default=0) if self.file.exists() else 0

    def write(self, row: TrackedRow) -> None:
        with self.file.open("a") as file:
            file.write(f"{row.step}\n")

    def write_evaluation(self, result: Evaluation) -> None:
        pass


class HangingSink(NotingSink):
    """Never returns from its third step."""

    def write(self, row: TrackedRow) -> None:
        if row.step == 3:
            threading.Event().wait()
        super().write(row)


class RaisingSink(NotingSink):
    """Cannot be made."""

    def __init__(self, spec: SinkSpec, identity: str) -> None:
        raise RuntimeError("no such project")


class DyingSink(NotingSink):
    """Raises at every second step, after it has taken it."""

    def write(self, row: TrackedRow) -> None:
        super().write(row)
        if row.step % 2 == 0:
            raise OSError("connection reset")
