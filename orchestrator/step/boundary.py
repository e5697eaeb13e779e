"""The step boundary, phase by phase and each one timed: merge, records, commit, trim. A replay drives it too.

The order is the contract (`docs/contracts.md`, "Order of a step"): what a kill leaves behind is either a step that never
was, or one that is committed and will be trained. The merged batch travels to the trainer while the records are written.
Bulk bytes are never copied, and every phase runs in a thread, in calls that hold the GIL shortly; in one call a phase, since
on a busy loop each return to it waits for its turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from orchestrator.loop_health.threads import in_thread, run_cpu_bound
from orchestrator.loop_health.watchdog import awaiting
from orchestrator.metrics import MetricsLine
from orchestrator.rollouts.dump import DumpHeader, write_dump
from orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from orchestrator.rollouts.transcripts import Transcriber
from orchestrator.run_directory import prune_rollouts
from orchestrator.step.checkpoint import Checkpoint, write_checkpoint
from orchestrator.step.phases import PhaseClock
from orchestrator.step.records import write_records
from orchestrator.step.step_metrics import step_metrics
from transport import codec
from transport.files.atomic import publish_directory
from transport.files.json_lines import append_line
from transport.process.yield_gil import yielding_gil
from transport.records import Batch, Rollout, Sample

MergeChunk = Callable[[Sequence[Rollout]], Awaitable[list[Sample]]]
"""Merges some rollouts off the loop."""


class Outlet(Protocol):
    """Where batches go: `sender.Sender`."""

    def offer(self, batch: Batch, nbytes: int) -> None:
        """Takes the batch of so many bytes, which is not committed yet, to send it. Raises when it cannot be sent."""

    def commit(self, step: int) -> None:
        """The offered step is committed."""


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """One run's step boundary. `state_columns` is by environment."""

    run_dir: Path
    run_id: str
    state_columns: Mapping[str, Sequence[str]]
    gather_chunk_size: int | None = None
    keep_checkpoints: int = 2
    keep_rollouts: int = 1000
    dump: DumpHeader | None = None
    """The header of every step's dump, but for what differs by step; None: no dumps."""
    merge_chunk: MergeChunk | None = None
    """Where rollouts are merged; a thread where it is None."""
    transcribe: Transcriber | None = None
    """Gives the records of rollouts their text; None: they have none."""

    def begin(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        others: Sequence[Rollout],
        snapshot: Callable[[MetricsLine], Checkpoint],
        outlet: Outlet,
        clock: PhaseClock | None = None,
    ) -> StepInProgress:
        """Step `step` with `rollouts` (all of the groups that ship, in order), none of its phases taken yet.

        `others` are the rollouts lost since the last step: they are recorded and not trained on. `snapshot` is called on the
        loop once the batch is on disk, with the metrics so far, and gives the state to commit, `line` included; `outlet`
        is given the batch once it is merged, and told of the commit. `clock` is the run's, which knows what came before.
        """
        return StepInProgress(self, step, rollouts, others, snapshot, outlet, clock or PhaseClock())

    async def merge(self, step: int, rollouts: Sequence[Rollout]) -> tuple[Batch, int]:
        """The batch of `step`, the samples of every rollout that neither failed nor was filtered; and its bytes."""
        kept = [rollout for rollout in rollouts if rollout.error is None and rollout.filtered_by is None]
        if self.merge_chunk is None and self.gather_chunk_size is None:
            return await run_cpu_bound(lambda: self._assemble(step, merge_all(kept)))
        size = self.gather_chunk_size or max(1, len(kept))
        samples: list[Sample] = []
        for start in range(0, len(kept), size):
            chunk = kept[start : start + size]
            samples += await (self.merge_chunk(chunk) if self.merge_chunk else run_cpu_bound(merge_all, chunk))
        return await run_cpu_bound(self._assemble, step, samples)

    def _assemble(self, step: int, samples: Sequence[Sample]) -> tuple[Batch, int]:
        batch = assemble_batch(self.run_id, step, samples)
        # Once committed, a batch that the trainer refuses would be sent again by every resume.
        codec.validate(batch)
        return batch, batch.nbytes

    def record(self, batch: Batch, rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> MetricsLine:
        """Writes what `write_rollouts` does; the metrics of the step. Blocks."""
        self.write_rollouts(batch, rollouts, others)
        return {"step": batch.step, **step_metrics(batch, [*rollouts, *others])}

    def write_rollouts(self, batch: Batch, rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> None:
        """Publishes `rollouts/step_N/` and, when asked for, `raw_rollouts/step_N/`. Blocks. Raises `OSError`."""
        name = f"step_{batch.step}"
        if self.dump is not None:
            header = self.dump.model_copy(update={"step": batch.step, "shipped": len(rollouts)})
            write_dump(self.run_dir / "raw_rollouts" / name, header, [*rollouts, *others])
        with publish_directory(self.run_dir / "rollouts" / name) as directory:
            codec.write_file(directory / "batch.bin", batch)
            write_records(directory / "rollouts.jsonl", [*rollouts, *others], self.state_columns, self.transcribe)


@dataclass(slots=True)
class StepInProgress:
    """A step on its way through the boundary. Its phases are taken in order, each once."""

    boundary: StepBoundary
    step: int
    rollouts: Sequence[Rollout]
    others: Sequence[Rollout]
    snapshot: Callable[[MetricsLine], Checkpoint]
    outlet: Outlet
    clock: PhaseClock
    batch: Batch | None = None
    line: MetricsLine | None = None

    @property
    def phases(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """By name, in order."""
        return {
            "merge": self._merge,
            "records": self._record,
            "commit": self._commit,
            "malloc_trim": self._finish,
        }

    async def take(self) -> MetricsLine:
        """Takes all phases and answers the step's metrics line.

        Raises `OSError` (disk full) before the commit, `ValueError` when no rollout is left to train on, and what the outlet
        raises for a batch that cannot be sent.
        """
        for name, phase in self.phases.items():
            await self.timed(name, phase)
        assert self.line is not None
        return self.line

    async def timed(self, name: str, phase: Callable[[], Awaitable[None]]) -> None:
        """Takes one phase."""
        self.clock.enter(name)
        with awaiting(f"phase {name} of the step boundary"):
            await phase()

    async def _merge(self) -> None:
        self.batch, nbytes = await self.boundary.merge(self.step, self.rollouts)
        self.outlet.offer(self.batch, nbytes)

    async def _record(self) -> None:
        assert self.batch is not None
        self.line = await in_thread(self.boundary.record, self.batch, self.rollouts, self.others)

    async def _commit(self) -> None:
        assert self.line is not None
        checkpoint = self.snapshot(self.line | self.clock.so_far())
        self.line = checkpoint.line
        await in_thread(write_checkpoint, self.boundary.run_dir, checkpoint, self.boundary.keep_checkpoints)
        self.outlet.commit(self.step)

    async def _finish(self) -> None:
        await in_thread(self._finish_in_thread)

    def _finish_in_thread(self) -> None:
        give_memory_back()
        # Appended last, so that it tells every phase; were we killed before, a resume restores it from the checkpoint.
        assert self.line is not None
        self.line = self.line | self.clock.take()
        # The disk is waited for as seldom as can be: lines since the last time are all in checkpoints that are still kept.
        durable = self.step % self.boundary.keep_checkpoints == 0
        append_line(self.boundary.run_dir / "metrics.jsonl", self.line, durable=durable)
        prune_rollouts(self.boundary.run_dir, self.step, self.boundary.keep_rollouts)


def merge_all(rollouts: Sequence[Rollout]) -> list[Sample]:
    """The samples of some rollouts, in order."""
    return [sample for rollout in yielding_gil(rollouts) for sample in merge_rollout(rollout)]


@cache
def _malloc_trim_function() -> Any:
    """glibc's `malloc_trim`, None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Gives freed memory back to the system: without it a daemon grows by several MB a step."""
    trim = _malloc_trim_function()
    if trim is not None:
        trim(0)
