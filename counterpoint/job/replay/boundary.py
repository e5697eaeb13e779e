"""Runs the daemon's own step boundary outside the daemon: finalizer, `StepBoundary`, sender and wire, with a consumer process.

The code is the daemon's; only scheduler, dispatcher and inference are missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from counterpoint.job.replay.consumer import consumer
from counterpoint.orchestrator.receipts.chain import ReceiptChain
from counterpoint.orchestrator.rollouts.dump import DumpHeader
from counterpoint.orchestrator.rollouts.trajectories import merge_turns
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.batch_form import choose_trained
from counterpoint.orchestrator.step.boundary import StepBoundary, StepInProgress
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint
from counterpoint.orchestrator.step.finalize import Finalizer, finalize_in_thread
from counterpoint.orchestrator.step.merge_process import MergeProcess
from counterpoint.orchestrator.step.routing_ahead import RoutingAhead
from counterpoint.orchestrator.step.sender import Sender
from counterpoint.run.loop_health.threads import in_thread, record_in_thread
from counterpoint.transport.config import TransportConfig
from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.intervals import Interval
from counterpoint.transport.wires.open import open_link

_READY_SECONDS = 30.0
_DELIVERY_SECONDS = 600.0

_FACTS = {"rules": None}
"""A replay has receipts, as a daemon does, but no scheduler that they could tell of."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The rollouts that arrive at a step boundary, and the configuration of the boundary."""

    header: DumpHeader
    rollouts: Sequence[Rollout]
    """The rollouts that ship, in order, then those discarded since the step before, which are only recorded."""

    @property
    def shipped(self) -> Sequence[Rollout]:
        """The rollouts of the groups that ship."""
        return self.rollouts[: self.header.shipped]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays of the rollouts."""
        return sum(
            turn.prompt_ids.nbytes
            + turn.completion_ids.nbytes
            + turn.log_probabilities.nbytes
            + (turn.routed_experts.nbytes if turn.routed_experts is not None else 0)
            + sum(column.nbytes for column in turn.columns.values())
            for rollout in self.rollouts
            for turn in rollout.turns
        )


@dataclass(frozen=True, slots=True)
class Rig:
    """The parts of the boundary for one recording. Made by `rig`."""

    recording: Recording
    boundary: StepBoundary
    sender: Sender
    finalize_group: Finalizer
    finalized: list[Rollout]
    """The rollouts that ship, as `finalize` left them."""

    _ahead: list[RoutingAhead]
    """The record of the next step, if `write_ahead` has begun it."""

    async def write_ahead(self) -> None:
        """Writes the routing of all groups but the last, as the daemon does while it waits for that one."""
        last = self.finalized[-1].group_id
        ahead = self.boundary.begin_record(len(self.finalized))
        if ahead is None:
            return
        for _, group in groupby(self.finalized, key=lambda rollout: rollout.group_id):
            if (rollouts := list(group))[0].group_id != last:
                await record_in_thread(ahead.add, rollouts)
        self._ahead[:] = [ahead]

    async def finalize(self) -> None:
        """Finalizes every group anew. The daemon does so when a group has finished; here all have finished at once."""
        groups: dict[int, list[Rollout]] = {}
        for rollout in self.recording.shipped:
            rollout.advantage, rollout.filtered_by, rollout.player_advantages = 0.0, None, {}
            rollout.turn_advantages = None
            groups.setdefault(rollout.group_id, []).append(rollout)
        scored_as_one = self.recording.header.group_scoring
        outcomes = await asyncio.gather(
            *(
                finalize_in_thread(self.finalize_group, group, group[0].environment in scored_as_one)
                for group in groups.values()
            )
        )
        self.finalized[:] = [rollout for outcome in outcomes for rollout in outcome.rollouts]
        choose_trained(self.recording.header.step, self.finalized, self.finalize_group.advantage)

    def phases(self, step: int) -> dict[str, Callable[[], Awaitable[object]]]:
        """Returns the phases of the boundary of `step` by name, to run in order, each once and in a thread call of its own.

        A commit holds only the step's metrics: there is no scheduler's state, and no rollout waits.
        """
        in_progress = self._begin(step)

        async def merge() -> None:
            self.sender.offer(*await in_progress.merge())

        async def commit() -> None:
            await in_thread(in_progress.commit, _checkpoint(step), _FACTS)
            self.sender.commit(step)

        return {
            "merge": merge,
            "records": partial(in_thread, in_progress.record),
            "commit": commit,
            "malloc_trim": partial(in_thread, in_progress.finish),
        }

    async def take(self, step: int) -> dict[str, list[Interval]]:
        """Runs all phases of `step`, as the daemon does; returns when each was, in seconds of `time.perf_counter`."""
        in_progress = self._begin(step)
        self.sender.offer(*await in_progress.merge())
        await in_progress.complete(_checkpoint(step), partial(self.sender.commit, step), _FACTS)
        return in_progress.clock.last_step

    def _begin(self, step: int) -> StepInProgress:
        discarded = self.recording.rollouts[self.recording.header.shipped :]
        return self.boundary.begin(step, self.finalized, discarded, ahead=self._ahead.pop() if self._ahead else None)

    async def deliver(self, step: int) -> None:
        """Waits until the consumer has read the batch of `step`. Raises `TimeoutError`."""
        async with asyncio.timeout(_DELIVERY_SECONDS):
            await self.sender.wait_durable(step)


def _open_branches(rollouts: Sequence[Rollout]) -> None:
    """Gives rollouts from a file their branches, which the daemon's have when they end, before they are finalized."""
    for rollout in rollouts:
        if rollout.error is None:
            with suppress(ValueError):  # a gap in its routing, for which the finalizer fails it
                merge_turns(rollout)


def _checkpoint(step: int) -> StepCheckpoint:
    return StepCheckpoint(step, {}, {}, {}, [], {})


@asynccontextmanager
async def rig(
    recording: Recording,
    output_dir: Path,
    gather_chunk_size: int | None = None,
    process_pool: bool = False,
) -> AsyncIterator[Rig]:
    """Provides the parts, connected to their consumer. Steps count from the recorded one. All files are below `output_dir`.

    Raises `ValueError` for an unknown advantage or filter, and `NoTrainerError` if the consumer does not answer.
    """
    header, transport = recording.header, TransportConfig()
    run_dir = output_dir / f"run_{header.run_id}"
    run_dir.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as resources:
        resources.enter_context(consumer(transport, output_dir, header.step))
        merge_chunk = await resources.enter_async_context(MergeProcess()) if process_pool else None
        link = open_link(transport, output_dir)
        sender = Sender(link, run_dir, header.run_id, header.step - 1, transport.largest_batch)
        resources.push_async_callback(sender.close)
        tasks = await resources.enter_async_context(asyncio.TaskGroup())
        serving = tasks.create_task(sender.run())
        resources.callback(serving.cancel)
        await sender.wait_ready(_READY_SECONDS)
        await in_thread(_open_branches, recording.shipped)
        boundary = StepBoundary(
            run_dir,
            header.run_id,
            header.state_columns,
            gather_chunk_size=gather_chunk_size,
            keep_checkpoints=1,
            merge_chunk=merge_chunk,
            receipts=ReceiptChain(run_dir),
        )
        finalize_group = Finalizer(load_advantage(header.advantage), header.filters, keep_routing=True)
        yield Rig(recording, boundary, sender, finalize_group, list(recording.shipped), [])
