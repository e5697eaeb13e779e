"""Calls a function with the metrics of each trained step of a job, in a thread of its own, while the job runs."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from counterpoint.job.directory import run_ids_in
from counterpoint.job.reading.metrics.metrics_lines import Follower, Line, step_of
from counterpoint.job.reading.metrics.trained_lines import TrainedLines
from counterpoint.orchestrator.early_warnings.watch import METRIC as WARNINGS
from counterpoint.run.loop_health.slow_spots import METRIC

TRAINER = "trainer/"
"""Precedes a trainer's metric that has the name of an orchestrator's."""

POLL_SECONDS = 0.5

_NO_COLUMNS = {"run_id", "step", METRIC, WARNINGS, TRAINER + "run_id", TRAINER + "step", TRAINER + METRIC}
"""What lines have that is no metric with a column of its own."""


def joined(step: int, shipped: Line, learned: Line) -> Line:
    """Returns the metrics of one step: what the orchestrator says of it, and what the trainer says."""
    both = shipped | {(TRAINER + name if name in shipped else name): value for name, value in learned.items()}
    return {"step": step} | {name: both[name] for name in both if name not in _NO_COLUMNS}


class StepCalls:
    """Calls `on_step` for the steps of one job once both orchestrator and trainer have told of them."""

    def __init__(self, directory: Path, on_step: Callable[[dict[str, Any]], object], resume: bool) -> None:
        """With `resume`, steps that are trained already are not told."""
        self._directory = directory
        self._on_step = on_step
        self._error: Exception | None = None
        self._trained = TrainedLines(directory)
        self._followers: dict[str, Follower] = {}
        self._shipped: defaultdict[str, dict[int, Line]] = defaultdict(dict)
        self._learned: defaultdict[str, dict[int, Line]] = defaultdict(dict)
        self._read: Counter[str] = Counter()
        """How many of the trainer's lines of each run were read."""
        if resume:
            for _ in self._new():
                pass
        self.thread = threading.Thread(target=self._run, name="on_step", daemon=True)

    def begin(self, has_begun: Callable[[], bool], has_ended: Callable[[], bool]) -> None:
        """Starts the thread. `has_begun`: the directory is the job's. `has_ended`: it writes no more."""
        self._has_begun, self._has_ended = has_begun, has_ended
        self.thread.start()

    def wait(self, timeout_seconds: float | None) -> bool:
        """Returns whether all calls were made within so many seconds. Raises what `on_step` raised."""
        self.thread.join(timeout_seconds)
        if self._error is not None:
            raise self._error
        return not self.thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._has_begun():
                time.sleep(POLL_SECONDS)
            ended = False
            while not ended:
                ended = self._has_ended()  # before the look, which then finds all
                for row in self._new():
                    self._on_step(row)
                if not ended:
                    time.sleep(POLL_SECONDS)
        except Exception as error:  # noqa: BLE001 - for `wait`, in the thread of who started the job
            self._error = error

    def _new(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of steps that were shipped and trained since the last call, of a run by step."""
        self._trained.refresh(math.inf)
        for run_id in run_ids_in(self._directory):
            shipped, learned = self._shipped[run_id], self._learned[run_id]
            path = self._directory / f"run_{run_id}" / "metrics.jsonl"
            for line in self._followers.setdefault(run_id, Follower(path)).new_lines(shipped.clear):
                shipped[line["step"]] = line
            for _, text in self._trained.lines_of(run_id, self._read[run_id]):
                self._read[run_id] += 1
                if line := step_of(text):
                    learned[line["step"]] = line
            for step in sorted(shipped.keys() & learned.keys()):
                yield {"run_id": run_id} | joined(step, shipped.pop(step), learned.pop(step))
