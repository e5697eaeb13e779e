"""Writes the checkpoints of a trainer's runs (`checkpoint.py`) in a few threads, while training goes on; on rank 0.

`begin` copies a run's state at its step into memory, which is all that training waits for. A thread writes, flushes and
publishes it, while another one flushes the broadcast of that step; a divided one once the slices of the other ranks are on the
disk (`counterpoint/trainer/runs/slices.py`). `settle`, which the trainer's loop calls in every pass, asks for these, and notes
what has been published since: only then does a step count as durable. Each run has one checkpoint on its way at most, so the
copies take no more memory than the runs' states; a further one of the same run waits for it, as when the disk is slower than
`checkpoint_interval`. An error of the disk is raised by the next call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.runs import checkpoint, control_files, witness
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.runs.slices import OtherSlices
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.telemetry.spans import SpanLog

logger = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
"""A wait for the disk that is worth a line in the log."""

LATE_SECONDS = 60.0
"""The seconds after which a checkpoint on its way is reported once, with the ranks whose disks it waits for."""

ASKING_SECONDS = 0.02
"""The time between two questions to the other ranks while nothing but their slices is waited for."""


WRITERS = 4
"""Checkpoints that are written at once: of many small ones the disk's journal is then waited for less often than for each."""


@dataclass(slots=True)
class _Writing:
    step: int
    written: Future[None]
    begun: float
    others: OtherSlices | None
    is_reported: bool = False


class Checkpoints:
    """The checkpoints that are being written, by run."""

    def __init__(
        self,
        output_dir: Path,
        keep: int,
        kept_alive: Callable[[], AbstractContextManager[None]],
        on_durable: Callable[[str], object],
        spans: SpanLog,
    ) -> None:
        """Keeps the newest `keep` of each run.

        `spans` gets one of each checkpoint written. `kept_alive` surrounds each wait for the disk; `on_durable` is called in
        `settle` and `complete` with the id of each run that has a new durable checkpoint.
        """
        self._output_dir = output_dir
        self._keep = keep
        self._kept_alive = kept_alive
        self._on_durable = on_durable
        self._spans = spans
        self._writing: dict[str, _Writing] = {}
        """The checkpoints in the order in which they were begun."""
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoints")
        self._beside = ThreadPoolExecutor(WRITERS, thread_name_prefix="broadcasts")

    @property
    def busy(self) -> bool:
        """Whether any checkpoint is being written, or is not settled yet."""
        return bool(self._writing)

    def pending(self, run_id: str) -> int | None:
        """Returns the step of the run's checkpoint that is being written or is not settled; None if there is none."""
        writing = self._writing.get(run_id)
        return None if writing is None else writing.step

    def newest(self, run_id: str) -> int:
        """Returns the run's newest durable step; 0 if there is none."""
        return max(self._durable(run_id), default=0)

    def fallback(self, run_id: str) -> int:
        """Returns the oldest of the kept checkpoints, to which training may go back; 0 if there are fewer than are kept."""
        steps = self._durable(run_id)
        return steps[-self._keep] if len(steps) >= self._keep else 0

    def durable_step(self, run: Run) -> int:
        """Returns the step up to which batches are durable: at the end the last, before that of the oldest kept checkpoint."""
        newest = self.newest(run.run_id)
        return newest if newest >= run.config.last_step else self.fallback(run.run_id)

    def _durable(self, run_id: str) -> list[int]:
        """A checkpoint may be seen on the disk before it is flushed."""
        steps = published_steps(checkpoints_directory(self._output_dir, run_id))
        return [step for step in steps if step != self.pending(run_id)]

    def begin(self, run: Run, *, published: bool = True) -> bool:
        """Begins to write the checkpoint of the run's newest step, unless that is durable or on its way.

        `published`: only of a version that is published, since a resume of an orchestrated run uses it. Returns False if there is
        nothing to write: the weights are not new, not intact, or not published where they have to be. Raises as `settle`.
        """
        if not run.torch.intact or self.pending(run.run_id) == run.progress.step:
            return False
        self.complete(run.run_id)
        broadcasts = control_files.run_directory(self._output_dir, run.run_id) / "broadcast"
        if run.progress.step <= self.newest(run.run_id):
            return False
        if published and run.progress.step not in published_steps(broadcasts):
            return False
        snapshot = checkpoint.take(run)
        written = self._writers.submit(self._write, snapshot)
        self._writing[run.run_id] = _Writing(snapshot.step, written, time.monotonic(), snapshot.others)
        return True

    def _write(self, snapshot: checkpoint.Snapshot) -> None:
        with self._spans.measure("write_checkpoint", step=snapshot.step, run=snapshot.run_id):
            flushing = self._beside.submit(self._flush_broadcast, snapshot)
            try:
                checkpoint.write(snapshot, self._output_dir, self._keep, flushing.result)
            finally:
                wait([flushing])
            flushing.result()

    def _flush_broadcast(self, snapshot: checkpoint.Snapshot) -> None:
        run_directory = control_files.run_directory(self._output_dir, snapshot.run_id)
        broadcast = run_directory / "broadcast" / f"step_{snapshot.step}"
        checkpoint.flush_broadcast(broadcast)
        witness.flush_notes(self._output_dir, snapshot.run_id)

    def settle(self) -> None:
        """Notes the checkpoints that have been published since the last call.

        Raises `OSError` or `SafetensorError` if one could not be written; the earlier ones of its run are intact. Raises
        `RuntimeError` if a rank is lost whose slice is waited for.
        """
        for run_id, writing in list(self._writing.items()):
            if writing.others is not None:
                writing.others.known()
            if writing.written.done():
                self._note(run_id)
        self._report_late()

    def complete(self, run_id: str | None = None) -> None:
        """Waits for the run's checkpoint, or without `run_id` for all, as long as the disk takes; then does as `settle`."""
        while (first := run_id or next(iter(self._writing), None)) is not None and first in self._writing:
            writing = self._writing[first]
            started = time.monotonic()
            while not (self._all_known() or wait([writing.written], ASKING_SECONDS).done):
                self._report_late()
            with nullcontext() if writing.written.done() else self._kept_alive():
                while not wait([writing.written], LATE_SECONDS).done:
                    self._report_late()
            if (waited := time.monotonic() - started) > SLOW_SECONDS:
                logger.info("waited %.1f s for the checkpoint of step %d of run %s", waited, writing.step, first)
            self._note(first)

    def _all_known(self) -> bool:
        """Asks the other ranks for the slices of all checkpoints, which keeps them alive, too; returns whether all are known.

        Not of one run alone: all threads may be waiting for those of checkpoints that were begun earlier.
        """
        return all(writing.others.known() for writing in self._writing.values() if writing.others is not None)

    def _report_late(self) -> None:
        """Names the disks that a checkpoint waits for: one that hangs holds up its run, and stays silent otherwise."""
        for run_id, writing in self._writing.items():
            if not writing.is_reported and time.monotonic() - writing.begun > LATE_SECONDS:
                writing.is_reported = True
                late = list(writing.others.late) if writing.others is not None else []
                logger.warning(
                    "the checkpoint of step %d of run %s is not written after %.0f s: the disk of rank %s is waited for, "
                    "as long as it takes",
                    writing.step,
                    run_id,
                    time.monotonic() - writing.begun,
                    " and ".join(map(str, late)) or "0",
                )

    def _note(self, run_id: str) -> None:
        writing = self._writing.pop(run_id)
        writing.written.result()
        seconds = time.monotonic() - writing.begun
        logger.debug("the checkpoint of step %d of run %s took %.1f s", writing.step, run_id, seconds)
        self._on_durable(run_id)

    def close(self) -> None:
        """Waits for the checkpoints that are being written, and drops those that need other ranks or wait, as a kill would."""
        for writing in self._writing.values():
            if writing.others is not None:
                writing.others.give_up()
        self._writers.shutdown(cancel_futures=True)
        self._beside.shutdown()
