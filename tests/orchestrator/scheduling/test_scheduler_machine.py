"""The scheduler's promises under any order of events, crashes and resumes included, by a random walk against a small model.

The machine plays dispatcher, servers and trainer. What it checks: capacity, lead, staleness and size of every batch, each group
shipped at most once, none lost, the next step always reachable, that a resumed scheduler is the one that was saved, and that
every event has the consequences it has by the rules as they are written most plainly (`straightforward_scheduler.py`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from counterpoint.orchestrator.scheduling.events import (
    AwaitStragglers,
    BatchCommitted,
    BoundRaised,
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
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.counting_mix import CountingMix
from tests.orchestrator.scheduling.straightforward_scheduler import StraightforwardScheduler

STEPS = 6


@dataclass
class Played:
    """A group as the dispatcher knows it."""

    started_version: int
    outstanding: set[str]
    versions: list[int] = field(default_factory=list)
    finalizing: bool = False
    kept: int = 0
    filtered: int = 0
    ready: bool = False


@dataclass
class World:
    """All that a checkpoint covers."""

    groups: dict[int, Played] = field(default_factory=dict)
    shipped: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    committed: int = 0


def without_detail(instruction: Instruction) -> Instruction:
    return replace(instruction, detail="") if isinstance(instruction, CancelGroup) else instruction


class SchedulerMachine(RuleBasedStateMachine):
    """Random events that the protocol admits."""

    @initialize(
        group_size=st.integers(1, 3),
        rollouts_per_step=st.integers(1, 7),
        lead=st.integers(1, 3),
        further=st.integers(0, 1),
        auto=st.booleans(),
        extra_capacity=st.integers(0, 9),
        on_filtered=st.sampled_from(["refill", "ship"]),
        stragglers=st.sampled_from(["wait", "drop"]),
        starts_an_event=st.sampled_from([1, 2, 64]),
    )
    def begin(
        self,
        group_size: int,
        rollouts_per_step: int,
        lead: int,
        further: int,
        auto: bool,
        extra_capacity: int,
        on_filtered: str,
        stragglers: str,
        starts_an_event: int,
    ) -> None:
        self.schedule = ScheduleConfig.model_validate(
            {
                "group_size": group_size,
                "rollouts_per_step": rollouts_per_step,
                "max_lead_steps": lead,
                **(
                    {"max_off_policy_steps": "auto", "off_policy_limit": lead + further}
                    if auto
                    else {"max_off_policy_steps": lead + further}
                ),
                "max_inflight_rollouts": group_size + extra_capacity,
                "on_filtered": on_filtered,
                "stragglers": stragglers,
            }
        )
        self.starts_an_event = starts_an_event
        self.make_schedulers()
        self.world = World()
        self.servers = self.schedule.most_in_flight
        self.version: int | None = None
        self.loading: int | None = None
        self.shipping: ShipBatch | None = None
        self.in_flight: dict[str, int] = {}
        self.restarting: set[int] = set()
        self.draining = False
        self.paused = False
        self.finished = False
        self.saved: dict[str, Any] = self.scheduler.state()
        self.checkpoint = (self.saved, copy.deepcopy(self.world))
        self.pending = self.checkpoint
        self.handle(PolicyUpdated(0))

    def make_schedulers(self) -> None:
        starts = self.starts_an_event
        self.mix, self.plain_mix = CountingMix(), CountingMix()
        self.scheduler = RolloutScheduler(self.schedule, STEPS, self.mix, starts_an_event=starts)
        self.plain = StraightforwardScheduler(self.schedule, STEPS, self.plain_mix, starts_an_event=starts)
        self.bound = self.scheduler.snapshot().staleness_bound
        self.more_to_start = False
        self.impatient: int | None = None
        """The step whose batch waits for stragglers, until its patience has ended or it ships."""

    # --- the dispatcher ---

    def handle(self, event: Event) -> None:
        if isinstance(event, PolicyUpdated):
            self.version, self.loading = event.version, None
        instructions = self.scheduler.handle(event)
        decisions = [without_detail(each) for each in instructions if not isinstance(each, BoundRaised)]
        assert decisions == self.plain.handle(event)
        assert (self.mix.observed, self.mix.in_vain) == (self.plain_mix.observed, self.plain_mix.in_vain)
        assert sum(isinstance(each, StartGroup) for each in instructions) <= self.starts_an_event
        for instruction in instructions:
            self.execute(instruction)

    def execute(self, instruction: Instruction) -> None:
        assert not self.finished
        match instruction:
            case StartGroup():
                self.start(instruction)
            case BoundRaised(steps):
                assert self.schedule.max_off_policy_steps == "auto"
                assert self.bound < steps <= self.schedule.staleness_limit
                self.bound = steps
            case MoreToStart():
                self.more_to_start = True
            case AwaitStragglers(step):
                assert self.schedule.stragglers == "wait"
                assert step == self.world.committed + 1
                assert self.impatient is None
                assert any(group.outstanding or group.finalizing for group in self.world.groups.values())
                self.impatient = step
            case CancelGroup(group_id):
                del self.world.groups[group_id]
                self.world.cancelled.add(group_id)
            case FinalizeGroup(group_id):
                group = self.world.groups[group_id]
                assert not group.outstanding
                assert not group.finalizing
                group.finalizing = True
            case ShipBatch():
                self.ship(instruction)
            case LastStepCommitted():
                assert self.world.committed == STEPS
                assert not self.world.groups
                self.finished = True

    def start(self, start: StartGroup) -> None:
        assert not self.draining
        assert not self.paused
        assert self.version is not None
        assert start.group_id not in self.world.shipped | self.world.cancelled | set(self.world.groups)
        assert (start.environment, start.example_index) == ("words", start.group_id)
        assert start.size == self.schedule.group_size
        assert start.group_id in self.restarting or "waiting" not in self.scheduler.snapshot().groups
        ids = {f"{start.group_id}-{index}" for index in range(start.size)}
        self.world.groups[start.group_id] = Played(self.version, ids)
        self.in_flight |= dict.fromkeys(ids, start.group_id)
        assert self.servers > 0
        assert len(self.in_flight) <= max(start.size, min(self.servers, self.schedule.most_in_flight))

    def ship(self, ship: ShipBatch) -> None:
        assert not self.draining
        assert self.shipping is None
        assert ship.step == self.world.committed + 1
        assert self.version is not None
        assert ship.step - self.version <= self.schedule.max_lead_steps
        groups = [self.world.groups.pop(group_id) for group_id in ship.group_ids]
        counts = [group.kept + (group.filtered if self.schedule.on_filtered == "ship" else 0) for group in groups]
        assert all(group.ready for group in groups)
        assert sum(counts) >= self.schedule.rollouts_per_step > sum(counts[:-1])
        assert any(group.kept for group in groups)
        assert [min(group.versions) for group in groups] == sorted(min(group.versions) for group in groups)
        assert ship.step - min(min(group.versions) for group in groups) <= self.bound
        assert not self.world.shipped & set(ship.group_ids)
        self.world.shipped |= set(ship.group_ids)
        self.shipping, self.impatient = ship, None
        self.pending = self.capture(ship.step, ready=False)

    def capture(self, committed: int, *, ready: bool) -> tuple[dict[str, Any], World]:
        world = copy.deepcopy(self.world)
        world.groups = {group_id: group for group_id, group in world.groups.items() if ready and group.ready}
        world.committed = committed
        return msgpack.unpackb(msgpack.packb(self.scheduler.state(ready=ready))), world

    # --- what may happen ---

    def end(self, rollout_id: str, completed: bool, age: int) -> None:
        group_id = self.in_flight.pop(rollout_id)
        group = self.world.groups.get(group_id)
        assert self.version is not None
        if group is None:
            self.handle(RolloutEnded(group_id, rollout_id, RolloutOutcome.CANCELLED, None))
            return
        version = max(group.started_version, self.version - age)
        group.outstanding.remove(rollout_id)
        if completed:
            group.versions.append(version)
        self.handle(
            RolloutEnded(
                group_id, rollout_id, RolloutOutcome.COMPLETED if completed else RolloutOutcome.FAILED, version
            )
        )

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), completed=st.integers(0, 5), age=st.integers(0, 3))
    def a_rollout_ends(self, data: st.DataObject, completed: int, age: int) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.in_flight))), completed > 0, age)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_group_is_played_and_finalized(self, data: st.DataObject) -> None:
        group_id = self.in_flight[data.draw(st.sampled_from(sorted(self.in_flight)))]
        for rollout_id in sorted(rollout_id for rollout_id, owner in self.in_flight.items() if owner == group_id):
            self.end(rollout_id, True, 0)
        if group_id in self.finalizing():
            self.finalize_keeping_all(group_id)

    def finalizing(self) -> list[int]:
        return sorted(group_id for group_id, group in self.world.groups.items() if group.finalizing)

    def finalize(self, group_id: int, kept: int, filtered: int, *, dropped: bool) -> None:
        group = self.world.groups[group_id]
        group.finalizing, group.ready = False, not dropped
        group.kept, group.filtered = kept, filtered
        rewards = (0.5,) * (kept + filtered)
        self.handle(GroupFinalized(group_id, kept, filtered, DropReason.FAILED if dropped else None, rewards=rewards))

    def finalize_keeping_all(self, group_id: int) -> None:
        versions = self.world.groups[group_id].versions
        self.finalize(group_id, len(versions), 0, dropped=not versions)

    @precondition(lambda self: self.finalizing())
    @rule(data=st.data(), dropped=st.booleans())
    def a_group_is_finalized(self, data: st.DataObject, dropped: bool) -> None:
        group_id = data.draw(st.sampled_from(self.finalizing()))
        completed = len(self.world.groups[group_id].versions)
        if dropped or not completed:
            self.finalize(group_id, 0, 0, dropped=True)
        else:
            kept = data.draw(st.integers(0, completed))
            self.finalize(group_id, kept, completed - kept, dropped=False)

    @precondition(lambda self: self.shipping is not None)
    @rule()
    def the_batch_is_committed(self) -> None:
        assert self.shipping is not None
        self.world.committed = self.shipping.step
        self.checkpoint = self.pending
        self.shipping = None
        self.handle(BatchCommitted(self.world.committed))

    @precondition(lambda self: self.impatient is not None)
    @rule()
    def a_batch_has_waited_long_enough(self) -> None:
        assert self.impatient is not None
        step, self.impatient = self.impatient, None
        self.handle(PatienceEnded(step))

    @precondition(lambda self: self.more_to_start)
    @rule()
    def the_groups_have_begun(self) -> None:
        self.more_to_start = False
        self.handle(GroupsBegun())

    def trainable(self) -> bool:
        return self.version is not None and self.version < min(self.world.committed, STEPS - 1)

    @precondition(lambda self: self.trainable() and self.loading is None)
    @rule()
    def new_weights_are_about_to_load(self) -> None:
        assert self.version is not None
        self.loading = self.version + 1
        self.handle(PolicyUpdateStarting(self.loading))
        limit = self.schedule.staleness_limit
        for group in self.world.groups.values():
            if group.outstanding or group.ready:
                oldest = min(group.versions) if group.ready else group.started_version
                assert self.loading + 1 - oldest <= limit

    @precondition(lambda self: self.loading is not None)
    @rule()
    def new_weights_are_loaded(self) -> None:
        assert self.loading is not None
        self.handle(PolicyUpdated(self.loading))

    @rule(events=st.integers(1, 40), stragglers=st.booleans(), eager_trainer=st.booleans())
    def time_passes(self, events: int, stragglers: bool, eager_trainer: bool) -> None:
        """What usually happens; with `stragglers` the groups started first take longest, and so grow stale."""
        for _ in range(events):
            if self.finished or not self.go_on(stragglers, eager_trainer):
                break

    @rule(rollouts=st.integers(0, 12))
    def servers_come_or_go(self, rollouts: int) -> None:
        self.servers = rollouts
        self.handle(CapacityChanged(rollouts))

    @rule(extra=st.integers(0, 9))
    def the_limit_is_changed(self, extra: int) -> None:
        limit = self.schedule.group_size + extra
        self.schedule = self.schedule.model_copy(update={"max_inflight_rollouts": limit})
        self.handle(LimitChanged(limit))

    @rule(pause=st.booleans())
    def somebody_pauses_or_resumes_the_run(self, pause: bool) -> None:
        before = dict(self.in_flight)
        self.paused = pause
        self.handle(PauseRequested() if pause else ResumeRequested())
        assert before.items() <= self.in_flight.items(), "nothing in flight is lost"

    @rule(data=st.data(), really=st.integers(0, 3))
    def the_orchestrator_is_killed_and_resumed(self, data: st.DataObject, really: int) -> None:
        if really:
            return
        state, world = self.checkpoint
        self.resume(state, world, data.draw(st.integers(0, min(world.committed, STEPS - 1))))

    @precondition(lambda self: self.shipping is None and not self.finished)
    @rule(really=st.integers(0, 1))
    def the_orchestrator_drains_and_is_resumed(self, really: int) -> None:
        if really:
            return
        self.draining = True
        self.handle(DrainRequested())
        for rollout_id in sorted(self.in_flight):
            group_id = self.in_flight.pop(rollout_id)
            self.handle(RolloutEnded(group_id, rollout_id, RolloutOutcome.CANCELLED, None))
        for group_id in self.finalizing():
            self.finalize_keeping_all(group_id)
        assert self.version is not None
        self.resume(*self.capture(self.world.committed, ready=True), self.version)

    def resume(self, state: dict[str, Any], world: World, version: int) -> None:
        self.make_schedulers()
        self.scheduler.restore(state)
        self.plain.restore(state)
        assert self.scheduler.state() == state
        assert set(self.scheduler.ready_group_ids()) == set(world.groups)
        self.checkpoint = (state, copy.deepcopy(world))
        self.world = copy.deepcopy(world)
        self.in_flight, self.shipping, self.finished, self.draining = {}, None, False, False
        self.servers = self.schedule.most_in_flight
        self.restarting = {entry["group_id"] for entry in state["groups"] if "ready" not in entry}
        if self.paused:  # as the daemon does, which reads it from a file
            self.handle(PauseRequested())
        self.handle(PolicyUpdated(version))

    # --- what holds ---

    @invariant()
    def no_group_is_lost(self) -> None:
        saved = {entry["group_id"] for entry in self.scheduler.state()["groups"]}
        assert set(self.world.groups) <= saved
        ready = {group_id for group_id, group in self.world.groups.items() if group.ready}
        assert set(self.scheduler.ready_group_ids()) == ready
        phases = self.scheduler.snapshot().groups
        assert Counter(phases)["running"] == sum(bool(group.outstanding) for group in self.world.groups.values())
        assert len(saved) == sum(phases.values())

    @invariant()
    def the_rewards_of_each_group_that_left_are_seen_once(self) -> None:
        """Whatever kills and resumes there were."""
        seen = [index for index, _ in self.mix.observed]
        assert len(seen) == len(set(seen))
        assert self.world.shipped <= set(seen)
        assert not set(seen) & set(self.world.groups)

    @invariant()
    def what_is_in_flight_is_known(self) -> None:
        assert self.scheduler.snapshot().in_flight_rollouts == len(self.in_flight)

    @invariant()
    def something_can_always_happen(self) -> None:
        under_way = self.in_flight or self.more_to_start or self.finalizing() or self.shipping or self.trainable()
        assert under_way or self.finished or self.servers == 0 or self.paused, self.scheduler.snapshot()
        assert not self.scheduler.rests or (self.paused and not (self.in_flight or self.finalizing() or self.shipping))
        assert not self.paused or self.scheduler.rests or under_way or self.finished
        assert self.scheduler.snapshot().waiting_for

    def teardown(self) -> None:
        """From wherever the walk ended, the run can be finished."""
        if not hasattr(self, "scheduler"):
            return
        self.servers_come_or_go(self.schedule.most_in_flight)
        self.somebody_pauses_or_resumes_the_run(False)
        for _ in range(1000):
            if self.finished:
                break
            assert self.go_on(stragglers=False, eager_trainer=False), self.scheduler.snapshot()
        assert self.finished, self.scheduler.snapshot()
        assert self.world.committed == STEPS

    def go_on(self, stragglers: bool, eager_trainer: bool) -> bool:
        """Does one of the things that may happen next; False when there is none."""
        rollouts = sorted(self.in_flight, key=self.in_flight.__getitem__, reverse=stragglers)
        training: list[tuple[object, Callable[[], None]]] = [
            (self.loading is not None, self.new_weights_are_loaded),
            (self.trainable() and self.loading is None, self.new_weights_are_about_to_load),
        ]
        playing: list[tuple[object, Callable[[], None]]] = [
            (self.more_to_start, self.the_groups_have_begun),
            (self.shipping, self.the_batch_is_committed),
            (self.finalizing(), lambda: self.finalize_keeping_all(self.finalizing()[0])),
            (rollouts, lambda: self.end(rollouts[0], True, 0)),
        ]
        ways = training + playing if eager_trainer else playing + training
        act = next((act for possible, act in ways if possible), None)
        if act is not None:
            act()
        return act is not None


@pytest.mark.slow
def test_the_scheduler_keeps_its_promises_whatever_happens() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=150, stateful_step_count=60))
