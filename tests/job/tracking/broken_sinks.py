"""Sinks that fail. They note what they took in a file, so that tests can see it."""

from __future__ import annotations

import threading

from counterpoint.job.tracking.rows import Evaluation, Row, Target


class NotingSink:
    """Keeps the steps that it took in a file, a line each."""

    def __init__(self, target: Target) -> None:
        self.file = target.directory / "steps"

    def last_step(self, run_id: str) -> int:
        return max(map(int, self.file.read_text().split()), default=0) if self.file.exists() else 0

    def write(self, row: Row) -> None:
        with self.file.open("a") as file:
            file.write(f"{row.step}\n")

    def write_evaluation(self, result: Evaluation) -> None:
        pass

    def rewind(self, run_id: str, step: int) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class HangingSink(NotingSink):
    """Never returns from its third step."""

    def write(self, row: Row) -> None:
        if row.step == 3:
            threading.Event().wait()
        super().write(row)


class RaisingSink(NotingSink):
    """Cannot be made."""

    def __init__(self, target: Target) -> None:
        raise RuntimeError("no such project")


class DyingSink(NotingSink):
    """Raises at every second step, after it has taken it."""

    def write(self, row: Row) -> None:
        super().write(row)
        if row.step % 2 == 0:
            raise OSError("connection reset")
