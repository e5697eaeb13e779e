"""A program for the tests: what looks from outside like a run's orchestrator and its trainer's part, and answers requests.

`python -m tests.tune.runs.fake_orchestrator FILE --join DIRECTORY --resume`. It holds the run's lock, and writes a line of
metrics a step. Files in the run's `control/` direct it: it takes no step beyond the number in `allowed`, dies at the step in
`die`, ends with code 0 at that in `leave`, refuses copies with `refuse`, and ignores SIGTERM with `stubborn`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from counterpoint.run.changes import Change, in_force, read_journal, write_journal
from counterpoint.run.requests import Answer, ChangeRequest, CopyRequest, DamagedRequest, waiting_requests, write_answer
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.notify import notify_ready
from tests.support.jobs import shipped_line

KINDS = ("save", "copy", "change")


class FakeRun:
    def __init__(self, run_dir: Path, trainer: Path, settings: dict[str, Any]) -> None:
        self.run_dir, self.control, self.trainer, self.settings = run_dir, run_dir / "control", trainer, settings
        self.metrics = run_dir / "metrics.jsonl"
        self.settings["training"]["learning_rate"] = in_force(read_journal(run_dir), sys.maxsize).get(
            "training.learning_rate", settings["training"]["learning_rate"]
        )
        self.step = len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def number_in(self, name: str, default: int) -> int:
        file = self.control / name
        return int(file.read_text() or default) if file.exists() else default

    def take_step(self) -> None:
        self.step += 1
        line = shipped_line(self.step, time.time()) | {"learning_rate": self.settings["training"]["learning_rate"]}
        with open(self.metrics, "a") as file:
            file.write(json.dumps(line) + "\n")

    def has_copied(self, request_id: str) -> bool:
        """Whether the copy was made before this process: as a real one, it is killed between a copy and its answer."""
        made = self.control / "copied.txt"
        line = (
            next((line for line in made.read_text().splitlines() if request_id in line), None)
            if made.exists()
            else None
        )
        while line is not None and self.step < int(line.split()[0]):
            self.take_step()
        return line is not None

    def answer_requests(self) -> None:
        for request_id, request in list(waiting_requests(self.run_dir, KINDS)):
            assert not isinstance(request, DamagedRequest)
            source_step = None
            if isinstance(request, CopyRequest):
                if (self.control / "refuse").exists():
                    reason = (self.control / "refuse").read_text()
                    write_answer(self.run_dir, Answer(request_id=request_id, outcome="refused", reason=reason))
                    continue
                source_step = request.step
                if not self.has_copied(request_id):
                    with open(self.control / "copied.txt", "a") as file:
                        file.write(f"{self.step + 1} {request.source} {request.step} {request_id}\n")
                    self.take_step()
            elif isinstance(request, ChangeRequest):
                self.settings["training"]["learning_rate"] = request.changes["training.learning_rate"]
                made = [Change(request_id=request_id, step=self.step + 1, changes=request.changes)]
                write_journal(self.run_dir, [*read_journal(self.run_dir), *made])
            else:
                with publish_directory(self.trainer / "saved" / f"step_{self.step}"):
                    pass
            step = self.step + 1 if isinstance(request, ChangeRequest) else self.step
            write_answer(
                self.run_dir, Answer(request_id=request_id, outcome="done", step=step, source_step=source_step)
            )

    def go(self) -> None:
        while self.step < self.settings["steps"]:
            self.answer_requests()
            if self.step < self.number_in("allowed", 1_000_000):
                self.take_step()
                if self.step == self.number_in("die", -1):
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.step == self.number_in("leave", -1):
                    os._exit(0)
            time.sleep(0.01)
        last = self.run_dir / "checkpoints" / f"step_{self.step}"
        if not last.exists():  # else the tuner was killed after the run's end
            with publish_directory(last):
                pass


def main(file: Path, output: Path) -> None:
    settings = tomllib.loads(file.read_text())
    run_dir = output / f"run_{settings['run_id']}"
    stubborn = (run_dir / "control" / "stubborn").exists()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: sys.exit(143))
    take_lock(run_dir / "orchestrator.lock", "another orchestrator runs")
    (run_dir / "control").mkdir(exist_ok=True)
    run = FakeRun(run_dir, output / "trainer" / settings["run_id"], settings)
    notify_ready()
    run.go()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[3]))
