"""The scheduler's rules, one by one. `test_scheduler_machine.py` checks that they hold together."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CancelGroup,
    CapacityChanged,
    DrainRequested,
    FinalizeGroup,
    GiveUp,
    GroupFinalized,
    Instruction,
    LastStepCommitted,
    PolicyUpdated,
    PolicyUpdateStarting,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.giving_up import GROUPS, Failure, Lasting
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import LOG_LENGTH, RolloutScheduler
from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.counting_mix import CountingMix


def make_scheduler(steps: int = 10, **schedule: Any) -> RolloutScheduler:
    """Groups of 2, batches of 4, up to 8 in flight, unless said otherwise."""
    values = {"group_size": 2, "rollouts_per_step": 4, "max_inflight_rollouts": 8, **schedule}
    return RolloutScheduler(ScheduleConfig.model_validate(values), steps, CountingMix())


def started(instructions: list[Instruction]) -> list[int]:
    return [instruction.group_id for instruction in instructions if isinstance(instruction, StartGroup)]


def end(
    scheduler: RolloutScheduler, group_id: int, outcomes: str = "cc", version: int | None = 0, first: int = 0
) -> list[Instruction]:
    """Ends a group's rollouts: `c`ompleted, `f`ailed or cancelled (`x`)."""
    outcome_of = {"c": RolloutOutcome.COMPLETED, "f": RolloutOutcome.FAILED, "x": RolloutOutcome.CANCELLED}
    instructions = []
    for index, outcome in enumerate(outcomes, start=first):
        event = RolloutEnded(group_id, f"{group_id}-{index}", outcome_of[outcome], version)
        instructions += scheduler.handle(event)
    return instructions


def play(
    scheduler: RolloutScheduler, group_id: int, kept: int = 2, filtered: int = 0, version: int = 0
) -> list[Instruction]:
    """Completes and finalizes a group."""
    instructions = end(scheduler, group_id, version=version)
    return instructions + scheduler.handle(GroupFinalized(group_id, kept, filtered))


def waiting_for(scheduler: RolloutScheduler) -> str:
    return "\n".join(scheduler.snapshot().waiting_for)


def test_nothing_starts_before_weights_are_loaded() -> None:
    scheduler = make_scheduler()
    assert scheduler.handle(CapacityChanged(8)) == []
    assert "waiting for the first policy version" in waiting_for(scheduler)


def test_the_first_version_fills_the_capacity_with_groups_of_the_mix() -> None:
    instructions = make_scheduler().handle(PolicyUpdated(0))
    assert instructions == [StartGroup(index, "words", index, 2) for index in range(4)]


def test_a_full_capacity_is_named_and_a_whole_group_must_fit() -> None:
    scheduler = make_scheduler(max_inflight_rollouts=5, max_lead_steps=2)
    assert started(scheduler.handle(PolicyUpdated(0))) == [0, 1]
    assert "capacity full: 4 of 5 rollouts in flight, a group needs 2" in waiting_for(scheduler)
    assert started(end(scheduler, 0, "c")) == [2]


def test_a_capacity_of_none_is_named_for_what_it_is() -> None:
    scheduler = make_scheduler()
    scheduler.handle(CapacityChanged(0))
    scheduler.handle(PolicyUpdated(0))
    assert "no inference server is in service" in waiting_for(scheduler)


def test_fewer_servers_start_fewer_groups_but_never_none() -> None:
    scheduler = make_scheduler()
    scheduler.handle(CapacityChanged(1))
    assert started(scheduler.handle(PolicyUpdated(0))) == [0]
    assert scheduler.handle(CapacityChanged(0)) == []
    assert end(scheduler, 0) == [FinalizeGroup(0)]
    assert started(scheduler.handle(CapacityChanged(100))) == [1, 2, 3]


@pytest.mark.parametrize(("group_size", "lead"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_an_automatic_limit_is_that_of_the_lead_and_of_the_servers(group_size: int, lead: int) -> None:
    values = {"group_size": group_size, "max_lead_steps": lead, "rollouts_per_step": 5}
    free, automatic = (make_scheduler(max_inflight_rollouts=limit, **values) for limit in (1000, "auto"))
    for scheduler in (free, automatic):
        scheduler.handle(CapacityChanged(1000))
    assert automatic.handle(PolicyUpdated(0)) == free.handle(PolicyUpdated(0))
    assert end(automatic, 0, "f") == end(free, 0, "f")
    automatic.handle(CapacityChanged(4))
    assert automatic.capacity == 4


def test_lead_bounds_how_far_generation_runs_ahead() -> None:
    scheduler = make_scheduler(max_lead_steps=1)
    assert started(scheduler.handle(PolicyUpdated(0))) == [0, 1]
    assert "waiting for policy version 1: step 2 is 2 ahead of version 0, max_lead_steps is 1" in waiting_for(scheduler)
    play(scheduler, 0)
    assert play(scheduler, 1)[-1] == ShipBatch(1, (0, 1))
    assert scheduler.handle(BatchCommitted(1)) == []
    assert started(scheduler.handle(PolicyUpdated(1))) == [2, 3]


def test_a_failed_rollout_is_made_up_for_before_its_group_ends() -> None:
    scheduler = make_scheduler(max_lead_steps=1)
    scheduler.handle(PolicyUpdated(0))
    assert started(end(scheduler, 0, "f")) == [2]


def test_survivors_of_a_partly_failed_group_train() -> None:
    scheduler = make_scheduler(max_lead_steps=1, rollouts_per_step=3)
    scheduler.handle(PolicyUpdated(0))
    assert end(scheduler, 0, "fc")[-1] == FinalizeGroup(0)
    scheduler.handle(GroupFinalized(0, kept=1, filtered=0))
    assert ShipBatch(1, (0, 1)) in play(scheduler, 1)


def test_a_group_without_a_survivor_is_replaced() -> None:
    scheduler = make_scheduler(max_lead_steps=1)
    scheduler.handle(PolicyUpdated(0))
    assert started(end(scheduler, 0, "ff")) == [2]
    finalized = GroupFinalized(0, 0, 0, DropReason.FAILED, "no survivor")
    assert scheduler.handle(finalized) == [CancelGroup(0, DropReason.FAILED, "no survivor")]
    assert "groups dropped since the last batch: 1 failed; the last one: group 0, no survivor" in waiting_for(scheduler)


def test_refill_replaces_what_the_filters_removed() -> None:
    scheduler = make_scheduler(max_lead_steps=1)
    scheduler.handle(PolicyUpdated(0))
    instructions = play(scheduler, 0, kept=0, filtered=2)
    assert CancelGroup(0, DropReason.FILTERED, "all 2 completed rollouts were filtered") in instructions
    assert started(instructions) == [2]
    play(scheduler, 1)
    assert started(play(scheduler, 2, kept=1, filtered=1)) == [3]
    assert play(scheduler, 3)[-1] == ShipBatch(1, (1, 2, 3))


def test_ship_counts_what_the_filters_removed() -> None:
    scheduler = make_scheduler(max_lead_steps=1, on_filtered="ship")
    scheduler.handle(PolicyUpdated(0))
    play(scheduler, 0, kept=0, filtered=2)
    assert play(scheduler, 1, kept=1, filtered=1)[-1] == ShipBatch(1, (0, 1))


def test_a_batch_of_which_nothing_is_left_is_dropped_instead_of_shipped_empty() -> None:
    scheduler = make_scheduler(max_lead_steps=1, on_filtered="ship")
    scheduler.handle(PolicyUpdated(0))
    play(scheduler, 0, kept=0, filtered=2)
    instructions = play(scheduler, 1, kept=0, filtered=2)
    assert [type(instruction) for instruction in instructions[-4:]] == [
        CancelGroup,
        CancelGroup,
        StartGroup,
        StartGroup,
    ]


def test_the_oldest_ready_groups_ship_first() -> None:
    scheduler = make_scheduler(max_lead_steps=3, max_inflight_rollouts=12, rollouts_per_step=2, steps=3)
    scheduler.handle(PolicyUpdated(3))
    assert ShipBatch(1, (0,)) in play(scheduler, 0, version=3)
    for group_id, version in ((1, 5), (2, 4)):
        play(scheduler, group_id, version=version)
    assert scheduler.ready_group_ids() == [2, 1]
    assert ShipBatch(2, (2,)) in scheduler.handle(BatchCommitted(1))


def test_groups_too_stale_for_the_next_step_go_before_newer_weights_load() -> None:
    scheduler = make_scheduler(
        max_lead_steps=2, max_off_policy_steps=2, rollouts_per_step=2, max_inflight_rollouts=4, stragglers="drop"
    )
    assert started(scheduler.handle(PolicyUpdated(0))) == [0, 1]
    play(scheduler, 1)
    scheduler.handle(BatchCommitted(1))
    scheduler.handle(PolicyUpdated(1))
    instructions = play(scheduler, 2, version=1)
    cancelled = [instruction for instruction in instructions if isinstance(instruction, CancelGroup)]
    assert [cancel.group_id for cancel in cancelled] == [0]
    assert "generated by policy version 0, it would be 3 steps old in the batch of step 3" in cancelled[0].detail
    scheduler.handle(BatchCommitted(2))
    assert scheduler.handle(PolicyUpdateStarting(2)) == []


def test_cancelled_rollouts_occupy_capacity_until_they_ended() -> None:
    scheduler = make_scheduler(
        max_lead_steps=1, max_off_policy_steps=1, rollouts_per_step=2, max_inflight_rollouts=4, stragglers="drop"
    )
    assert started(scheduler.handle(PolicyUpdated(0))) == [0]
    assert started(end(scheduler, 0, "f")) == [1]
    instructions = play(scheduler, 1)
    assert [type(instruction) for instruction in instructions] == [FinalizeGroup, ShipBatch, CancelGroup]
    assert scheduler.snapshot().in_flight_rollouts == 1
    assert end(scheduler, 0, "x", first=1) == []
    assert scheduler.snapshot().in_flight_rollouts == 0


def test_one_batch_is_under_way_at_a_time() -> None:
    scheduler = make_scheduler(rollouts_per_step=2, max_lead_steps=2, max_inflight_rollouts=4)
    scheduler.handle(PolicyUpdated(0))
    assert ShipBatch(1, (0,)) in play(scheduler, 0)
    assert not any(isinstance(instruction, ShipBatch) for instruction in play(scheduler, 1))
    assert "the batch of step 1 to be committed" in waiting_for(scheduler)
    assert ShipBatch(2, (1,)) in scheduler.handle(BatchCommitted(1))


def test_the_last_commit_finishes_and_clears_up() -> None:
    scheduler = make_scheduler(steps=1, rollouts_per_step=3)
    assert started(scheduler.handle(PolicyUpdated(0))) == [0, 1]
    assert started(end(scheduler, 0, "f")) == []
    end(scheduler, 0, "c", first=1)
    assert started(scheduler.handle(GroupFinalized(0, 1, 0))) == []
    assert ShipBatch(1, (0, 1)) in play(scheduler, 1)
    assert scheduler.handle(BatchCommitted(1)) == [LastStepCommitted()]
    assert scheduler.handle(PolicyUpdated(1)) == []
    assert scheduler.snapshot().waiting_for == ("nothing: the run is done",)
    resumed = make_scheduler(steps=1, rollouts_per_step=3)
    resumed.restore(scheduler.state())
    assert resumed.snapshot().waiting_for == ("nothing: all 1 steps are committed",)


def test_a_resumed_run_goes_on_with_the_same_groups() -> None:
    original = make_scheduler()
    original.handle(PolicyUpdated(0))
    play(original, 2, kept=1, filtered=1)
    end(original, 1, "c")
    state = msgpack.unpackb(msgpack.packb(original.state()))
    resumed = make_scheduler()
    resumed.restore(state)
    assert resumed.state() == state == original.state()
    assert resumed.ready_group_ids() == [2]
    instructions = resumed.handle(PolicyUpdated(0))
    assert instructions == [StartGroup(index, "words", index, 2) for index in (0, 1, 3)] + [
        StartGroup(4, "words", 4, 2)
    ]


def test_what_is_awaited() -> None:
    scheduler = make_scheduler(rollouts_per_step=2, max_lead_steps=1, max_off_policy_steps=1)
    assert scheduler.awaited() == "wait_inference", "no weights are loaded"
    assert not scheduler.may_ship
    assert started(scheduler.handle(PolicyUpdated(0))) == [0]
    assert scheduler.awaited() == "generation"
    assert scheduler.may_ship
    end(scheduler, 0, "c")
    end(scheduler, 0, "c", first=1)
    assert scheduler.awaited() == "finalize"
    assert ShipBatch(1, (0,)) in scheduler.handle(GroupFinalized(0, 2, 0))
    assert not scheduler.may_ship, "one is on its way"
    scheduler.handle(BatchCommitted(1))
    assert scheduler.awaited() == "wait_trainer"
    assert not scheduler.may_ship, "of newer weights than there are"
    scheduler.handle(PolicyUpdateStarting(1))
    assert scheduler.awaited() == "wait_inference"
    scheduler.handle(PolicyUpdated(1))
    assert scheduler.may_ship
    scheduler.handle(CapacityChanged(0))
    assert scheduler.awaited() == "wait_inference", "though rollouts are in flight"


def test_without_their_rollouts_ready_groups_start_again() -> None:
    original = make_scheduler()
    original.handle(PolicyUpdated(0))
    play(original, 2, kept=1, filtered=1)
    resumed = make_scheduler()
    resumed.restore(original.state(ready=False))
    assert resumed.ready_group_ids() == []
    instructions = resumed.handle(PolicyUpdated(0))
    assert instructions == [StartGroup(index, "words", index, 2) for index in (0, 1, 2, 3)]


def test_the_state_after_shipping_a_step_is_the_state_after_that_step() -> None:
    scheduler = make_scheduler()
    scheduler.handle(PolicyUpdated(0))
    play(scheduler, 0)
    assert ShipBatch(1, (0, 1)) in play(scheduler, 1)
    state = scheduler.state()
    assert state["next_step"] == 2
    assert [entry["group_id"] for entry in state["groups"]] == [2, 3]


def test_a_run_resumed_after_its_last_step_is_finished() -> None:
    scheduler = make_scheduler(steps=1)
    scheduler.restore({"format": 1, "next_step": 2, "next_group_id": 5, "groups": [], "mix": {"drawn": 5}})
    assert scheduler.handle(PolicyUpdated(0)) == [LastStepCommitted()]


def test_a_drain_starts_and_ships_nothing_and_keeps_interrupted_groups_for_later() -> None:
    scheduler = make_scheduler()
    scheduler.handle(PolicyUpdated(0))
    play(scheduler, 0)
    end(scheduler, 2, "c")
    assert scheduler.handle(DrainRequested()) == []
    assert end(scheduler, 1, "cc") == [FinalizeGroup(1)]
    assert scheduler.handle(GroupFinalized(1, 2, 0)) == []
    assert end(scheduler, 2, "x", first=1) == []
    assert end(scheduler, 3, "xx") == []
    state = scheduler.state()
    assert [entry["group_id"] for entry in state["groups"] if "ready" not in entry] == [2, 3]
    assert scheduler.ready_group_ids() == [0, 1]
    assert "shutting down" in waiting_for(scheduler)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "its format is None; expected the number 1"),
        ({"format": 2}, "a newer version of Counterpoint wrote it: it has format 2, and this version reads 1"),
        ({"format": 1, "groups": [{}], "next_step": 1, "next_group_id": 0, "mix": {}}, "damaged: KeyError: 'group_id'"),
        ({"format": 1, "groups": [], "next_step": None, "next_group_id": 0, "mix": {}}, "damaged: TypeError"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(state: dict[str, Any], message: str) -> None:
    scheduler = make_scheduler()
    before = scheduler.state()
    with pytest.raises(ValueError, match=message):
        scheduler.restore(state)
    assert scheduler.state() == before


def test_events_that_contradict_what_came_before_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.handle(PolicyUpdated(0))
    with pytest.raises(ValueError, match="rollout 9-0 ended"):
        scheduler.handle(RolloutEnded(9, "9-0", RolloutOutcome.COMPLETED, 0))
    with pytest.raises(ValueError, match="does not fit the group"):
        scheduler.handle(GroupFinalized(0, 2, 0))
    with pytest.raises(ValueError, match="the batch of step 3 was committed"):
        scheduler.handle(BatchCommitted(3))


def test_a_ready_group_is_as_old_as_the_oldest_turn_that_completed() -> None:
    scheduler = make_scheduler(group_size=4, rollouts_per_step=8)
    scheduler.handle(PolicyUpdated(1))
    for index, (outcome, version) in enumerate((("f", 1), ("c", 3), ("c", 2), ("c", 3))):
        end(scheduler, 0, outcome, version, first=index)
    scheduler.handle(GroupFinalized(0, 3, 0))
    assert scheduler.state()["groups"][0]["ready"] == {"kept": 3, "filtered": 0, "version": 2, "rewards": []}


def test_the_log_tells_what_happened_to_a_group_and_is_bounded() -> None:
    scheduler = make_scheduler()
    scheduler.handle(PolicyUpdated(0))
    play(scheduler, 0, kept=0, filtered=2)
    assert scheduler.log_of(0) == [
        StartGroup(0, "words", 0, 2),
        RolloutEnded(0, "0-0", RolloutOutcome.COMPLETED, 0),
        RolloutEnded(0, "0-1", RolloutOutcome.COMPLETED, 0),
        FinalizeGroup(0),
        GroupFinalized(0, 0, 2),
        CancelGroup(0, DropReason.FILTERED, "all 2 completed rollouts were filtered"),
    ]
    with pytest.raises(ValueError, match=r"0-0 ended .* the log of group 0: StartGroup\(.*CancelGroup\("):
        end(scheduler, 0, "c")
    for capacity in range(2 * LOG_LENGTH):
        scheduler.handle(CapacityChanged(1 + capacity % 8))
    assert len(scheduler.log) == LOG_LENGTH
    assert scheduler.log_of(0) == []


def fail_groups(scheduler: RolloutScheduler, first: int, last: int) -> list[Instruction]:
    """Fails groups whose requests a server refuses."""
    failure = Failure(Lasting.REFUSED, "RequestRefused", "RequestRefused: 400: too long")
    instructions: list[Instruction] = []
    for group_id in range(first, last):
        end(scheduler, group_id, "ff")
        event = GroupFinalized(group_id, 0, 0, DropReason.FAILED, "none survived", failure, at=float(group_id))
        instructions += [each for each in scheduler.handle(event) if isinstance(each, GiveUp)]
    return instructions


def test_a_run_gives_up_where_nothing_can_succeed_once_what_had_begun_has_ended() -> None:
    scheduler = make_scheduler()
    scheduler.handle(PolicyUpdated(0))
    assert fail_groups(scheduler, 0, GROUPS + 3) == [], "at the 32nd, three more had begun"
    (gave_up,) = fail_groups(scheduler, GROUPS + 3, GROUPS + 10)
    assert isinstance(gave_up, GiveUp)
    assert "RequestRefused: 400: too long" in gave_up.reason


def test_a_run_that_is_stopped_or_has_played_a_group_does_not_give_up() -> None:
    scheduler = make_scheduler()
    scheduler.handle(PolicyUpdated(0))
    play(scheduler, 0)
    assert fail_groups(scheduler, 1, 3 * GROUPS) == []
    scheduler = make_scheduler()
    scheduler.handle(PolicyUpdated(0))
    fail_groups(scheduler, 0, GROUPS)
    scheduler.handle(DrainRequested())
    assert fail_groups(scheduler, GROUPS, GROUPS + 4) == []
