"""The scheduler's rules in the plainest way, each with a look at every group: what `orchestrator/scheduling/scheduler.py`
must decide.

It believes its events, and has no words for what it waits for. Groups are those of the scheduler, its table is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from counterpoint.orchestrator.scheduling.events import (
    AwaitStragglers,
    BatchCommitted,
    CancelGroup,
    CapacityChanged,
    DrainRequested,
    Event,
    FinalizeGroup,
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
    StartGroup,
)
from counterpoint.orchestrator.scheduling.example_source import ExampleSource
from counterpoint.orchestrator.scheduling.group import Group, restored
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome
from counterpoint.run.config import ScheduleConfig


class StraightforwardScheduler:
    """Gives the instructions that `RolloutScheduler` must give, without their details."""

    def __init__(self, schedule: ScheduleConfig, steps: int, mix: ExampleSource, *, starts_an_event: int) -> None:
        self.schedule, self.steps, self.mix, self.starts_an_event = schedule, steps, mix, starts_an_event
        self.servers = schedule.most_in_flight
        self.version: int | None = None
        self.next_step, self.next_group_id = 1, 0
        self.groups: dict[int, Group] = {}
        self.in_flight = 0
        self.waiting_step = self.impatient_step = 0
        self.shipping = self.draining = self.finished = self.paused = False

    def restore(self, state: dict[str, Any]) -> None:
        self.mix.restore(state["mix"])
        self.groups = {entry["group_id"]: restored(entry) for entry in state["groups"]}
        self.next_step, self.next_group_id = state["next_step"], state["next_group_id"]

    def handle(self, event: Event) -> list[Instruction]:
        instructions = list(self.apply(event))
        for rule in (self.drop_stale, self.ship, self.drop_stale, self.start, self.finish):
            instructions.extend(rule())
        return instructions

    def apply(self, event: Event) -> Iterator[Instruction]:
        match event:
            case RolloutEnded():
                yield from self.rollout_ended(event)
            case GroupFinalized():
                group = self.groups.get(event.group_id)
                if group is not None:
                    group.kept, group.filtered, group.phase = event.kept, event.filtered, "ready"
                    group.rewards = event.rewards
                    if event.dropped is not None or not self.counts(group):
                        self.observe(group)
                        yield self.drop(group, event.dropped or DropReason.FILTERED)
            case PolicyUpdated(version):
                self.version = version
            case BatchCommitted():
                self.shipping = False
            case CapacityChanged(rollouts):
                self.servers = rollouts
            case PatienceEnded(step):
                self.impatient_step = step
            case DrainRequested():
                self.draining = True
            case PauseRequested() | ResumeRequested():
                self.paused = isinstance(event, PauseRequested)
            case LimitChanged(rollouts):
                self.schedule = self.schedule.model_copy(update={"max_inflight_rollouts": rollouts})
            case PolicyUpdateStarting() | GroupsBegun():
                pass

    def rollout_ended(self, event: RolloutEnded) -> Iterator[Instruction]:
        self.in_flight -= 1
        group = self.groups.get(event.group_id)
        if group is None:
            return
        group.outstanding -= 1
        if event.outcome is RolloutOutcome.COMPLETED:
            group.completed += 1
            versions = [group.oldest_version, event.oldest_policy_version]
            group.oldest_version = min((version for version in versions if version is not None), default=None)
        elif event.outcome is RolloutOutcome.CANCELLED and self.draining:
            group.interrupted = True
        else:
            group.failed += 1
        if not group.outstanding:
            group.phase = "waiting" if group.interrupted else "finalizing"
            if not group.interrupted:
                yield FinalizeGroup(group.group_id)

    def drop_stale(self) -> Iterator[Instruction]:
        for group in list(self.groups.values()):
            stale = self.next_step - group.version > self.schedule.staleness_limit
            if group.phase in ("running", "ready") and stale:
                self.observe(group)
                self.mix.drawn_in_vain(group.environment)
                yield self.drop(group, DropReason.STALE)

    def ship(self) -> Iterator[Instruction]:
        if self.draining or self.shipping or self.next_step > self.steps or self.version is None:
            return
        if self.next_step - self.version > self.schedule.max_lead_steps:
            return
        chosen: list[Group] = []
        if self.must_wait():
            if self.waiting_step != self.next_step:
                self.waiting_step = self.next_step
                yield AwaitStragglers(self.next_step)
            return
        ready = [group for group in self.groups.values() if group.phase == "ready"]
        for group in sorted(ready, key=lambda each: (each.version, each.group_id)):
            chosen.append(group)
            if sum(map(self.counts, chosen)) < self.schedule.rollouts_per_step:
                continue
            if any(each.kept for each in chosen):
                for each in chosen:
                    self.observe(each)
                    del self.groups[each.group_id]
                yield ShipBatch(self.next_step, tuple(each.group_id for each in chosen))
                self.shipping = True
                self.next_step += 1
                return
            for each in chosen:
                self.observe(each)
                yield self.drop(each, DropReason.FILTERED)
            yield from self.ship()
            return

    def must_wait(self) -> bool:
        """Whether a full batch leaves a straggler."""
        size, limit = self.schedule.rollouts_per_step, self.schedule.staleness_limit
        ready = [group for group in self.groups.values() if group.phase == "ready"]
        if sum(map(self.counts, ready)) < size or self.schedule.stragglers == "drop":
            return False
        for last in range(self.next_step, self.next_step + limit + 1):
            urgent = [
                group
                for group in self.groups.values()
                if group.phase != "waiting" and self.next_step <= group.version + limit <= last
            ]
            under_way = sum(self.gives(group) for group in urgent if group.phase != "ready")
            left = under_way + max(0, sum(self.gives(group) for group in urgent if group.phase == "ready") - size)
            if under_way and left > (last - self.next_step) * size:
                return self.impatient_step != self.next_step
        return False

    def start(self) -> Iterator[Instruction]:
        started = 0
        while self.version is not None and not self.draining and not self.paused:
            step = self.next_step + self.expected() // self.schedule.rollouts_per_step
            if step > self.steps or step - self.version > self.schedule.max_lead_steps:
                return
            if self.in_flight + self.schedule.group_size > self.capacity():
                return
            if started == self.starts_an_event:
                yield MoreToStart()
                return
            started += 1
            group = next((each for each in self.groups.values() if each.phase == "waiting"), None) or self.new_group()
            group.phase, group.started_version = "running", self.version
            group.outstanding = self.schedule.group_size
            self.in_flight += group.outstanding
            yield StartGroup(group.group_id, group.environment, group.example_index, group.outstanding)

    def new_group(self) -> Group:
        group = self.groups[self.next_group_id] = Group(self.next_group_id, *self.mix.next())
        self.next_group_id += 1
        return group

    def finish(self) -> Iterator[Instruction]:
        if self.finished or self.shipping or self.next_step <= self.steps:
            return
        self.finished = True
        for group in list(self.groups.values()):
            cancelled = self.drop(group, DropReason.RUN_DONE)
            if group.phase != "waiting":
                yield cancelled
        yield LastStepCommitted()

    def observe(self, group: Group) -> None:
        if group.rewards:
            self.mix.observe(group.environment, group.example_index, group.rewards)

    def drop(self, group: Group, reason: DropReason) -> CancelGroup:
        del self.groups[group.group_id]
        return CancelGroup(group.group_id, reason, "")

    def capacity(self) -> int:
        limit = min(self.schedule.most_in_flight, self.servers)
        return max(self.schedule.group_size, limit) if self.servers else 0

    def counts(self, group: Group) -> int:
        return group.kept + (group.filtered if self.schedule.on_filtered == "ship" else 0)

    def expected(self) -> int:
        return sum(self.gives(group) for group in self.groups.values())

    def gives(self, group: Group) -> int:
        if group.phase == "waiting":
            return 0
        return self.counts(group) if group.phase == "ready" else self.schedule.group_size - group.failed
