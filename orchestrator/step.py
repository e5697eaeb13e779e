"""The step boundary, phase by phase and each one timed: merge, records, commit, send, trim. A replay drives it too.

The order is the contract (`docs/contracts.md`, "Order of a step"): what a kill leaves behind is either a step that never
was, or one that is committed and will be sent. Bulk bytes are never copied, and every phase runs in a thread, in calls that
hold the GIL shortly; in one call a phase, since on a busy loop each return to it waits for its turn.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator import metrics
from orchestrator.checkpoint import Checkpoint, write_checkpoint
from orchestrator.dump import DumpHeader, write_dump
from orchestrator.metrics import MetricsLine
from orchestrator.records import write_records
from orchestrator.step_metrics import step_metrics
from orchestrator.threads import in_thread
from orchestrator.trajectories import assemble_batch, merge_rollout
from orchestrator.watchdog import awaiting
from transport import codec
from transport.atomic import publish_directory
from transport.records import Batch, Rollout, Sample

Observer = Callable[[str], AbstractContextManager[None]]
"""Entered around each phase with its name: how a replay lays the phases against the loop's lag."""


@dataclass(slots=True)
class Phases:
    """Durations of a step's phases, in seconds, in the order they ran."""

    observe: Observer
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as `name`."""
        started = time.perf_counter()
        try:
            with awaiting(f"phase {name} of the step boundary"), self.observe(name):
                yield
        finally:
            self.seconds[name] = time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """Under the design's names, `phase/<name>`."""
        return {f"phase/{name}": seconds for name, seconds in self.seconds.items()}


MergeChunk = Callable[[Sequence[Rollout]], Awaitable[list[Sample]]]
"""Merges some rollouts off the loop."""


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """One run's step boundary. `state_columns` is by environment."""

    run_dir: Path
    run_id: str
    state_columns: Mapping[str, Sequence[str]]
    gather_chunk_size: int | None = None
    keep_checkpoints: int = 2
    dump: DumpHeader | None = None
    """The header of every step's dump, but for what differs by step; None: no dumps."""
    merge_chunk: MergeChunk | None = None
    """Where rollouts are merged; a thread where it is None."""
    observe: Observer = field(default=lambda _name: nullcontext())

    async def take(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        others: Sequence[Rollout],
        snapshot: Callable[[MetricsLine], Checkpoint],
        send: Callable[[Batch], Awaitable[None]],
    ) -> MetricsLine:
        """Takes step `step` with `rollouts` (all of the groups that ship, in order) and answers its metrics line.

        `others` are the rollouts lost since the last step: they are recorded and not trained on. `snapshot` is called on the
        loop once the batch is on disk, with the metrics so far, and gives the state to commit, `line` included; `send`
        hands the committed batch to the trainer. Raises `OSError` (disk full) before the commit, or `ValueError` when no
        rollout is left to train on.
        """
        phases = Phases(self.observe)
        with phases.phase("merge"):
            batch = await self.merge(step, rollouts)
        with phases.phase("records"):
            so_far = await in_thread(self._record, batch, rollouts, others)
        checkpoint = snapshot({"step": step, **so_far, **phases.metrics()})
        assert checkpoint.line is not None
        with phases.phase("commit"):
            await in_thread(write_checkpoint, self.run_dir, checkpoint, self.keep_checkpoints)
        with phases.phase("send"):
            await send(batch)
        return await in_thread(self._finish, checkpoint.line, phases)

    async def merge(self, step: int, rollouts: Sequence[Rollout]) -> Batch:
        """The batch of `step`: the samples of every rollout that neither failed nor was filtered."""
        kept = [rollout for rollout in rollouts if rollout.error is None and rollout.filtered_by is None]
        if self.merge_chunk is None and self.gather_chunk_size is None:
            return await in_thread(lambda: self._assemble(step, merge_all(kept)))
        size = self.gather_chunk_size or max(1, len(kept))
        samples: list[Sample] = []
        for start in range(0, len(kept), size):
            chunk = kept[start : start + size]
            samples += await (self.merge_chunk(chunk) if self.merge_chunk else in_thread(merge_all, chunk))
        return await in_thread(self._assemble, step, samples)

    def _assemble(self, step: int, samples: Sequence[Sample]) -> Batch:
        batch = assemble_batch(self.run_id, step, samples)
        # Once committed, a batch that the trainer refuses would be sent again by every resume.
        codec.validate(batch)
        return batch

    def _record(self, batch: Batch, rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> dict[str, float | int]:
        self.write_rollouts(batch, rollouts, others)
        return step_metrics(batch, [*rollouts, *others])

    def _finish(self, line: MetricsLine, phases: Phases) -> MetricsLine:
        with phases.phase("malloc_trim"):
            give_memory_back()
        # Appended last, so that it tells every phase; were we killed before, a resume restores it from the checkpoint.
        line = line | phases.metrics()
        metrics.append(self.run_dir / "metrics.jsonl", line)
        return line

    def write_rollouts(self, batch: Batch, rollouts: Sequence[Rollout], others: Sequence[Rollout]) -> None:
        """Publishes `rollouts/step_N/` and, when asked for, `raw_rollouts/step_N/`. Blocks. Raises `OSError`."""
        name = f"step_{batch.step}"
        if self.dump is not None:
            header = self.dump.model_copy(update={"step": batch.step, "shipped": len(rollouts)})
            write_dump(self.run_dir / "raw_rollouts" / name, header, [*rollouts, *others])
        with publish_directory(self.run_dir / "rollouts" / name) as directory:
            codec.write_file(directory / "batch.bin", batch)
            write_records(directory / "rollouts.jsonl", [*rollouts, *others], self.state_columns)


def merge_all(rollouts: Sequence[Rollout]) -> list[Sample]:
    """The samples of some rollouts, in order."""
    return [sample for rollout in rollouts for sample in merge_rollout(rollout)]


@cache
def _malloc_trim_function() -> Any:
    """glibc's `malloc_trim`, None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Gives freed memory back to the system: without it a daemon grows by several MB a step."""
    trim = _malloc_trim_function()
    if trim is not None:
        trim(0)
