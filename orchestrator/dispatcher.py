"""Executes the scheduler's instructions and tells it what happened. Decides nothing.

Every instruction becomes a task of the daemon's `TaskGroup`: a rollout, the judging of a group, a step boundary. What an
environment does wrong costs its rollout; any other exception is a fault of ours and ends the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from environments.chat import Chat
from orchestrator.decisions import Decision, DecisionLog
from orchestrator.logging_setup import set_context
from orchestrator.loop_health.blame import LoopBlame
from orchestrator.loop_health.gc_tuning import RolloutCounts
from orchestrator.loop_health.lag import EventLoopLagMonitor
from orchestrator.loop_health.resident import resident_bytes
from orchestrator.loop_health.threads import in_thread
from orchestrator.metrics import MetricsLine
from orchestrator.rollouts.play import (
    GeneratingPool,
    LoadedEnvironment,
    PolicyModel,
    play,
    sampling_parameters,
    score_group,
)
from orchestrator.scheduling.events import (
    BatchCommitted,
    CancelGroup,
    DrainRequested,
    Event,
    FinalizeGroup,
    Finish,
    GroupsBegun,
    Instruction,
    MoreToStart,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from orchestrator.scheduling.outcomes import DropReason, RolloutOutcome, outcome_of
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.step.advantages import Advantage
from orchestrator.step.boundary import StepBoundary
from orchestrator.step.checkpoint import Checkpoint, identity_of, write_checkpoint
from orchestrator.step.discarded import DiscardedRollouts, Report, is_counted, save, with_unrecorded
from orchestrator.step.finalize import Finalizer, finalize_in_thread
from orchestrator.step.phases import PhaseClock
from orchestrator.step.sender import Sender
from run.config import RunConfig
from transport.records import Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Group:
    """The rollouts of one example while the scheduler knows them."""

    group_id: int
    environment: str
    rollouts: list[Rollout]
    interruptible: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that play or score; they enter and leave by themselves, so that a cancellation always meets one that runs."""
    is_finalized: bool = False
    cancelled: bool = False


class Dispatcher:
    """One run's. `publish` receives every step's metrics line, `report_discarded` why steps do not come, `on_progress` is called
    when something moves."""

    def __init__(
        self,
        config: RunConfig,
        *,
        scheduler: Scheduler,
        environments: Mapping[str, LoadedEnvironment],
        advantage: Advantage,
        chats: Mapping[str, Chat],
        pool: GeneratingPool,
        sender: Sender,
        boundary: StepBoundary,
        lag: EventLoopLagMonitor,
        blame: LoopBlame,
        rollout_counts: RolloutCounts,
        decisions: DecisionLog,
        tasks: asyncio.TaskGroup,
        publish: Callable[[MetricsLine], None],
        report_discarded: Callable[[Report], None],
        on_progress: Callable[[], None],
        commit_in_progress: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._environments = environments
        self._finalizer = Finalizer(advantage, config.filters, keep_routing=config.dump_raw_rollouts)
        self._pool = pool
        self._calling = {
            environment.name: (
                chat := chats[environment.name],
                sampling_parameters(config.sampling_of(environment), chat),
            )
            for environment in config.environments
        }
        """What an environment's rollouts call the model with."""
        self._sender = sender
        self._boundary = boundary
        self._lag = lag
        self._blame = blame
        self._rollout_counts = rollout_counts
        self._decisions = decisions
        self._tasks = tasks
        self._publish = publish
        self._on_progress = on_progress
        self._commit_in_progress = commit_in_progress
        self._groups: dict[int, Group] = {}
        self._discarded = DiscardedRollouts(config.schedule, report_discarded)
        """Judged rollouts of groups that will not ship."""
        self._began: float | None = None
        """When this life's first group started, on the monotonic clock."""
        self._counts: Counter[str] = Counter()
        """Of what leaves no judged rollout behind, for the next step's metrics."""
        self._shipped_step = 0
        """The newest step that has shipped; it may not be committed."""
        self._to_start: deque[Group] = deque()
        """Groups whose turn to start comes in one of the next passes of the loop."""
        self._more_to_start = False
        """The scheduler waits until they have begun."""
        self._work: set[asyncio.Task[None]] = set()
        self._draining = False
        self._boundary_task: asyncio.Task[None] | None = None
        """The step boundary that is under way. Meanwhile the scheduler is a step ahead of the last commit."""
        self._clock = PhaseClock()
        self.finished = asyncio.Event()
        """The last step is committed."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes over the scheduler's state and the rollouts that wait. Raises `ValueError` for a damaged state."""
        self._scheduler.restore(checkpoint.scheduler)
        self._shipped_step = checkpoint.step
        self._counts = Counter({name: count for name, count in checkpoint.counts.items() if not is_counted(name)})
        discarded: list[Rollout] = []
        ready: dict[int, list[Rollout]] = {group_id: [] for group_id in self._scheduler.ready_group_ids()}
        for rollout in checkpoint.waiting:
            ready.get(rollout.group_id, discarded).append(rollout)
        self._discarded.restore(checkpoint.step, discarded, checkpoint.counts)
        for group_id, rollouts in ready.items():
            if not rollouts:
                raise ValueError(f"the checkpoint of step {checkpoint.step} lacks the rollouts of group {group_id}")
            self._groups[group_id] = Group(group_id, rollouts[0].environment, rollouts, is_finalized=True)

    def handle(self, event: Event) -> None:
        """Tells the scheduler and executes what follows, without waiting for it."""
        for instruction in self._scheduler.handle(event):
            self._execute(instruction)
        if self._boundary_task is None:
            self._clock.enter(self._scheduler.awaited())

    async def drain(self) -> None:
        """Cancels what is in flight, lets judging and a step boundary finish, and writes the state that a resume goes on from.

        An environment that will not be cancelled is waited for during half of `shutdown_timeout_seconds`; the state needs
        nothing of it. A step boundary is waited for until its step is committed: nothing of it can be given up.
        """
        self._draining = True
        self.handle(DrainRequested())
        for group in self._groups.values():
            _interrupt(group)
        try:
            async with asyncio.timeout(self._config.shutdown_timeout_seconds / 2):
                await self.settle()
        except TimeoutError:
            names = sorted(task.get_name() for task in self._work - {self._boundary_task})
            if names:
                logger.error("%d tasks ignore their cancellation: %s", len(names), ", ".join(names[:8]))
        if self._boundary_task is not None:
            logger.info("waiting for the commit of %s, however long it takes", self._boundary_task.get_name())
            await asyncio.wait({self._boundary_task})
        if not self.finished.is_set():
            ready = [
                rollout for group_id in self._scheduler.ready_group_ids() for rollout in self._groups[group_id].rollouts
            ]
            checkpoint = self._checkpoint(self._sender.newest_step, self._scheduler.state(), ready)
            with self._commit_in_progress():
                await in_thread(save, self._discarded.report(), self._config.run_dir)
                await in_thread(write_checkpoint, self._config.run_dir, checkpoint, self._config.keep_checkpoints)

    async def settle(self) -> None:
        """Until every rollout, outcome and step boundary has ended."""
        while self._work:
            await asyncio.wait(self._work)

    # --- instructions ---

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case StartGroup():
                self._start_group(instruction)
            case MoreToStart():
                self._more_to_start = True
            case CancelGroup(group_id, reason, detail):
                self._decisions.of_group(
                    group_id, Decision.DROPPED, reason=reason, detail=detail, step=self._shipped_step
                )
                self._cancel_group(self._groups.pop(group_id, None), reason, detail)
            case FinalizeGroup(group_id):
                self._spawn(self._finalize(self._groups[group_id]), f"finalize {group_id}")
            case ShipBatch(step, group_ids):
                self._shipped_step = step
                for group_id in group_ids:
                    self._decisions.of_group(group_id, Decision.SHIPPED, step=step)
                self._boundary_task = self._spawn(self._ship(step, group_ids), f"step {step}")
            case Finish():
                self.finished.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._tasks.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _start_group(self, start: StartGroup) -> None:
        if self._began is None:
            self._began = time.monotonic()
        rollouts = [
            Rollout(f"{start.group_id}-{index}", start.group_id, start.environment, start.example_index)
            for index in range(start.size)
        ]
        group = self._groups[start.group_id] = Group(start.group_id, start.environment, rollouts)
        self._decisions.of_group(
            start.group_id,
            Decision.STARTED,
            environment=start.environment,
            example_index=start.example_index,
            rollouts=start.size,
        )
        self._to_start.append(group)
        if len(self._to_start) == 1:
            self._spawn(self._start_in_turn(), "start of groups")

    async def _start_in_turn(self) -> None:
        """Starts one group a pass of the loop: a run begins with hundreds at once, which would hold up all else."""
        while self._to_start:
            group = self._to_start.popleft()
            for rollout in group.rollouts:
                self._spawn(self._play(group, rollout), f"rollout {rollout.rollout_id}")
            self._rollout_counts.begun += len(group.rollouts)
            await asyncio.sleep(0)
        if self._more_to_start:
            self._more_to_start = False
            self.handle(GroupsBegun())

    def _cancel_group(self, group: Group | None, reason: DropReason, detail: str) -> None:
        if group is None:
            return  # Waiting for its turn after a resume: it never started here.
        group.cancelled = True
        _interrupt(group)
        if group.is_finalized:
            self._discarded.add(group.rollouts, f"group {group.group_id}: {detail}")
        else:
            self._counts["rollouts/cancelled"] += len(group.rollouts)
        logger.debug("group %d was dropped (%s): %s", group.group_id, reason, detail)

    async def _play(self, group: Group, rollout: Rollout) -> None:
        set_context(group=group.group_id, rollout=rollout.rollout_id)
        chat, sampling = self._calling[group.environment]
        model = PolicyModel(rollout, chat, self._pool, sampling)
        try:
            with self._interruptible(group):
                await play(self._environments[group.environment], rollout, model)
                outcome = outcome_of(rollout)
                if rollout.error is not None:
                    await asyncio.sleep(self._pause_after(rollout.error, outcome))
        except asyncio.CancelledError:
            if not (group.cancelled or self._draining):
                raise
            outcome = RolloutOutcome.CANCELLED
        if outcome is RolloutOutcome.COMPLETED:
            self._discarded.rollout_completed()
            self._on_progress()
        self._rollout_counts.ended += 1
        oldest = rollout.oldest_policy_version if rollout.turns else None
        self.handle(RolloutEnded(group.group_id, rollout.rollout_id, outcome, oldest))

    def _pause_after(self, error: str, outcome: RolloutOutcome) -> float:
        """Seconds before another rollout may take the place of one that failed."""
        if outcome is RolloutOutcome.INFERENCE_FAILED:
            return self._discarded.inference_failed(error)
        return self._discarded.rollout_failed(error)

    async def _finalize(self, group: Group) -> None:
        set_context(group=group.group_id)
        loaded = self._environments[group.environment]
        if loaded.environment.group_scoring:
            try:
                with self._interruptible(group):
                    await score_group(loaded, group.rollouts)
            except asyncio.CancelledError:
                if not (group.cancelled or self._draining):
                    raise
                return  # Forgotten, or played again after a resume.
        outcome = await finalize_in_thread(self._finalizer, group.rollouts, loaded.environment.group_scoring)
        if not group.cancelled:
            group.is_finalized, group.rollouts = True, list(outcome.rollouts)
            for (kind, environment), caught in outcome.caught.items():
                self._counts[f"filters/{kind}/{environment}"] += caught
            if outcome.event.dropped is None:
                kept, filtered = outcome.event.kept, outcome.event.filtered
                failed = len(group.rollouts) - kept - filtered
                self._decisions.of_group(
                    group.group_id, Decision.FINALIZED, kept=kept, filtered=filtered, failed=failed
                )
        self.handle(outcome.event)

    async def _ship(self, step: int, group_ids: Sequence[int]) -> None:
        set_context(step=step)
        rollouts = [rollout for group_id in group_ids for rollout in self._groups[group_id].rollouts]
        discarded, unrecorded = self._discarded.take(step)
        with self._commit_in_progress():
            in_progress = self._boundary.begin(step, rollouts, discarded, self._clock)
            self._sender.offer(*await in_progress.merge())
            line = with_unrecorded(await in_progress.record(), unrecorded) | self._metrics()
            await in_progress.commit(self._checkpoint(step, self._scheduler.state(ready=False), [], line))
            self._sender.commit(step)
            line = await in_progress.finish()
        self._boundary_task = None
        for group_id in group_ids:
            del self._groups[group_id]
        self._on_progress()
        self._publish(line)
        self.handle(BatchCommitted(step))

    @contextmanager
    def _interruptible(self, group: Group) -> Iterator[None]:
        """Registers the current task with its group for the block; where there is nothing left to do it is cancelled at once."""
        if group.cancelled or self._draining:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        group.interruptible.add(task)
        try:
            yield
        finally:
            group.interruptible.discard(task)

    # --- state ---

    def _checkpoint(
        self, step: int, scheduler: dict[str, Any], ready: Sequence[Rollout], line: MetricsLine | None = None
    ) -> Checkpoint:
        """The state as it is now. Called on the loop, so that scheduler, window and rollouts are of one moment."""
        return Checkpoint(
            step=step,
            identity=identity_of(self._config),
            scheduler=scheduler,
            counts={**self._counts, **self._discarded.counts()},
            waiting=[*ready, *self._discarded.rollouts],
            line=line,
        )

    def _metrics(self) -> MetricsLine:
        """What the daemon adds to a step's metrics. Begins to count anew."""
        snapshot = self._scheduler.snapshot()
        counts, self._counts = self._counts, Counter()
        return {
            "time": time.time(),
            "uptime_seconds": time.monotonic() - self._began if self._began is not None else 0.0,
            "rollouts/cancelled": 0,
            **counts,
            **self._lag.take().metrics(),
            **self._blame.take().metrics(),
            "inflight/rollouts": snapshot.in_flight_rollouts,
            "policy/version": snapshot.policy_version,
            "memory/rss_bytes": resident_bytes(),
        }


def _interrupt(group: Group) -> None:
    for task in group.interruptible:
        task.cancel()
