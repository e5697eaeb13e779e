"""Job directories whose metrics files tests write, as the roles do, and processes that feed one sink."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counterpoint.job.tracking import tracking
from counterpoint.job.tracking.rows import Sink, SinkSpec, TrackedRow
from counterpoint.job.tracking.sinks_of import SINKS
from counterpoint.transport.exact_json import dumps, loads
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.json_lines import append_line, read_lines
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.launch import descendants
from tests.support.polling import DEADLINE_SECONDS, wait_until


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

    def sink(self, name: str, **options: Any) -> SinkSpec:
        """One of our sinks."""
        return SinkSpec(name, SINKS[name][0], self.directory, "job", options)

    def shown(self) -> dict[int, dict[str, float]]:
        """What TensorBoard shows of the run: of each file all scalars, but for the steps that a later file replaces."""
        shown: dict[int, dict[str, float]] = {}
        for event in events_in(self.directory / "tracking" / "tensorboard" / "a"):
            if event.session_log.status == event.session_log.START:
                shown = {step: values for step, values in shown.items() if step < event.step}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    assert value.tag not in shown.get(event.step, {}), "it shows two values of one step"
                    shown.setdefault(event.step, {})[value.tag] = value.simple_value
        return shown


def events_in(directory: Path) -> Iterator[Any]:
    """The whole events of TensorBoard's files, in their order. A killed writer leaves a part of one."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.suffix):
        data, offset = path.read_bytes(), 0
        while offset + 12 <= len(data):
            (length,) = struct.unpack_from("<Q", data, offset)
            if offset + 16 + length > len(data):
                break
            yield Event.FromString(data[offset + 12 : offset + 12 + length])
            offset += 16 + length


class Feeding:
    """A process that feeds one sink, and looks at the files all the time; `dies_after`: by SIGKILL, once it took so many rows."""

    def __init__(self, job: Job, name: str, dies_after: int = 0, **options: Any) -> None:
        given = dumps([str(job.directory), name, dies_after, options]).decode()
        self._state = job.directory / "tracking" / f"{name}.json"
        self._process = Child(name, [sys.executable, "-m", __name__, given], stdin=subprocess.PIPE)

    def __enter__(self) -> Feeding:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def await_step(self, step: int) -> None:
        """Returns once the sink has it."""
        wait_until(lambda: self._last_step() == step, f"step {step}")

    def _last_step(self) -> int | None:
        runs = loads(self._state.read_bytes())["runs"] if self._state.exists() else {}
        return runs["a"]["step"] if "a" in runs else None

    def maps(self, part: str) -> bool:
        """Whether it, or a process below it, has a file with that in its path in its memory."""
        return any(part in Path(f"/proc/{pid}/maps").read_text() for pid in descendants(self._process.pid))

    def finish(self) -> int:
        """Asks it to send what is left; returns its exit code."""
        self._process.stdin.close()
        return self.wait()

    def wait(self) -> int:
        """Returns its exit code."""
        return self._process.wait(DEADLINE_SECONDS)


def main(given: str) -> None:
    directory, name, dies_after, options = loads(given)
    made: Any = SINKS[name][0]
    taken = 0

    def sink(spec: SinkSpec, identity: str) -> Sink:
        sink: Sink = made(spec, identity)
        write = sink.write

        def counted(row: TrackedRow) -> None:
            nonlocal taken
            write(row)
            taken += 1
            if taken == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)

        sink.write = counted  # type: ignore[method-assign]
        return sink

    tracking.ROWS_PER_FLUSH = 2
    spec = SinkSpec(name, sink, Path(directory), "job", options)
    run = tracking.Tracking([spec], tracking.SinkPatience(follow_seconds=0.02)).run
    sys.exit(1 if run(lambda: bool(select.select([0], [], [], 0)[0])) else 0)


if __name__ == "__main__":
    main(sys.argv[1])
