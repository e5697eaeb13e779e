"""The scheduler: a pure state machine that decides which groups start, which are dropped and which ship.

`handle(event) -> instructions` has no clock, no I/O and no tasks: the same events give the same instructions. The vocabulary is
`events.py`. The dispatcher executes the instructions. `docs/scheduling.md` has an example. No rule iterates over all groups:
`group_table.py` has the aggregates.

A group is *running* from `StartGroup` until its last rollout ended, *finalizing* until `GroupFinalized`, and *ready* until a
batch takes it and the table forgets it. It is *waiting* when a checkpoint says that it must start again. The rules, with s the
next step to ship and v the newest loaded policy version:

- **Capacity.** A group starts only when all its rollouts fit beside those in flight, cancelled ones included until they end.
- **Lead.** It starts for step t = s + (rollouts expected of groups in progress) // rollouts_per_step, and only while t - v <=
  max_lead_steps and t <= steps. Expected are the rollouts of a running group that have not failed, and those of a ready group
  that count. For example, with s = 5, 64 rollouts_per_step and 130 expected, it starts for step 7.
- **Pace.** One event starts at most `starts_an_event` groups, which bounds its duration. `MoreToStart` requests an event for
  more.
- **Staleness.** A turn of version o in the batch of step s has staleness s - o <= max_off_policy_steps. Of a running group o
  is the version it started under, of a ready group that of its oldest turn. A group that is too stale for the next step cannot
  ship in a later one either: it is dropped when s becomes the next step. That is before newer weights load, since those of
  step s - 1 cannot exist earlier. With `max_off_policy_steps = "auto"` the limit is `off_policy_limit`, and `BoundRaised`
  tells how much of it has been needed: a group is trained as with that limit, so the state of a resume lacks it.
- **Stragglers.** With `stragglers = "wait"` a full batch waits while running and finalizing groups need it: those that the
  later batches could not all take before they are too stale (`GroupTable.straggling`). `PatienceEnded` ends the wait of one
  step.
- **Counting.** A batch takes whole ready groups, those with the oldest turns first (then by id), until rollouts_per_step
  count: kept rollouts with `refill`, kept and filtered ones with `ship`. It ships within the lead, one batch at a time.
- **Replacement.** Failed rollouts never count. A group without a rollout that counts is dropped, and so is a whole batch
  without a kept one. The rules above start others.
- **Giving up.** While nothing has succeeded yet, and the failures cannot pass by themselves, the run ends (`giving_up.py`).
- **Shares.** The source of examples learns of each group that is dropped as too stale, and draws another one of its
  environment in its place, up to a bound: ratios are of trained groups (`counterpoint/environments/mix.py`).
- **Curriculum.** The source of examples learns a group's rewards when the group ships, or is dropped after it was finalized.
- **Forgetting.** The dispatcher forgets a group at `CancelGroup` or at the commit of its batch, and at no other time.
- **Checkpoint.** From `ShipBatch` of a step on, `state()` is the state after that step, without its groups. After a drain,
  ready groups stay ready, and any other starts again, with the same id and example. After a kill ready groups start again,
  too: the commit of a step does not hold their rollouts.
- **Evaluations.** Their rollouts take a share of the capacity (`evaluation_share.py`) and are in no batch. They are the first
  that a drain cancels, and no checkpoint has them.
- **Pause.** Nothing starts, no evaluation either. Rollouts and batches in progress go on. No checkpoint knows of it. Since the
  examples wait, too, a run has the order of examples that it would have without pauses.
- **Drain.** Nothing starts or ships any more. Groups that complete are still finalized. Interrupted ones wait to start again.

Next in the reading order of `docs/architecture.md`: `orchestrator/daemon.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Literal

from counterpoint.orchestrator.scheduling.evaluation_share import EvaluationShare
from counterpoint.orchestrator.scheduling.events import (
    AwaitStragglers,
    BatchCommitted,
    BoundRaised,
    CancelEvaluation,
    CancelGroup,
    CapacityChanged,
    DrainRequested,
    EndEvaluation,
    EvaluationRequested,
    EvaluationRolloutEnded,
    Event,
    FinalizeGroup,
    GiveUp,
    GroupFinalized,
    GroupsBegun,
    Instruction,
    LastStepCommitted,
    LimitChanged,
    MoreToStart,
    PatienceEnded,
    PauseRequested,
    PolicyUpdated,
    PolicyUpdateStarting,
    ResumeRequested,
    RolloutEnded,
    ShipBatch,
    StartEvaluationRollouts,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.example_source import ExampleSource
from counterpoint.orchestrator.scheduling.giving_up import GivingUp
from counterpoint.orchestrator.scheduling.group import Group, Phase, SchedulerSnapshot, restored
from counterpoint.orchestrator.scheduling.group_table import GroupTable
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome
from counterpoint.run.config import ScheduleConfig
from counterpoint.transport.files.format_number import check_format

STATE_FORMAT = 1

LOG_LENGTH = 4096
"""Events in the scheduler's log."""

_SHOWN_ENTRIES = 20
"""Log entries in the message of an error."""

_STALENESS_COUNTS: tuple[Phase, ...] = ("running", "ready")
"""Phases in which staleness is checked. A finalizing group is checked once it is ready."""

_IN_PROGRESS: tuple[Phase, ...] = ("running", "finalizing")

Awaited = Literal["generation", "finalize", "wait_stragglers", "wait_trainer", "wait_inference", "paused"]
"""A batch waits for: rollouts in flight; finalizing groups; stragglers, though it is full; newer weights, without which nothing
may start or ship; servers, or the loading of weights; somebody who resumes the run."""


class RolloutScheduler:
    """Decides by the rules above. They alone change `mix`, so both are saved as one state."""

    def __init__(self, schedule: ScheduleConfig, steps: int, mix: ExampleSource, *, starts_an_event: int = 64) -> None:
        self._schedule = schedule
        self._steps = steps
        self._mix = mix
        self._starts_an_event = starts_an_event
        self._server_capacity = self._limit = schedule.most_in_flight
        self._version: int | None = None
        self._loading: int | None = None
        self._next_step = 1
        self._next_group_id = 0
        self._groups = GroupTable(schedule)
        self._bound = schedule.max_lead_steps if schedule.max_off_policy_steps == "auto" else schedule.staleness_limit
        self._in_flight: set[str] = set()
        self._evaluation = EvaluationShare()
        self._giving_up = GivingUp()
        self._shipping: int | None = None
        self._waiting_step = self._impatient_step = 0
        """The newest step with a wait for stragglers, and the newest with an ended patience."""
        self._draining = False
        self._paused = False
        self._finished = False
        self._dropped: Counter[DropReason] = Counter()
        self._last_drop = ""
        self.log: deque[tuple[Event, tuple[Instruction, ...]]] = deque(maxlen=LOG_LENGTH)
        """The newest events, each with the instructions that followed from it."""

    # --- events ---

    def handle(self, event: Event) -> list[Instruction]:
        """Returns the instructions, in order of execution. Raises `ValueError` for an event that contradicts earlier ones."""
        instructions = self._decide(event)
        self.log.append((event, tuple(instructions)))
        return instructions

    def _decide(self, event: Event) -> list[Instruction]:
        match event:
            case RolloutEnded():
                instructions = list(self._rollout_ended(event))
                if self._waiting_step != self._next_step:  # It frees capacity at most: nothing became ready or stale.
                    return [*instructions, *self._start()]
            case EvaluationRequested(evaluation_id, rollouts, share):
                self._evaluation.request(evaluation_id, rollouts, share)
                return list(self._start())
            case EvaluationRolloutEnded(evaluation_id, index):
                ended = self._evaluation.ended(evaluation_id, index)
                return [*([EndEvaluation(evaluation_id)] if ended else []), *self._start()]
            case GroupFinalized():
                instructions = list(self._group_finalized(event))
            case PolicyUpdated():
                self._version, self._loading, instructions = event.version, None, []
            case PolicyUpdateStarting():
                self._loading, instructions = event.version, []
            case BatchCommitted():
                instructions = self._batch_committed(event)
            case CapacityChanged():
                self._server_capacity, instructions = event.rollouts, []
            case GroupsBegun():
                instructions = []
            case PatienceEnded():
                self._impatient_step, instructions = event.step, []
            case PauseRequested() | ResumeRequested():
                self._paused, instructions = isinstance(event, PauseRequested), []
            case LimitChanged():
                self._limit, instructions = event.rollouts, []
            case DrainRequested():
                self._draining, instructions = True, []
                if (cancelled := self._evaluation.cancel()) is not None:
                    instructions.append(CancelEvaluation(cancelled))
        for rule in (self._drop_stale, self._ship, self._drop_stale, self._start, self._finish):
            instructions.extend(rule())
        return instructions

    def _rollout_ended(self, event: RolloutEnded) -> Iterator[Instruction]:
        if event.rollout_id not in self._in_flight:
            raise ValueError(
                f"rollout {event.rollout_id} ended ({event.outcome}), but it is not in flight{self._shown_log(event.group_id)}"
            )
        self._in_flight.remove(event.rollout_id)
        group = self._groups.get(event.group_id)
        if group is None:
            return  # dropped before
        group.outstanding -= 1
        if event.outcome is RolloutOutcome.COMPLETED:
            group.completed += 1
            if event.oldest_policy_version is not None:
                known = group.oldest_version
                oldest = event.oldest_policy_version
                group.oldest_version = oldest if known is None else min(known, oldest)
        elif event.outcome is RolloutOutcome.CANCELLED and self._draining:
            group.interrupted = True
        else:
            self._groups.rollout_failed(group)
        if group.outstanding == 0:
            self._groups.move(group, "waiting" if group.interrupted else "finalizing")
            if not group.interrupted:
                yield FinalizeGroup(group.group_id)

    def _group_finalized(self, event: GroupFinalized) -> Iterator[Instruction]:
        group = self._groups.get(event.group_id)
        if group is None and event.group_id < self._next_group_id:
            return  # dropped while it was finalized
        if group is None or group.phase != "finalizing" or event.kept + event.filtered > group.completed:
            raise ValueError(f"{event} does not fit the group: {group}{self._shown_log(event.group_id)}")
        group.kept, group.filtered, group.rewards = event.kept, event.filtered, event.rewards
        hopeless = self._giving_up.group_finalized(
            event.dropped,
            event.failure,
            event.at,
            begun=self._next_group_id,
            unfinished=(each.group_id for each in self._groups if each is not group and each.phase in _IN_PROGRESS),
        )
        if hopeless is not None and not self._draining:
            yield GiveUp(hopeless)
        if event.dropped is None and self._groups.counts(group):
            self._groups.move(group, "ready")
            return
        self._groups.remove(group)
        if event.dropped is not None:
            yield self._drop(group, event.dropped, event.detail)
        else:
            why = f": {event.detail}" if event.detail else ""
            yield self._drop(group, DropReason.FILTERED, f"all {group.filtered} completed rollouts were filtered{why}")

    def _batch_committed(self, event: BatchCommitted) -> list[Instruction]:
        if event.step != self._shipping:
            raise ValueError(
                f"the batch of step {event.step} was committed, but that of {self._shipping} is in progress"
            )
        self._shipping = None
        return []

    # --- rules ---

    def _drop_stale(self) -> Iterator[Instruction]:
        """Drops groups that are too stale for the next step, and raises the bound for the others."""
        limit = self._schedule.staleness_limit
        stale: list[Group] = []
        for phase in _STALENESS_COUNTS:
            while (group := self._groups.oldest(phase)) is not None and self._next_step - group.version > limit:
                self._groups.remove(group)
                stale.append(group)
        for group in sorted(stale, key=lambda each: each.group_id):
            staleness = self._next_step - group.version
            yield self._drop(
                group,
                DropReason.STALE,
                f"too stale: generated by policy version {group.version}, it would be {staleness} steps old in the batch of "
                f"step {self._next_step}; {self._limit_key} is {limit}",
            )
        for group in filter(None, map(self._groups.oldest, _STALENESS_COUNTS)):
            if (staleness := self._next_step - group.version) > self._bound:
                self._bound = staleness
                yield BoundRaised(
                    staleness,
                    f"group {group.group_id} (environment {group.environment}, example {group.example_index}) of policy version "
                    f"{group.version} is {'still running' if group.phase == 'running' else 'ready'} at step {self._next_step}",
                )

    @property
    def _limit_key(self) -> str:
        """The key that limits staleness."""
        return "off_policy_limit" if self._schedule.max_off_policy_steps == "auto" else "max_off_policy_steps"

    def _ship(self) -> Iterator[Instruction]:
        if self._draining or not self.may_ship:
            return
        while self._groups.ready_rollouts >= self._schedule.rollouts_per_step:
            if self._awaited_stragglers is not None:
                if self._waiting_step != self._next_step:
                    self._waiting_step = self._next_step
                    yield AwaitStragglers(self._next_step)
                return
            chosen = self._take_oldest()
            if any(group.kept for group in chosen):
                yield self._batch_of(chosen)
                return
            for group in chosen:
                yield self._drop(group, DropReason.FILTERED, "the filters left nothing of a whole batch")

    @property
    def _awaited_stragglers(self) -> int | None:
        """The version up to which the next batch waits for stragglers, or None if it waits for none."""
        if self._schedule.stragglers == "drop" or self._impatient_step == self._next_step:
            return None
        return self._groups.straggling(self._next_step)

    def _take_oldest(self) -> list[Group]:
        """Removes and returns the ready groups of a batch. There must be enough."""
        taken: list[Group] = []
        count = 0
        while count < self._schedule.rollouts_per_step:
            group = self._groups.oldest("ready")
            assert group is not None
            self._groups.remove(group)
            taken.append(group)
            count += self._groups.counts(group)
        return taken

    def _batch_of(self, groups: list[Group]) -> ShipBatch:
        self._shipping = self._next_step
        self._next_step += 1
        self._dropped.clear()
        for group in groups:
            self._observe(group)
        return ShipBatch(self._shipping, tuple(group.group_id for group in groups))

    def _start(self) -> Iterator[Instruction]:
        starts = (self._start_groups, self._start_evaluation)
        for start in reversed(starts) if self._evaluation.is_next else starts:
            yield from start()

    def _start_evaluation(self) -> Iterator[Instruction]:
        if self._draining or self._paused or self._version is None or not self._evaluation.to_start:
            return
        playing, capacity = len(self._evaluation.in_flight), self.capacity
        most = capacity - playing - len(self._in_flight)
        if self._step_to_start <= self._steps:
            most = min(most, self._evaluation.allowed(capacity, self._schedule.group_size) - playing)
        if (started := self._evaluation.start(min(most, self._starts_an_event))) is not None:
            yield StartEvaluationRollouts(*started)

    def _start_groups(self) -> Iterator[Instruction]:
        if len(self._in_flight) + self._schedule.group_size > self._room_for_groups:
            return  # The most frequent reason, checked without composing its sentence.
        started = 0
        while self._version is not None and self._start_blocker() is None:
            if started == self._starts_an_event:
                yield MoreToStart()
                return
            started += 1
            group = self._groups.oldest("waiting") or self._new_group()
            size = self._schedule.group_size
            group.outstanding, group.started_version = size, self._version
            self._groups.move(group, "running")
            self._in_flight.update(f"{group.group_id}-{index}" for index in range(size))
            self._evaluation.is_next = True
            yield StartGroup(group.group_id, group.environment, group.example_index, size)

    def _new_group(self) -> Group:
        environment, example_index = self._mix.next()
        group = Group(self._next_group_id, environment, example_index)
        self._groups.add(group)
        self._next_group_id += 1
        return group

    def _finish(self) -> Iterator[Instruction]:
        if self._finished or self._shipping is not None or self._next_step <= self._steps:
            return
        self._finished = True
        for group in self._groups:
            if group.phase != "waiting":
                yield CancelGroup(group.group_id, DropReason.RUN_DONE, f"step {self._steps} was the last")
        self._groups = GroupTable(self._schedule)
        yield LastStepCommitted()

    def _start_blocker(self) -> str | None:
        """Returns why no group may start now, as a sentence, or None if one may."""
        schedule, in_flight, step = self._schedule, len(self._in_flight), self._step_to_start
        if self._draining:
            return "shutting down: nothing more is started"
        if self._paused:
            return "paused: nothing more is started until the run is resumed"
        if self._version is None:
            return "waiting for the first policy version to be loaded"
        if step > self._steps:
            return f"all groups up to the last step, {self._steps}, have started"
        if step - self._version > schedule.max_lead_steps:
            return (
                f"waiting for policy version {step - schedule.max_lead_steps}: step {step} is {step - self._version} ahead of "
                f"version {self._version}, max_lead_steps is {schedule.max_lead_steps}"
            )
        if self.capacity == 0:
            return "no inference server is in service"
        if in_flight + schedule.group_size > self._room_for_groups:
            evaluation = len(self._evaluation.in_flight) + self._evaluation.to_start
            return (
                f"capacity full: {in_flight} of {self.capacity} rollouts in flight, a group needs {schedule.group_size}"
                + (f"; an evaluation has {evaluation} rollouts to go" if evaluation else "")
            )
        return None

    # --- shared by the rules ---

    @property
    def _step_to_start(self) -> int:
        """The step that the next group would start for."""
        return self._next_step + self._groups.expected // self._schedule.rollouts_per_step

    @property
    def _room_for_groups(self) -> int:
        """The most rollouts of groups that may be in flight."""
        if self._evaluation.in_progress is None and not self._evaluation.in_flight:
            return self.capacity
        return self.capacity - self._evaluation.reserved(self.capacity, self._schedule.group_size)

    @property
    def capacity(self) -> int:
        """Rollouts that may be in flight: the lower of the configured limit and the servers'.

        While there is a server it is at least one group, since with less nothing could start. Its requests may queue in the
        pool.
        """
        if self._server_capacity <= 0:
            return 0
        return max(self._schedule.group_size, min(self._limit, self._server_capacity))

    def _drop(self, group: Group, reason: DropReason, detail: str) -> CancelGroup:
        """Counts a group that has been removed."""
        self._observe(group)
        if reason is DropReason.STALE:
            self._mix.drawn_in_vain(group.environment)
        self._dropped[reason] += 1
        self._last_drop = f"group {group.group_id}, {detail}"
        return CancelGroup(group.group_id, reason, detail)

    def _observe(self, group: Group) -> None:
        """Shows the examples' source the rewards of a group that leaves for good, if it was finalized.

        Not earlier: a ready group starts again after a kill, and would be seen twice.
        """
        if group.rewards:
            self._mix.observe(group.environment, group.example_index, group.rewards)

    def take_example_metrics(self) -> dict[str, float]:
        """Returns the metrics of the examples' source since the last call."""
        return self._mix.take_metrics()

    def snapshot(self) -> SchedulerSnapshot:
        """Returns the present numbers and reasons to wait."""
        return SchedulerSnapshot(
            policy_version=self._version,
            next_step=self._next_step,
            in_flight_rollouts=len(self._in_flight),
            evaluation_rollouts=len(self._evaluation.in_flight),
            capacity=self.capacity,
            groups=self._groups.sizes(),
            staleness_bound=self._bound,
            paused=self._paused,
            waiting_for=tuple(self._waiting_for()),
        )

    @property
    def may_ship(self) -> bool:
        """Whether a batch that was complete now would ship: none is on its way, and it would be within the lead."""
        if self._version is None or self._shipping is not None or self._next_step > self._steps:
            return False
        return self._next_step - self._version <= self._schedule.max_lead_steps

    def awaited(self) -> Awaited:
        """Returns the part of the run that the next batch waits for.

        `wait_trainer`: it cannot ship before newer weights come.
        """
        if self._version is None or self._loading is not None or self.capacity == 0:
            return "wait_inference"
        if self._groups.ready_rollouts >= self._schedule.rollouts_per_step:
            return "wait_stragglers" if self.may_ship and self._awaited_stragglers is not None else "wait_trainer"
        if self._in_flight:
            return "generation"
        if "finalizing" in self._groups.sizes():
            return "finalize"
        return "paused" if self._paused else "wait_trainer"

    @property
    def rests(self) -> bool:
        """Whether nothing happens because the run is paused: nothing is in flight, and no batch is ready or on its way."""
        return (
            self._paused
            and not self._in_flight
            and not self._evaluation.in_flight
            and self._shipping is None
            and "finalizing" not in self._groups.sizes()
            and self._groups.ready_rollouts < self._schedule.rollouts_per_step
        )

    def _waiting_for(self) -> Iterator[str]:
        if self._evaluation.in_progress is not None:
            playing, left = len(self._evaluation.in_flight), self._evaluation.to_start
            yield f"evaluation {self._evaluation.in_progress}: {playing} rollouts in flight, {left} to start"
        if self._finished:
            yield "nothing: the run is done"
            return
        if self._shipping is not None:
            yield f"the batch of step {self._shipping} to be committed"
        if self._loading is not None:
            yield f"policy version {self._loading} to be loaded"
        if self._next_step <= self._steps:
            sizes = self._groups.sizes()
            yield (
                f"the batch of step {self._next_step} has {self._groups.ready_rollouts} of {self._schedule.rollouts_per_step} "
                f"rollouts; {sizes.get('running', 0)} groups running, {sizes.get('finalizing', 0)} being finalized"
            )
            yield self._start_blocker() or "a group may start"
            if self._waiting_step == self._next_step and self._awaited_stragglers is not None:
                yield (
                    f"groups of policy version {self._awaited_stragglers} and older, which would grow too stale if the full "
                    f"batch of step {self._next_step} shipped without them"
                )
        elif self._shipping is None:
            yield f"nothing: all {self._steps} steps are committed"
        if self._dropped:
            dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self._dropped.items()))
            yield f"groups dropped since the last batch: {dropped}; the last one: {self._last_drop}"

    def log_of(self, group_id: int) -> list[Event | Instruction]:
        """Returns the log's events and instructions about a group, the oldest first. Reads the whole log."""
        return [each for event, instructions in self.log for each in (event, *instructions) if _names(each, group_id)]

    def _shown_log(self, group_id: int) -> str:
        """Returns the end of a group's log, for an error's message."""
        entries = self.log_of(group_id)[-_SHOWN_ENTRIES:]
        return f"; the log of group {group_id}: {', '.join(map(repr, entries)) or 'empty'}"

    # --- checkpoint ---

    def state(self, *, ready: bool = True) -> dict[str, Any]:
        """Returns the state for a resume, for msgpack.

        With `ready`, save the rollouts of `ready_group_ids` with it; without, ready groups start again, too.
        """
        return {
            "format": STATE_FORMAT,
            "next_step": self._next_step,
            "next_group_id": self._next_group_id,
            "groups": [group.saved(ready) for group in self._groups],
            "mix": self._mix.state(),
        }

    def ready_group_ids(self) -> list[int]:
        """Returns the groups to save with `state()`, in the order in which they would ship."""
        return [group.group_id for group in self._groups.ready()]

    def restore(self, state: dict[str, Any]) -> None:
        """Restores `state` in a new scheduler. The first `PolicyUpdated` then starts the scheduling.

        Raises `ValueError`, changing nothing, for a state of another format or a damaged one.
        """
        check_format(state.get("format"), STATE_FORMAT)
        try:
            groups = GroupTable(self._schedule, [restored(entry) for entry in state["groups"]])
            next_step, next_group_id = int(state["next_step"]), int(state["next_group_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"scheduler state is damaged: {type(error).__name__}: {error}") from error
        self._mix.restore(state["mix"])
        self._groups, self._next_step, self._next_group_id = groups, next_step, next_group_id


def _names(each: Event | Instruction, group_id: int) -> bool:
    return getattr(each, "group_id", None) == group_id or group_id in getattr(each, "group_ids", ())
