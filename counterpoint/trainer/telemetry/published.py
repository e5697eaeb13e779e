"""Writes `trainer/spans.jsonl` and `trainer/runs.json` (`docs/contracts.md`), about once a second, between two rows; on rank 0.

A full disk costs only what would have been written. The metrics line of a step is written in the same place, at the same moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from counterpoint.trainer.telemetry.step_times import StepTimes
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.telemetry.intervals import Interval
from counterpoint.transport.telemetry.spans import SPANS_FILE, SpanLog, unix_time

if TYPE_CHECKING:  # a run imports torch, and `status` and the page read what is written here
    from counterpoint.trainer.runs.record import RunRecord
    from counterpoint.trainer.runs.registry import RunRegistry
    from counterpoint.trainer.runs.run import Run

logger = logging.getLogger(__name__)

RUNS_FILE = "runs.json"
"""The file in `trainer/` that says what the runs do."""

PUBLISH_SECONDS = 1.0

MAX_RUNS = 1024
"""Most runs that `runs.json` describes."""

MAX_REASON = 300
"""Characters of a reason in `runs.json`."""


Work = Mapping[int, tuple[int | None, int]]
"""The step in progress, if there is one, and the number of batches that wait, by slot."""


class TrainerTelemetry:
    """The telemetry of one trainer."""

    def __init__(self, output_dir: Path, slots: int, registry: RunRegistry) -> None:
        directory = output_dir / "trainer"
        self.spans = SpanLog(directory / SPANS_FILE, "trainer")
        self._path = directory / RUNS_FILE
        self._slots = slots
        self._registry = registry
        self._due = 0.0
        self._ended: dict[str, float] = {}
        """The time at which the last step of each run ended, on the monotonic clock."""
        self._is_failing = False

    def end_step(self, run: Run, times: StepTimes | None, waited: float, closed: float, published: float) -> None:
        """Adds the spans of a step that ends now, after its weights were published and, if one is due, its checkpoint begun.

        `closed` is when its update was complete, and `published` when its weights were; both on the monotonic clock. `times` is
        None for a step that took over a copy. `waited`: for its batch.
        """
        step, now = run.progress.step, time.monotonic()
        if times is not None:
            self._record(run, "wait", self._ended.get(run.run_id, times.began - waited), times.began)
            for name, intervals in times.take().items():
                at = (Interval(unix_time(each.begin), unix_time(each.end), each.busy) for each in intervals)
                self.spans.record_intervals(name, at, step=step, run=run.run_id)
        self._record(run, "broadcast", closed, published)
        self._record(run, "conclude", published, now)
        self._record(run, "step", closed if times is None else times.began, now)
        self._ended[run.run_id] = now

    def _record(self, run: Run, name: str, begin: float, end: float) -> None:
        if end > begin:
            self.spans.record(name, unix_time(begin), unix_time(end), step=run.progress.step, run=run.run_id)

    def left(self, run_id: str) -> None:
        """Notes that a run has left its slot: what it waits for from now on is no wait for a batch."""
        self._ended.pop(run_id, None)

    def settle(self, work: Work) -> None:
        """Writes what there is, if it is time."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + PUBLISH_SECONDS
            self._write(work)

    def close(self) -> None:
        """Writes what there is for the last time."""
        self._write({}, ended=True)

    def _write(self, work: Work, ended: bool = False) -> None:
        self.spans.flush()
        content = {
            "format": 1,
            "time": time.time(),
            "ended": ended,
            "slots": self._slots,
            "runs": [_described(record, work) for record in islice(self._registry, MAX_RUNS)],
        }
        try:
            write_atomically(self._path, orjson.dumps(content), durable=False)
            self._is_failing = False
        except Exception as error:  # noqa: BLE001 - a value that is no JSON, too
            if not self._is_failing:
                logger.warning("%s cannot be written; training goes on without it: %s", self._path, error)
            self._is_failing = True


def _described(record: RunRecord, work: Work) -> dict[str, Any]:
    run = record.run
    open_step, waiting = (None, 0) if run is None else work.get(run.slot, (None, 0))
    return {
        "run": record.run_id,
        "stage": record.stage.value,
        "reason": (record.reason or "")[:MAX_REASON],
        "connected": record.orchestrator.connected,
        "slot": None if run is None else run.slot,
        "step": None if run is None else run.progress.step,
        "steps": None if run is None else run.config.steps,
        "durable_step": None if run is None else run.durable_step,
        "open_step": open_step,
        "batches_waiting": waiting,
    }
