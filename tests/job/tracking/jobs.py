"""Job directories whose metrics files tests write, as the roles do, and processes of one sink."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from counterpoint.job.tracking.sink_process import SinkSpec
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.json_lines import append_line, read_lines
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.launch import descendants
from tests.support.polling import DEADLINE_SECONDS


class Job:
    """A job's directory with one run, `a`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "run_a" / "control").mkdir(parents=True)
        (directory / "trainer").mkdir()

    def ship(self, step: int, reward: float | None = None) -> None:
        mean = step / 100 if reward is None else reward
        append_line(self.directory / "run_a" / "metrics.jsonl", {"step": step, "time": 1e9 + step, "reward/mean": mean})

    def train(self, step: int, loss: float | None = None) -> None:
        line = {"run_id": "a", "step": step, "time": 1e9 + step + 0.5, "loss": float(step) if loss is None else loss}
        append_line(self.directory / "trainer" / "metrics.jsonl", line)

    def evaluate(self, step: int, value: float) -> None:
        metrics = {"pass@1": {"value": value, "low": None, "high": None}}
        line = {"evaluation": "held", "step": step, "time": 1e9 + step, "metrics": metrics}
        append_line(self.directory / "run_a" / "evaluations.jsonl", line)

    def steps(self, *steps: int) -> None:
        for step in steps:
            self.ship(step)
            self.train(step)

    def rewind_trainer(self, step: int) -> None:
        """See `trainer.metrics.MetricsFile.truncate`."""
        path = self.directory / "trainer" / "metrics.jsonl"
        write_atomically(path, b"".join(raw for raw, line in read_lines(path) if line["step"] <= step))

    def spec(self, name: str, sink: str = "", **options: Any) -> SinkSpec:
        from counterpoint.job.tracking.sinks_of import SINKS

        return SinkSpec(name, sink or SINKS[name][0], str(self.directory), "job", options, poll_seconds=0.02)


@contextmanager
def sink_process(spec: SinkSpec) -> Iterator[SinkProcess]:
    """A process of the sink; it and all below it are killed at the end, if it has not ended."""
    process = SinkProcess(spec)
    try:
        yield process
    finally:
        process.kill()


class SinkProcess:
    """One process of a sink."""

    def __init__(self, spec: SinkSpec) -> None:
        command = [sys.executable, "-m", "counterpoint.job.tracking.sink_process", spec.to_json()]
        self._process = Child(spec.name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.sent = 0

    def await_rows(self, count: int) -> None:
        """Returns once so many rows were sent."""
        while self.sent < count:
            self.sent = int(self._process.line(DEADLINE_SECONDS).split()[-1])

    def maps(self, part: str) -> bool:
        """Whether it, or a process below it, has a file with that in its path in its memory."""
        return any(part in Path(f"/proc/{pid}/maps").read_text() for pid in descendants(self._process.pid))

    def finish(self) -> int:
        """Asks it to send what is left; returns its exit code."""
        self._process.stdin.close()
        return self._process.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        """Kills it and all below it by SIGKILL."""
        self._process.close()
