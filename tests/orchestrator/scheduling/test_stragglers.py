"""With `stragglers = "wait"` what is trained is what was asked, however long rollouts last."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from counterpoint.orchestrator.scheduling.events import (
    AwaitStragglers,
    BatchCommitted,
    CancelGroup,
    CapacityChanged,
    DrainRequested,
    FinalizeGroup,
    PatienceEnded,
    PolicyUpdated,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.outcomes import DropReason
from counterpoint.orchestrator.scheduling.scheduler import Scheduler
from perf.straggler_simulation import (
    Duration,
    Simulation,
    about,
    bimodal,
    heavy_tailed,
    log_normal,
    schedule_of,
)
from tests.orchestrator.scheduling.test_scheduler import end, make_scheduler, play, waiting_for

DURATIONS: dict[str, Duration] = {
    "constant": lambda rng, environment, example: 1.0,
    "bimodal": bimodal(6),
    "log-normal": log_normal,
    "heavy tail": heavy_tailed,
}


def is_slow(example: int) -> bool:
    return example < 100


def simulate(duration: Duration, stragglers: str = "wait", steps: int = 60, **how: Any) -> Simulation:
    """A run that waits as long as need be, if it waits."""
    schedule = schedule_of(4, stragglers=stragglers, straggler_patience_steps=100)
    return Simulation(schedule, steps, duration, **how).run()


def test_what_is_slow_is_not_trained_by_dropping() -> None:
    """The fault that waiting mends."""
    run = simulate(bimodal(6), "drop")
    assert run.share(is_slow) < 0.02
    assert run.p_value() < 1e-6


@pytest.mark.parametrize("duration", DURATIONS.values(), ids=DURATIONS)
def test_every_group_that_starts_is_trained(duration: Duration) -> None:
    run = simulate(duration)
    assert not run.stale
    assert len(run.trained) == run.started.total() == 60 * 8
    assert run.p_value() > 0.001


def test_the_patience_is_as_long_where_batches_are_full_at_once() -> None:
    """With room for a lead of four, each wait fills the next batches; the trainer's steps are as long as before."""
    schedule = schedule_of(4, stragglers="wait", max_lead_steps=4, max_inflight_rollouts=256)
    run = Simulation(schedule, 60, bimodal(6)).run()
    assert not run.stale


@pytest.mark.parametrize(
    "disturbance",
    [{"kills": (7.3, 21.9, 40.1)}, {"losses": (5.2, 18.7, 33.3)}, {"kills": (9.5, 30.2), "losses": (12.6, 31.1)}],
    ids=["kills", "losses", "both"],
)
def test_kills_and_lost_servers_cost_no_group_its_place(disturbance: dict[str, Any]) -> None:
    run = simulate(bimodal(6), **disturbance)
    assert not run.stale
    assert run.share(is_slow) == pytest.approx(run.asked(is_slow), abs=0.01)
    assert run.p_value() > 0.001


def test_environments_have_their_shares_however_slow_one_is() -> None:
    def duration(rng: random.Random, environment: str, example: int) -> float:
        return about(8.0 if environment == "slow" else 0.2, rng)

    run = simulate(duration, environments=("fast", "slow"))
    assert not run.stale
    assert Counter(environment for environment, _ in run.trained) == {"fast": 240, "slow": 240}


def beside_a_straggler() -> Scheduler:
    """Group 2 fills step 2, the last that may take version 0; group 0 is of version 0 and runs."""
    scheduler = make_scheduler(
        max_lead_steps=2, max_off_policy_steps=2, rollouts_per_step=2, max_inflight_rollouts=4, stragglers="wait"
    )
    scheduler.handle(PolicyUpdated(0))
    assert ShipBatch(1, (1,)) in play(scheduler, 1)
    scheduler.handle(BatchCommitted(1))
    scheduler.handle(PolicyUpdated(1))
    assert play(scheduler, 2, version=1)[-1] == AwaitStragglers(2)
    assert scheduler.awaited() == "wait_stragglers"
    assert "groups of policy version 0 and older" in waiting_for(scheduler)
    return scheduler


def test_a_full_batch_takes_the_straggler_that_it_has_waited_for() -> None:
    scheduler = beside_a_straggler()
    assert scheduler.handle(CapacityChanged(4)) == [], "it waits once"
    assert play(scheduler, 0)[-1] == ShipBatch(2, (0,))


def test_a_straggler_that_outlasts_the_patience_is_dropped() -> None:
    scheduler = beside_a_straggler()
    assert scheduler.handle(PatienceEnded(1)) == [], "of another step"
    shipped, dropped, *_ = scheduler.handle(PatienceEnded(2))
    assert shipped == ShipBatch(2, (2,))
    assert isinstance(dropped, CancelGroup)
    assert (dropped.group_id, dropped.reason) == (0, DropReason.STALE)


def test_a_straggler_of_which_nothing_is_left_is_not_waited_for() -> None:
    scheduler = beside_a_straggler()
    assert not any(isinstance(each, ShipBatch) for each in end(scheduler, 0, "f"))
    assert end(scheduler, 0, "f", first=1) == [FinalizeGroup(0), ShipBatch(2, (2,))]


def test_a_drain_ends_the_wait_and_keeps_both_groups() -> None:
    scheduler = beside_a_straggler()
    scheduler.handle(DrainRequested())
    end(scheduler, 0, "xx")
    assert scheduler.handle(PatienceEnded(2)) == []
    resumed = make_scheduler(
        max_lead_steps=2, max_off_policy_steps=2, rollouts_per_step=2, max_inflight_rollouts=4, stragglers="wait"
    )
    resumed.restore(scheduler.state())
    assert resumed.ready_group_ids() == [2]
    assert StartGroup(0, "words", 0, 2) in resumed.handle(PolicyUpdated(1))
