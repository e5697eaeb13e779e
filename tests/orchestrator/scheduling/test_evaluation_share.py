"""Evaluations beside training in the scheduler: within their share, at the end, and never in each other's way for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CancelEvaluation,
    CapacityChanged,
    DrainRequested,
    EndEvaluation,
    EvaluationRequested,
    EvaluationRolloutEnded,
    Event,
    FinalizeGroup,
    GroupFinalized,
    GroupsBegun,
    LastStepCommitted,
    MoreToStart,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartEvaluationRollouts,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.counting_mix import CountingMix

STEPS = 4


class Fleet:
    """Plays dispatcher, trainer and evaluations against a scheduler; `choose` picks which rollout ends next."""

    def __init__(self, schedule: ScheduleConfig, *, starts_an_event: int = 64, instant_training: bool = True) -> None:
        self.schedule = schedule
        self.scheduler = RolloutScheduler(schedule, STEPS, CountingMix(), starts_an_event=starts_an_event)
        self.training: list[str] = []
        self.evaluating: list[tuple[int, int]] = []
        self.events: list[Event] = []
        self.instant_training = instant_training
        self.groups_started = self.evaluations_ended = 0
        self.finished = False
        self.capacity = schedule.most_in_flight
        self.share = 0.0

    def handle(self, event: Event) -> None:
        self.events.append(event)
        while self.events:
            had_work = not self.all_started
            instructions = self.scheduler.handle(self.events.pop(0))
            for each in instructions:
                self.execute(each)
            assert len(self.training) + len(self.evaluating) <= max(self.capacity, self.schedule.group_size)
            if (
                any(isinstance(each, StartEvaluationRollouts) for each in instructions)
                and had_work
                and not self.all_started
            ):
                assert len(self.evaluating) <= self.allowed

    @property
    def all_started(self) -> bool:
        return any("up to the last step" in each or "nothing" in each for each in self.scheduler.snapshot().waiting_for)

    @property
    def allowed(self) -> int:
        return max(1, int(self.share * self.scheduler.capacity))

    def execute(self, instruction: object) -> None:
        match instruction:
            case StartGroup(group_id, _, _, size):
                self.groups_started += 1
                self.training += [f"{group_id}-{index}" for index in range(size)]
            case MoreToStart():
                self.events.append(GroupsBegun())
            case FinalizeGroup(group_id):
                self.events.append(GroupFinalized(group_id, self.schedule.group_size, 0))
            case ShipBatch(step):
                self.events.append(BatchCommitted(step))
                if self.instant_training:
                    self.events.append(PolicyUpdated(step))
            case StartEvaluationRollouts(number, first, count):
                self.evaluating += [(number, index) for index in range(first, first + count)]
            case EndEvaluation():
                self.evaluations_ended += 1
            case LastStepCommitted():
                self.finished = True

    def request(self, rollouts: int, share: float) -> None:
        self.share = share
        self.handle(EvaluationRequested(self.evaluations_ended + 1, rollouts, share))

    def end_one_of_training(self, position: int = 0) -> None:
        rollout_id = self.training.pop(position % len(self.training))
        version = self.scheduler.snapshot().policy_version
        group_id = int(rollout_id.partition("-")[0])
        self.handle(RolloutEnded(group_id, rollout_id, RolloutOutcome.COMPLETED, version))

    def end_one_of_evaluation(self, position: int = 0) -> None:
        self.handle(EvaluationRolloutEnded(*self.evaluating.pop(position % len(self.evaluating))))


def schedule_of(group_size: int, in_flight: int, rollouts_per_step: int = 8) -> ScheduleConfig:
    return ScheduleConfig(
        group_size=group_size,
        rollouts_per_step=rollouts_per_step,
        max_inflight_rollouts=in_flight,
        max_lead_steps=STEPS,
        max_off_policy_steps=STEPS,
    )


def test_an_evaluation_takes_its_share_as_places_become_free_and_training_the_rest() -> None:
    fleet = Fleet(schedule_of(2, 20, 200))
    fleet.handle(PolicyUpdated(0))
    assert len(fleet.training) == 20
    fleet.request(1000, 0.25)
    assert not fleet.evaluating, "every place is taken"
    for _ in range(40):
        fleet.end_one_of_training()
    assert len(fleet.evaluating) == 5
    assert len(fleet.training) in (14, 15)  # 15, in groups of two
    for _ in range(40):
        fleet.end_one_of_evaluation()
        assert len(fleet.evaluating) == 5


def test_training_gets_the_places_back_that_an_evaluation_no_longer_needs() -> None:
    fleet = Fleet(schedule_of(1, 8, 200))
    fleet.request(3, 0.5)
    fleet.handle(PolicyUpdated(0))
    assert (len(fleet.training), len(fleet.evaluating)) == (5, 3)
    fleet.end_one_of_evaluation()
    assert (len(fleet.training), len(fleet.evaluating)) == (6, 2)


def test_once_training_has_started_all_it_needs_the_evaluation_takes_what_is_free() -> None:
    fleet = Fleet(schedule_of(2, 16, 4), instant_training=False)
    fleet.handle(PolicyUpdated(0))
    fleet.request(100, 0.1)
    while not fleet.all_started:
        fleet.end_one_of_training()
    assert len(fleet.training) + len(fleet.evaluating) == 16


def test_a_drain_cancels_the_evaluation_first_and_no_checkpoint_has_it() -> None:
    fleet = Fleet(schedule_of(2, 16))
    before = fleet.scheduler.state()
    fleet.request(10, 0.5)
    assert fleet.scheduler.state() == before
    fleet.handle(PolicyUpdated(0))
    assert fleet.evaluating
    assert fleet.scheduler.handle(DrainRequested())[0] == CancelEvaluation(1)
    assert fleet.scheduler.handle(EvaluationRolloutEnded(*fleet.evaluating.pop())) == []


def test_one_evaluation_at_a_time() -> None:
    fleet = Fleet(schedule_of(2, 16))
    fleet.request(10, 0.5)
    with pytest.raises(ValueError, match="in progress"):
        fleet.request(10, 0.5)
    with pytest.raises(ValueError, match="not in flight"):
        fleet.handle(EvaluationRolloutEnded(1, 77))


def test_a_lost_server_only_delays_an_evaluation() -> None:
    fleet = Fleet(schedule_of(2, 16))
    fleet.handle(CapacityChanged(0))
    fleet.request(4, 0.5)
    fleet.handle(PolicyUpdated(0))
    assert not fleet.evaluating
    fleet.handle(CapacityChanged(16))
    assert len(fleet.evaluating) == 4


@pytest.mark.slow
@settings(max_examples=150)
@given(
    data=st.data(),
    group_size=st.integers(1, 5),
    extra=st.integers(0, 12),
    share=st.floats(0.01, 1.0),
    rollouts=st.integers(1, 40),
    starts_an_event=st.sampled_from([1, 3, 64]),
)
def test_both_get_to_their_end_in_any_order_of_events(
    data: st.DataObject, group_size: int, extra: int, share: float, rollouts: int, starts_an_event: int
) -> None:
    """Within the share while training has work (`Fleet.handle`), and neither waits for more than the other's next rollouts."""
    fleet = Fleet(schedule_of(group_size, group_size + extra), starts_an_event=starts_an_event)
    fleet.handle(PolicyUpdated(0))
    fleet.request(rollouts, share)
    pattern = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=30))
    for turn in range(2000):
        choice = pattern[turn % len(pattern)]
        if fleet.finished and fleet.evaluations_ended:
            break
        if fleet.evaluating and (choice % 2 or not fleet.training):
            fleet.end_one_of_evaluation(choice)
        elif fleet.training:
            fleet.end_one_of_training(choice)
        assert fleet.training or fleet.evaluating or (fleet.finished and fleet.evaluations_ended)
    assert fleet.finished
    assert fleet.evaluations_ended == 1


@pytest.mark.slow
@settings(max_examples=60)
@given(group_size=st.integers(1, 6), extra=st.integers(0, 10), share=st.floats(0.01, 1.0))
def test_training_never_starves_under_an_endless_evaluation(group_size: int, extra: int, share: float) -> None:
    """However long the evaluation, each of its rollouts ends once while the groups' end: training gets to its last step."""
    fleet = Fleet(schedule_of(group_size, group_size + extra))
    fleet.handle(PolicyUpdated(0))
    fleet.request(10**6, share)
    for _ in range(1000):
        if fleet.finished:
            break
        for _ in range(len(fleet.training)):
            if fleet.training:
                fleet.end_one_of_training()
        for _ in range(len(fleet.evaluating)):
            fleet.end_one_of_evaluation()
    assert fleet.finished
    assert fleet.evaluating
