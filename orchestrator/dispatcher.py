"""Executes the scheduler's instructions and reports events to it. Decides nothing.

Every instruction becomes a task of the daemon's `TaskGroup`: a rollout, the finalizing of a group, a step boundary. An exception
of an environment fails its rollout; any other exception is a defect and ends the daemon.

Next in the reading order of `docs/architecture.md`: `orchestrator/rollouts/play.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from counterpoint.environments.lifecycle import metrics_of
from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.orchestrator.decisions import Decision, DecisionLog
from counterpoint.orchestrator.evaluation.evaluations import Evaluations
from counterpoint.orchestrator.logging_setup import set_context
from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.orchestrator.receipts.receipt import groups_of, rules_of
from counterpoint.orchestrator.rollouts.dump import header_of
from counterpoint.orchestrator.rollouts.play import score_group
from counterpoint.orchestrator.rollouts.playing import Playing
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.scheduling.events import (
    AwaitStragglers,
    BatchCommitted,
    BoundRaised,
    CancelEvaluation,
    CancelGroup,
    DrainRequested,
    EndEvaluation,
    Event,
    FinalizeGroup,
    GiveUp,
    GroupsBegun,
    Instruction,
    LastStepCommitted,
    MoreToStart,
    PatienceEnded,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartEvaluationRollouts,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.lossless import ALLOWED, LosslessBound
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome, outcome_of
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.orchestrator.step.advantages import Advantage
from counterpoint.orchestrator.step.batch_form import choose_trained
from counterpoint.orchestrator.step.boundary import StepBoundary
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, identity_of, write_checkpoint
from counterpoint.orchestrator.step.differences import DifferenceWatch, NothingLearnedError
from counterpoint.orchestrator.step.discarded import REPORT_SECONDS, DiscardedRollouts, Report, is_counted, save
from counterpoint.orchestrator.step.finalize import Finalizer, finalize
from counterpoint.orchestrator.step.patience import BatchPatience
from counterpoint.orchestrator.step.phases import PhaseClock
from counterpoint.orchestrator.step.records import recorded_line
from counterpoint.orchestrator.step.routing_ahead import RoutingAhead, with_routing
from counterpoint.orchestrator.step.sender import Sender
from counterpoint.orchestrator.step.shares import Fate, metric_of
from counterpoint.orchestrator.step.step_metrics import RESTORED_TOKENS, completion_tokens
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.health import LoopMonitors
from counterpoint.run.loop_health.threads import in_thread, record_in_thread
from counterpoint.transport.process.resident import resident_bytes
from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.intervals import Interval
from counterpoint.transport.telemetry.start_phases import FIRST_STEP, OVER, enter

logger = logging.getLogger(__name__)


class HopelessError(ConfigurationError):
    """No rollout can succeed: another start would change nothing."""


@dataclass(slots=True)
class _PlayedGroup:
    """The rollouts of one example, until their batch is committed or the group is dropped."""

    group_id: int
    environment: str
    rollouts: list[Rollout]
    interruptible: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that play or score. Each adds and removes itself, so that only running tasks are cancelled."""
    playing: int = 0
    """Rollouts that have begun and not ended."""
    is_finalized: bool = False
    cancelled: bool = False
    began: float | None = None
    """When its rollouts began, on the monotonic clock, in seconds. None if none has, or if they began before a resume."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The seconds of each ended rollout, by its id."""

    def counts(self, fate: Fate) -> Counter[str]:
        """Returns the metrics of its rollouts that were neither failed nor filtered, by length."""
        return Counter(metric_of(fate, self.environment, seconds) for seconds in self.durations())

    def durations(self) -> list[float | None]:
        """Returns the seconds of its rollouts that were neither failed nor filtered: to their end, or so far."""
        so_far = None if self.began is None else time.monotonic() - self.began
        return [
            self.seconds.get(rollout.rollout_id, so_far)
            for rollout in self.rollouts
            if rollout.error is None and rollout.filtered_by is None
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts of a run that the dispatcher sets to work."""

    scheduler: RolloutScheduler
    playing: Playing
    sender: Sender
    boundary: StepBoundary
    health: LoopMonitors
    decisions: DecisionLog
    evaluations: Evaluations | None = None
    """Executes the instructions about evaluations; a run without any needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """What others do about each step."""

    publish: Callable[[MetricsLine], None]
    """Receives every step's metrics line."""
    on_progress: Callable[[], None]
    """The dispatcher calls it for each completed rollout and each committed step."""
    commit_in_progress: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds each commit."""
    annotate: Callable[[int], MetricsLine] = lambda step: {}
    """Returns the changes for the metrics line of a step."""
    is_dump_asked: Callable[[int], bool] = lambda step: False
    """Whether somebody asked for a dump of this step."""


class Dispatcher:
    """Executes the instructions of one run."""

    def __init__(
        self,
        config: RunConfig,
        advantage: Advantage,
        parts: RunParts,
        hooks: StepHooks,
        tasks: asyncio.TaskGroup,
        identity: dict[str, Any] | None = None,
    ) -> None:
        """`identity` is that of the configuration as the user gave it, if it has been changed since."""
        self._identity = identity or identity_of(config)
        self._scheduler = parts.scheduler
        self._playing = parts.playing
        self.reconfigure(config, advantage)
        self.between_steps = asyncio.Lock()
        """A step boundary holds it. Another holder is between two steps."""
        self._sender = parts.sender
        self._boundary = boundary = parts.boundary
        self._health = parts.health
        self._rollout_counts = parts.health.rollout_counts
        self._decisions = parts.decisions
        self._evaluations = parts.evaluations
        self._tasks = tasks
        self._hooks = hooks
        self._groups: dict[int, _PlayedGroup] = {}
        self._record = partial(recorded_line, state_columns=boundary.state_columns, transcribe=boundary.transcribe)
        self._discarded = DiscardedRollouts(config.schedule)
        """Finalized rollouts of groups that will not ship."""
        self._differences = DifferenceWatch(config, self._record, lambda work: tasks.create_task(in_thread(work)))
        self._began: float | None = None
        """The time when the first group of this process started, on the monotonic clock, in seconds."""
        self._begun: list[tuple[str, int]] = []
        """Environment and example of each group that began since the last receipt."""
        self._next_group = 0
        """The id of the next group that begins for the first time."""
        self._counts: Counter[str] = Counter()
        """Counts that no finalized rollout shows (cancelled rollouts, filters' counts), for the next step's metrics."""
        self._lossless = LosslessBound()
        self._shipped_step = 0
        """The newest shipped step. It may not be committed yet."""
        self._to_start: deque[_PlayedGroup] = deque()
        """Groups that start in one of the next iterations of the loop."""
        self._starting = False
        """Whether a task starts them."""
        self._patience = BatchPatience(
            lambda step, seconds: self._spawn(self._end_patience(step, seconds), f"patience of step {step}")
        )
        self._more_to_start = False
        """Once they have started, `GroupsBegun` is due."""
        self._work: set[asyncio.Task[None]] = set()
        self._draining = False
        self._boundary_task: asyncio.Task[None] | None = None
        """The step boundary in progress. Until it ends, the scheduler is a step ahead of the last commit."""
        self._finalizing = PerTickLimiter(1)
        self._clock = PhaseClock()
        self._ahead = self._new_ahead()
        """The record of the next step, begun, or None if it is written as a whole."""
        self.finished = asyncio.Event()
        """Set once the last step is committed."""

    def reconfigure(self, config: RunConfig, advantage: Advantage) -> None:
        """Uses this configuration for groups that are finalized from now on."""
        self._config = config
        self._finalizer = Finalizer(advantage, config.filters, keep_routing=config.dump_raw_rollouts)
        self._rules = rules_of(config)

    def restore(self, checkpoint: StepCheckpoint) -> None:
        """Restores the scheduler's state and the rollouts that no step has counted. Raises `ValueError` for a damaged state."""
        self._scheduler.restore(checkpoint.scheduler)
        self._shipped_step = checkpoint.step
        self._begun, self._next_group = list(checkpoint.begun), checkpoint.scheduler["next_group_id"]
        self._counts = Counter({name: count for name, count in checkpoint.counts.items() if not is_counted(name)})
        self._counts.pop(RESTORED_TOKENS, None)  # they are counted anew below
        discarded: list[Rollout] = []
        ready: dict[int, list[Rollout]] = {group_id: [] for group_id in self._scheduler.ready_group_ids()}
        for rollout in checkpoint.waiting:
            ready.get(rollout.group_id, discarded).append(rollout)
        self._discarded.restore(checkpoint.step, discarded, checkpoint.counts)
        self._counts[RESTORED_TOKENS] += self._discarded.completion_tokens
        for group_id, rollouts in ready.items():
            if not rollouts:
                raise ValueError(f"the checkpoint of step {checkpoint.step} lacks the rollouts of group {group_id}")
            self._groups[group_id] = _PlayedGroup(group_id, rollouts[0].environment, rollouts, is_finalized=True)

    def handle(self, event: Event) -> None:
        """Passes the event to the scheduler and executes its instructions, without waiting for their end."""
        if isinstance(event, PolicyUpdated):
            self._patience.loaded(event.version)
        for instruction in self._scheduler.handle(event):
            self._execute(instruction)
        if self._boundary_task is None:
            self._clock.enter(self._scheduler.awaited())

    async def report_discarded(self, report: Callable[[Report, Callable[[], bytes] | None], Awaitable[None]]) -> None:
        """Reports discarded rollouts until cancelled: soon after a group is dropped, and every `REPORT_SECONDS` at most.

        `report` also receives a function that encodes one of the rollouts.
        """
        while True:
            await self._discarded.changed.wait()
            self._discarded.changed.clear()
            await report(self._discarded.report(), self._newest_discarded())
            await asyncio.sleep(REPORT_SECONDS)

    def _newest_discarded(self) -> Callable[[], bytes] | None:
        """Returns a function that encodes the newest discarded rollout, or None if there is none since the last step."""
        return partial(self._record, self._discarded.rollouts[-1]) if self._discarded.rollouts else None

    async def drain(self) -> None:
        """Cancels rollouts in flight, completes finalizing and the step boundary, and writes the state for a resume.

        Waits half of `shutdown_timeout_seconds` for environments that ignore their cancellation. The state does not depend on
        them. Waits for the commit of a step boundary, however long that takes.
        """
        self._draining = True
        self._patience.cancel()
        self.handle(DrainRequested())
        for group in [*self._groups.values()]:
            _interrupt(group)
            await asyncio.sleep(0)  # together, the rollouts of hundreds of groups would block the loop as they end
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
            with self._hooks.commit_in_progress():
                await in_thread(save, self._discarded.report(), self._config.run_dir, self._newest_discarded())
                kept = self._config.keep_checkpoints, self._config.training.keep_every
                await in_thread(write_checkpoint, self._config.run_dir, checkpoint, *kept)

    @property
    def last_phases(self) -> Mapping[str, Sequence[Interval]]:
        """The times of the phases of the last committed step, in seconds of `time.perf_counter`."""
        return self._clock.last_step

    async def settle(self) -> None:
        """Waits until every rollout, finalizing and step boundary has ended."""
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
                self._patience.shipped(step)
                for group_id in group_ids:
                    self._decisions.of_group(group_id, Decision.SHIPPED, step=step)
                ahead, self._ahead = self._ahead, self._new_ahead()
                self._boundary_task = self._spawn(self._ship(step, group_ids, ahead), f"step {step}")
            case AwaitStragglers(step):
                self._patience.wait(step, self._config.schedule.straggler_patience_steps)
            case BoundRaised(steps, reason):
                limit = self._config.schedule.off_policy_limit
                logger.info("schedule.max_off_policy_steps is %d now, of at most %d: %s", steps, limit, reason)
            case GiveUp(reason):
                raise HopelessError(reason)
            case LastStepCommitted():
                self.finished.set()
            case StartEvaluationRollouts() | EndEvaluation() | CancelEvaluation():
                assert self._evaluations is not None
                self._evaluations.execute(instruction)

    async def _end_patience(self, step: int, seconds: float) -> None:
        logger.warning(
            "the batch of step %d has waited %.1f s for stragglers, as schedule.straggler_patience_steps allows. It ships "
            "without them, and those that are then too old are dropped. A schedule.max_off_policy_steps above %d keeps them",
            step, seconds, self._config.schedule.staleness_limit,
        )  # fmt: skip
        self.handle(PatienceEnded(step))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._tasks.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _start_group(self, start: StartGroup) -> None:
        if self._began is None:
            self._began = time.monotonic()
        if start.group_id >= self._next_group:
            self._begun.append((start.environment, start.example_index))
            self._next_group = start.group_id + 1
        rollouts = [
            Rollout(f"{start.group_id}-{index}", start.group_id, start.environment, start.example_index)
            for index in range(start.size)
        ]
        group = self._groups[start.group_id] = _PlayedGroup(start.group_id, start.environment, rollouts)
        self._decisions.of_group(
            start.group_id,
            Decision.STARTED,
            environment=start.environment,
            example_index=start.example_index,
            rollouts=start.size,
        )
        self._to_start.append(group)
        if not self._starting:
            self._starting = True
            self._spawn(self._start_in_turn(), "start of groups")

    async def _start_in_turn(self) -> None:
        """Starts one group per iteration of the loop: a run begins with hundreds, which would block it."""
        while self._to_start:
            group = self._to_start.popleft()
            group.began, group.playing = time.monotonic(), len(group.rollouts)
            for rollout in group.rollouts:
                self._spawn(self._play(group, rollout), f"rollout {rollout.rollout_id}")
            self._rollout_counts.begun += len(group.rollouts)
            if group.cancelled:
                self._let_go(group)
            await asyncio.sleep(0)
        self._starting = False
        if self._more_to_start:
            self._more_to_start = False
            self.handle(GroupsBegun())

    def _cancel_group(self, group: _PlayedGroup | None, reason: DropReason, detail: str) -> None:
        if group is None:
            return  # It waited to start again after a resume.
        group.cancelled = True
        self._let_go(group)
        _interrupt(group)
        if reason is DropReason.STALE:
            self._counts.update(group.counts("stale"))
            self._lossless.add(group.durations(), lost=True)
        if group.is_finalized:
            self._count_restored(group)
            self._discarded.add(group.rollouts, reason, f"group {group.group_id}: {detail}")
        else:
            self._counts["rollouts/cancelled"] += len(group.rollouts)
        logger.debug("group %d was dropped (%s): %s", group.group_id, reason, detail)

    async def _play(self, group: _PlayedGroup, rollout: Rollout) -> None:
        set_context(group=group.group_id, rollout=rollout.rollout_id)
        try:
            with self._interruptible(group):
                await self._playing.play(rollout)
                if group.began is not None:
                    group.seconds[rollout.rollout_id] = time.monotonic() - group.began
                outcome = outcome_of(rollout)
                if pause := self._pause_after(rollout.error, outcome):
                    await asyncio.sleep(pause)
        except asyncio.CancelledError:
            if not (group.cancelled or self._draining):
                raise
            outcome = RolloutOutcome.CANCELLED
        if outcome is RolloutOutcome.COMPLETED:
            enter("first rewards", beside=True)
            self._hooks.on_progress()
        group.playing -= 1
        if not group.playing:
            self._playing.forget_group(rollout)
        oldest = rollout.oldest_policy_version if rollout.turns else None
        self.handle(RolloutEnded(group.group_id, rollout.rollout_id, outcome, oldest))

    def _pause_after(self, error: str | None, outcome: RolloutOutcome) -> float:
        """Returns the seconds to wait before another rollout takes the place of one that has ended."""
        if error is None:
            return self._discarded.rollout_completed()
        if outcome is RolloutOutcome.INFERENCE_FAILED:
            return self._discarded.inference_failed(error)
        return self._discarded.rollout_failed(error)

    async def _finalize(self, group: _PlayedGroup) -> None:
        set_context(group=group.group_id)
        loaded = self._playing.environments[group.environment]
        if loaded.environment.group_scoring:
            try:
                with self._interruptible(group):
                    await score_group(loaded, group.rollouts)
            except asyncio.CancelledError:
                if not (group.cancelled or self._draining):
                    raise
                return  # The group was dropped, or starts again after a resume.
        scored_as_one = loaded.environment.group_scoring
        outcome = await finalize(self._finalizer, group.rollouts, scored_as_one, self._finalizing)
        enter(FIRST_STEP, beside=True)
        if not group.cancelled:
            group.is_finalized, group.rollouts = True, list(outcome.rollouts)
            if outcome.event.dropped is None or outcome.failed:
                self._discarded.group_finalized(failed=outcome.event.dropped is not None)
            for (kind, environment), caught in outcome.caught.items():
                self._counts[f"filters/{kind}/{environment}"] += caught
            if outcome.event.dropped is None:
                kept, filtered = outcome.event.kept, outcome.event.filtered
                failed = len(group.rollouts) - kept - filtered
                self._decisions.of_group(
                    group.group_id, Decision.FINALIZED, kept=kept, filtered=filtered, failed=failed
                )
                is_first = self._sender.newest_step == 0 and not self._draining
                hopeless = self._differences.group_finalized(self._config, group.rollouts, may_give_up=is_first)
                if hopeless is not None:
                    raise NothingLearnedError(hopeless)
                self._write_ahead(group)
        self.handle(replace(outcome.event, at=time.monotonic()))

    def _new_ahead(self) -> RoutingAhead | None:
        return self._boundary.begin_record(self._config.schedule.rollouts_per_step)

    def _write_ahead(self, group: _PlayedGroup) -> None:
        """Writes the routing of a finalized group, if the next batch waits only for groups.

        If it waits for the trainer instead, more groups are ready than it takes, and the oldest ship, not those that were
        finalized first.
        """
        if self._ahead is None or not with_routing(group.rollouts):
            return
        if self._scheduler.may_ship and self._scheduler.awaited() in ("generation", "finalize"):
            self._spawn(record_in_thread(self._ahead.add, group.rollouts), f"routing of {group.group_id}")

    async def _ship(self, step: int, group_ids: Sequence[int], ahead: RoutingAhead | None) -> None:
        set_context(step=step)
        async with self.between_steps:
            line = await self._cross_boundary(step, group_ids, ahead)
        enter(OVER, beside=True)
        self._boundary_task = None
        shipped = [self._groups.pop(group_id) for group_id in group_ids]
        self._hooks.on_progress()
        self._hooks.publish(line)
        self.handle(BatchCommitted(step))
        while shipped:  # the rollouts of a group are freed in one pass of the loop
            self._let_go(shipped.pop())
            await asyncio.sleep(0)

    def _let_go(self, group: _PlayedGroup) -> None:
        """Counts the rollouts of a group that is held no more, if they have begun in this process."""
        if group.began is not None:
            self._rollout_counts.let_go += len(group.rollouts)

    async def _cross_boundary(self, step: int, group_ids: Sequence[int], ahead: RoutingAhead | None) -> MetricsLine:
        """Merges, records and commits the groups as the batch of `step`, and returns the step's metrics."""
        rollouts = [rollout for group_id in group_ids for rollout in self._groups[group_id].rollouts]
        choose_trained(step, rollouts, self._finalizer.advantage)
        for group_id in group_ids:
            self._counts.update(self._groups[group_id].counts("trained"))
            self._lossless.add(self._groups[group_id].durations(), lost=False)
            self._count_restored(self._groups[group_id])
        discarded, unrecorded = self._discarded.take(step)
        with self._hooks.commit_in_progress():
            in_progress = self._boundary_of(step).begin(step, rollouts, discarded, unrecorded, self._clock, ahead)
            self._sender.offer(*await in_progress.merge())
            await asyncio.sleep(0)  # with thousands of rollouts in flight each of these takes a millisecond of the loop
            line = self._metrics() | self._hooks.annotate(step)
            await asyncio.sleep(0)
            # Taken now, before the wait for the disk: groups that end meanwhile start again after a kill.
            state = self._scheduler.state(ready=False)
            begun, self._begun = self._begun, []
            checkpoint = self._checkpoint(step, state, [], line)
            facts = self._rules | groups_of(group_ids, begun, state)
            await asyncio.sleep(0)
            line = await in_progress.complete(checkpoint, partial(self._sender.commit, step), facts)
        if discarded:
            self._discarded.changed.set()  # those are in the step's records now
        return line

    def _count_restored(self, group: _PlayedGroup) -> None:
        """Counts the tokens of a group that an earlier process finished, as the next step counts its rollouts."""
        if group.began is None:
            self._counts[RESTORED_TOKENS] += completion_tokens(group.rollouts)

    def _boundary_of(self, step: int) -> StepBoundary:
        """Returns the boundary of a step, with a dump if one is due."""
        if not (self._config.dump_raw_rollouts or self._hooks.is_dump_asked(step)):
            return self._boundary
        environments = self._playing.environments.items()
        group_scoring = [name for name, each in environments if each.environment.group_scoring]
        return replace(self._boundary, dump=header_of(self._config, group_scoring))

    def _interruptible(self, group: _PlayedGroup) -> _Interruptible:
        """Makes the current task interruptible during the block. Raises `CancelledError` at once if the group was cancelled."""
        if group.cancelled or self._draining:
            raise asyncio.CancelledError
        return _Interruptible(group.interruptible)

    # --- state ---

    def _checkpoint(
        self, step: int, scheduler: dict[str, Any], ready: Sequence[Rollout], line: MetricsLine | None = None
    ) -> StepCheckpoint:
        """Returns the present state. Call it on the loop, so that scheduler and rollouts are of one moment."""
        return StepCheckpoint(
            step=step,
            identity=self._identity,
            scheduler=scheduler,
            counts={**self._counts, **self._discarded.counts()},
            waiting=[*ready, *self._discarded.rollouts],
            line=line,
            begun=tuple(self._begun),
        )

    def _metrics(self) -> MetricsLine:
        """Returns the daemon's part of a step's metrics and resets its counts."""
        snapshot = self._scheduler.snapshot()
        counts, self._counts = self._counts, Counter()
        return {
            "time": time.time(),
            "uptime_seconds": time.monotonic() - self._began if self._began is not None else 0.0,
            "rollouts/cancelled": 0,
            RESTORED_TOKENS: 0,
            **counts,
            **self._scheduler.take_example_metrics(),
            **self._health.take_metrics(),
            **metrics_of(loaded.environment for loaded in self._playing.environments.values()),
            "inflight/rollouts": snapshot.in_flight_rollouts,
            "inflight/evaluation_rollouts": snapshot.evaluation_rollouts,
            **(self._evaluations.take_metrics() if self._evaluations is not None else {}),
            "policy/version": snapshot.policy_version,
            ALLOWED: snapshot.staleness_bound,
            "memory/rss_bytes": resident_bytes(),
            **self._lossless.take(self._clock.so_far(), self._patience.trainer_seconds, self._config.schedule),
        }


class _Interruptible:
    """A block whose task is among those that `_interrupt` cancels. Every rollout has one, and a generator would cost more."""

    __slots__ = ("_task", "_tasks")

    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._tasks = task, tasks

    def __enter__(self) -> None:
        self._tasks.add(self._task)

    def __exit__(self, *_: object) -> None:
        self._tasks.discard(self._task)


def _interrupt(group: _PlayedGroup) -> None:
    for task in group.interruptible:
        task.cancel()
