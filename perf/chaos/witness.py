"""Notes of a job, taken while it runs: what each step was when it was committed, and what the trainer's metrics said it trained.

A job deletes a batch once it is durable, and a metrics line once its step is to be trained again. The notes keep them, and
`perf/chaos/audit.py` compares them with the directory in the end. The witness only reads, and makes a hard link to each batch's
file. A batch that is deleted before the witness comes to look has its link from its orchestrator (`perf/chaos/batch_copies.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from perf.chaos.disk import digest, json_lines, published, run_ids

COMMITTED, TRAINED = "committed.jsonl", "trained.jsonl"
"""Files of the notes: a line for each step, read after its commit, and one for each line of the trainer's metrics."""


class Witness:
    """Reads a job's directory at each `look`. Between two looks any number of steps may be committed and trained."""

    def __init__(self, job: Path, notes: Path) -> None:
        notes.mkdir(parents=True, exist_ok=True)
        self._job = job
        self._notes = notes
        self.committed: dict[str, int] = {}
        """The newest committed step of each run."""
        self.trained: dict[str, int] = {}
        """The newest step of each run in the trainer's metrics."""
        self._lines: set[tuple[str, int, float]] = set()

    def look(self) -> None:
        """Notes what is new."""
        for run_id in run_ids(self._job):
            self._look_at_commits(run_id)
        self._look_at_trainer()

    def _look_at_commits(self, run_id: str) -> None:
        run = self._job / f"run_{run_id}"
        seen = self.committed.get(run_id, 0)
        # Never back: while the directory is read, newer checkpoints may replace all that it listed.
        newest = max(published(run / "checkpoints"), default=0)
        for step in range(seen + 1, newest + 1):
            records = run / "rollouts" / f"step_{step}"
            line = {"run_id": run_id, "step": step, "records": _digest_if_there(records / "rollouts.jsonl")}
            copy = self.copy_of(self._notes, run_id, step)
            copy.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                # Its orchestrator deletes it, and has kept it.
                os.link(records / "batch.bin", copy)
            line["batch"] = _digest_if_there(copy)
            self._note(COMMITTED, line)
        self.committed[run_id] = max(seen, newest)

    def _look_at_trainer(self) -> None:
        self.trained = {}
        for line in json_lines(self._job / "trainer" / "metrics.jsonl"):
            run_id, step = line["run_id"], line["step"]
            self.trained[run_id] = max(step, self.trained.get(run_id, 0))
            if (key := (run_id, step, line["time"])) not in self._lines:
                self._lines.add(key)
                names = ("run_id", "step", "time", "tokens", "samples", "loss")
                self._note(TRAINED, {name: line[name] for name in names})

    def _note(self, name: str, line: dict[str, Any]) -> None:
        with (self._notes / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    @staticmethod
    def copy_of(notes: Path, run_id: str, step: int) -> Path:
        """Returns the path of the copy of a step's batch."""
        return notes / run_id / f"step_{step}.bin"


def _digest_if_there(path: Path) -> str | None:
    try:
        return digest(path)
    except FileNotFoundError:
        return None
