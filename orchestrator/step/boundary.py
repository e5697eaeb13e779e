"""The step boundary, phase by phase, each one timed: merge, records, commit, trim. A replay uses it, too.

The order is the contract (`docs/contracts.md`, "Order of a step"): after a kill a step either does not exist, or is committed
and will be trained. The merged batch travels to the trainer while the records are written. Bulk bytes are never copied. Every
phase runs in a thread, in calls that hold the GIL shortly. All phases after the merge run in one thread call, since each return
to a busy loop takes time.

Next in the reading order of `docs/architecture.md`: `orchestrator/step/delivery.py`.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.orchestrator.receipts.chain import ReceiptChain
from counterpoint.orchestrator.receipts.receipt import RecordHashes, records_of
from counterpoint.orchestrator.rollouts.dump import DumpHeader, write_dump
from counterpoint.orchestrator.rollouts.token_file import TOKENS_FILE
from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.run_directory import prune_rollouts
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, write_checkpoint
from counterpoint.orchestrator.step.discarded import with_unrecorded
from counterpoint.orchestrator.step.phases import PhaseClock
from counterpoint.orchestrator.step.records import write_records
from counterpoint.orchestrator.step.routing_ahead import RoutingAhead
from counterpoint.orchestrator.step.step_metrics import step_metrics
from counterpoint.run.loop_health.threads import in_thread, record_in_thread, run_cpu_bound
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.transport import codec
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.files.json_lines import append_line
from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.records import Batch, Rollout, Sample
from counterpoint.transport.validation import validate

SMALL_TOKENS = 2**16
"""The most tokens of a step's turns, prompts included, that are written in a few hundredths of a second."""

MergeChunk = Callable[[Sequence[Rollout]], Awaitable[list[Sample]]]
"""Merges rollouts outside the loop's thread."""


@dataclass(frozen=True, slots=True)
class StepBoundary:
    """The step boundary of one run. `state_columns` is by environment."""

    run_dir: Path
    run_id: str
    state_columns: Mapping[str, Sequence[str]]
    gather_chunk_size: int | None = None
    keep_checkpoints: int = 2
    keep_every: int | None = None
    keep_rollouts: int = 1000
    dump: DumpHeader | None = None
    """The dumps' header, without `step` and `shipped`, or None for no dumps."""
    merge_chunk: MergeChunk | None = None
    """Merges rollouts in a process, or None to merge them in a thread."""
    transcribe: Transcriber | None = None
    """Decodes rollouts for the records, or None for records without text."""
    warn: Callable[[MetricsLine], MetricsLine] = lambda line: {}
    """Returns what to add to a step's line: early warnings. Blocks."""
    receipts: ReceiptChain | None = None
    """The run's receipts, or None for none."""
    with_rewards: bool = False
    """Send the rewards of turns, for the trainer's value head."""

    def begin_record(self, most_rollouts: int) -> RoutingAhead | None:
        """Begins the record of a step with at most `most_rollouts`.

        None with a process that merges: it copies their routing.
        """
        return RoutingAhead(self.run_dir / "rollouts", most_rollouts) if self.merge_chunk is None else None

    def begin(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        discarded: Sequence[Rollout],
        unrecorded: Mapping[str, int] | None = None,
        clock: PhaseClock | None = None,
        ahead: RoutingAhead | None = None,
    ) -> StepInProgress:
        """Returns step `step` with `rollouts` (all of the groups that ship, in order), before its first phase.

        `discarded` are the rollouts discarded since the last step: they are recorded and not trained on. `unrecorded` has the
        counts of those that are only counted (`DiscardedRollouts.take`). `clock` is the run's, and has timed the phases before.
        `ahead` has the routing of groups that was written before.
        """
        return StepInProgress(self, step, rollouts, discarded, unrecorded or {}, clock or PhaseClock(), ahead)

    async def merge(self, step: int, rollouts: Sequence[Rollout]) -> tuple[Batch, int]:
        """Returns the batch of `step`, with the samples of every rollout that neither failed nor was filtered, and its bytes.

        They have one form (`batch_form.py`).
        """
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
        batch = assemble_batch(self.run_id, step, samples, with_rewards=self.with_rewards)
        # Every resume would send again a committed batch that the trainer refuses.
        validate(batch)
        return batch, batch.nbytes

    def record(
        self,
        batch: Batch,
        rollouts: Sequence[Rollout],
        discarded: Sequence[Rollout],
        ahead: RoutingAhead | None = None,
    ) -> tuple[MetricsLine, list[RecordHashes]]:
        """Does as `write_rollouts`, and returns the metrics of the step, too. Blocks."""
        hashes = self.write_rollouts(batch, rollouts, discarded, ahead)
        return {"step": batch.step, **step_metrics(batch, [*rollouts, *discarded])}, hashes

    def write_rollouts(
        self,
        batch: Batch,
        rollouts: Sequence[Rollout],
        discarded: Sequence[Rollout],
        ahead: RoutingAhead | None = None,
    ) -> list[RecordHashes]:
        """Publishes `rollouts/step_N/` and, when asked for, `raw_rollouts/step_N/`. Returns the records' hashes.

        Blocks. Raises `OSError`.
        """
        name = f"step_{batch.step}"
        if self.dump is not None:
            header = self.dump.model_copy(update={"step": batch.step, "shipped": len(rollouts)})
            write_dump(self.run_dir / "raw_rollouts" / name, header, [*rollouts, *discarded])
        with publish_directory(self.run_dir / "rollouts" / name) as directory:
            if ahead is None or not ahead.publish(directory / "batch.bin", batch):
                codec.write_file(directory / "batch.bin", batch)
            return write_records(
                directory / "rollouts.jsonl",
                [*rollouts, *discarded],
                self.state_columns,
                self.transcribe,
                directory / TOKENS_FILE,
            )


@dataclass(slots=True)
class StepInProgress:
    """A step on its way through the boundary.

    Its phases are `merge`, `record`, `commit` and `finish`, each once, in this order. The caller sends the batch of `merge`,
    and `complete` takes the other phases. A measurement takes them one by one.
    """

    boundary: StepBoundary
    step: int
    rollouts: Sequence[Rollout]
    discarded: Sequence[Rollout]
    unrecorded: Mapping[str, int]
    clock: PhaseClock
    ahead: RoutingAhead | None
    _batch: Batch | None = None
    _line: MetricsLine | None = None
    _hashes: list[RecordHashes] = field(default_factory=list)
    _receipt: bytes | None = None
    _given_up: bool = False
    """Whether the caller was cancelled, which ends no thread."""

    async def merge(self) -> tuple[Batch, int]:
        """Returns the batch to send, and its bytes. Raises `ValueError` if no rollout is left to train on."""
        with self._timed("merge"):
            self._batch, nbytes = await self.boundary.merge(self.step, self.rollouts)
        return self._batch, nbytes

    async def complete(
        self, checkpoint: StepCheckpoint, announce: Callable[[], None], facts: Mapping[str, Any] | None = None
    ) -> MetricsLine:
        """Takes the phases after the merge, in one thread call, and returns the step's metrics line. Raises their errors.

        `facts` are what the receipt says besides the batch, the records and the weights; without them there is none.

        The trainer waits for it. So what is small is written by a thread of the loop's priority: one of a lower priority waits
        a second for a core that others want.

        Calls `announce` on the loop as soon as the step is committed, while the last phase goes on. When it is cancelled before
        the records are written, the step is not committed.
        """
        loop = asyncio.get_running_loop()
        try:
            write = in_thread if self._is_small else record_in_thread
            return await write(self._complete, checkpoint, lambda: loop.call_soon_threadsafe(announce), facts or {})
        except asyncio.CancelledError:
            self._given_up = True
            raise

    @property
    def _is_small(self) -> bool:
        """Whether the step is written soon. Routing is not: it is large, and what is written ahead of it comes first."""
        assert self._batch is not None
        left = SMALL_TOKENS
        for rollout in chain(self.rollouts, self.discarded):
            left -= sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in rollout.turns)
            if left < 0:
                return False
        return not any(self._batch.routed_experts)

    def _complete(
        self, checkpoint: StepCheckpoint, announce: Callable[[], object], facts: Mapping[str, Any]
    ) -> MetricsLine:
        self.record()
        if self._given_up:
            # The directory of the run may have been deleted, and a commit would make it again.
            raise RuntimeError(f"step {self.step} was given up before its commit")
        self.commit(checkpoint, facts)
        announce()
        return self.finish()

    def record(self) -> None:
        """Writes batch and records, and computes the metrics of the step's rollouts. Blocks. Raises `OSError` (disk full)."""
        assert self._batch is not None
        with self._timed("records"):
            recorded, self._hashes = self.boundary.record(self._batch, self.rollouts, self.discarded, self.ahead)
            self._line = with_unrecorded(recorded, self.unrecorded)

    def commit(self, checkpoint: StepCheckpoint, facts: Mapping[str, Any] | None = None) -> None:
        """Writes the state after the step, with the daemon's metrics, to which this adds the rollouts' and the phases. Blocks.

        With it goes the step's receipt, of which `facts` are a part. Once it returns, the step is committed. Raises `OSError`.
        """
        with self._timed("commit"):
            assert checkpoint.line is not None
            assert self._line is not None, "recorded"
            self._line |= checkpoint.line
            self._line |= self.boundary.warn(self._line)
            if self.boundary.receipts is not None and facts:
                assert self._batch is not None
                own = {"batch": codec.digest_of(self._batch), **records_of(self._hashes)}
                self._receipt = self.boundary.receipts.receipt(self.boundary.run_id, self.step, {**facts, **own})
            checkpoint = replace(checkpoint, line=self._line | self.clock.so_far(), receipt=self._receipt)
            write_checkpoint(
                self.boundary.run_dir, checkpoint, self.boundary.keep_checkpoints, self.boundary.keep_every
            )

    def finish(self) -> MetricsLine:
        """Appends the step's metrics line and returns it. Prunes old records and gives freed memory back. Blocks."""
        with self._timed("malloc_trim"):
            give_memory_back()
            # Appended last, so that it has every phase. After a kill before this, a resume restores it from the checkpoint.
            assert self._line is not None
            line = self._line | self.clock.take()
            # Flushed as seldom as possible: the kept checkpoints have all lines since the last flush.
            durable = self.step % self.boundary.keep_checkpoints == 0
            if self._receipt is not None and self.boundary.receipts is not None:
                self.boundary.receipts.append(self._receipt, durable=durable)
            append_line(self.boundary.run_dir / "metrics.jsonl", line, durable=durable)
            prune_rollouts(self.boundary.run_dir, self.step, self.boundary.keep_rollouts)
            return line

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self.clock.enter(phase)
        with awaiting(f"phase {phase} of the step boundary"):
            yield


def merge_all(rollouts: Sequence[Rollout]) -> list[Sample]:
    """Returns the samples of rollouts, in order."""
    return [sample for rollout in yielding_gil(rollouts) for sample in merge_rollout(rollout)]


@cache
def _malloc_trim_function() -> Any:
    """Returns the C library's `malloc_trim`, or None unless it is glibc."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_memory_back() -> None:
    """Returns freed memory to the system. Without it a daemon grows by several MB per step."""
    trim = _malloc_trim_function()
    if trim is not None:
        trim(0)
