"""With `stragglers = "wait"` what is trained is what was asked, however long rollouts last."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import chi2_contingency, chisquare

from counterpoint.environments.config import CurriculumConfig
from counterpoint.orchestrator.scheduling.events import (
    AwaitStragglers,
    BatchCommitted,
    BoundRaised,
    CancelGroup,
    CapacityChanged,
    DrainRequested,
    FinalizeGroup,
    PatienceEnded,
    PolicyUpdated,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.lossless import bound_of
from counterpoint.orchestrator.scheduling.outcomes import DropReason
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.simulation import (
    ROWS,
    Duration,
    Simulation,
    about,
    bimodal,
    disturbances,
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


LOSSLESS = {
    "wait": schedule_of(4, stragglers="wait", straggler_patience_steps=100),
    "auto": schedule_of("auto", stragglers="drop"),
}
"""Schedules that lose nothing."""


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


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[2]}")
def test_what_is_trained_is_what_was_asked_with_the_default(
    row: tuple[str, Duration, int, Callable[[int], bool]],
) -> None:
    """The table of `docs/scheduling.md`."""
    _what, duration, limit, slow = row
    run = Simulation(schedule_of(limit), 200, duration).run()
    assert run.share(slow) == pytest.approx(run.asked(slow), abs=0.005)
    assert run.p_value() > 0.001


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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LOSSLESS.values(), ids=LOSSLESS)
@pytest.mark.parametrize("disturbance", disturbances(60).values(), ids=disturbances(60))
def test_nothing_that_happens_beside_costs_a_group_its_place(
    disturbance: dict[str, Any], schedule: ScheduleConfig
) -> None:
    run = Simulation(schedule, 60, bimodal(6), **disturbance).run()
    assert not run.stale
    assert run.share(is_slow) == pytest.approx(run.asked(is_slow), abs=0.01)
    assert run.p_value() > 0.001
    assert run.evaluated >= 64 * len(run.evaluations)


@pytest.mark.slow
def test_loads_interrupt_what_is_generated() -> None:
    plain, interrupted = (Simulation(LOSSLESS["auto"], 60, bimodal(6), loading=loading).run() for loading in (0.0, 0.5))
    assert interrupted.now > 1.2 * plain.now


def sometimes_long(rng: random.Random, environment: str, example: int) -> float:
    """One rollout of fifty takes eight steps, whatever its example."""
    return about(8.0 if rng.random() < 0.02 else 0.2, rng)


def p_value_of_long(run: Simulation) -> float:
    """That of the chi-squared test that one trained rollout of fifty is a long one."""
    count, long = len(run.lasted), sum(lasted > 1 for lasted in run.lasted)
    return float(chisquare([long, count - long], [0.02 * count, 0.98 * count]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LOSSLESS.values(), ids=LOSSLESS)
def test_rewards_that_come_with_long_rollouts_are_trained_as_they_are_drawn(schedule: ScheduleConfig) -> None:
    """A wrong answer is a long one here: what is lost would be wrong answers."""
    assert p_value_of_long(Simulation(schedule, 60, sometimes_long).run()) > 0.001
    assert p_value_of_long(Simulation(schedule_of(4, stragglers="drop"), 60, sometimes_long).run()) < 1e-6


def synchronous(duration: Duration, steps: int = 60, **how: Any) -> Simulation:
    """The run in which each step waits for all its rollouts, and they for its weights."""
    return Simulation(schedule_of(1, max_lead_steps=1), steps, duration, **how).run()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LOSSLESS.values(), ids=LOSSLESS)
@pytest.mark.parametrize("duration", [bimodal(6), log_normal], ids=["bimodal", "log-normal"])
def test_lengths_and_examples_are_those_of_the_synchronous_run(duration: Duration, schedule: ScheduleConfig) -> None:
    one, other = Simulation(schedule, 60, duration).run(), synchronous(duration)
    bounds = [0.0, 0.2, 1.0, 7.0, 1e9]
    lengths = [np.histogram(run.lasted, bounds)[0] for run in (one, other)]
    assert chi2_contingency(lengths).pvalue > 0.001
    both = {*one.trained} & {*other.trained}
    assert len(both) > 0.9 * len(one.trained), "but for those in flight at the end"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LOSSLESS.values(), ids=LOSSLESS)
def test_a_curriculum_draws_and_trains_as_in_the_synchronous_run(schedule: ScheduleConfig) -> None:
    """Slow examples are in the band, so half of what is drawn is slow; dropped ones would never be seen to be there."""

    def reward(example: int, duration: float) -> float:
        return float(not is_slow(example) or duration > 1.25 * 6)

    how: dict[str, Any] = {"curriculum": CurriculumConfig(rest=200), "reward": reward}
    runs = [Simulation(schedule, 250, bimodal(6), **how).run(), synchronous(bimodal(6), 250, **how)]
    settled = [run.trained[len(run.trained) // 2 :] for run in runs]
    slow = [sum(is_slow(example) for _, example in trained) for trained in settled]
    assert (
        chi2_contingency([slow, [len(each) - count for each, count in zip(settled, slow, strict=True)]]).pvalue > 0.001
    )
    assert slow[0] > 0.3 * len(settled[0])
    dropping = Simulation(schedule_of(4, stragglers="drop"), 250, bimodal(6), **how).run()
    assert dropping.share(is_slow) < 0.1


def test_environments_have_their_shares_however_slow_one_is() -> None:
    def duration(rng: random.Random, environment: str, example: int) -> float:
        return about(8.0 if environment == "slow" else 0.2, rng)

    run = simulate(duration, environments=("fast", "slow"))
    assert not run.stale
    assert Counter(environment for environment, _ in run.trained) == {"fast": 240, "slow": 240}


def beside_a_straggler() -> RolloutScheduler:
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


@pytest.mark.slow
@pytest.mark.parametrize("stragglers", ["drop", "wait"])
@pytest.mark.parametrize("duration", DURATIONS.values(), ids=DURATIONS)
def test_a_bound_that_rises_by_need_decides_as_its_limit_does(duration: Duration, stragglers: str) -> None:
    rising, fixed = (
        Simulation(schedule_of(limit, stragglers=stragglers), 60, duration).run() for limit in ("auto", 16)
    )
    assert (rising.trained, rising.stale, rising.now) == (fixed.trained, fixed.stale, fixed.now)
    assert rising.bounds == sorted(set(rising.bounds))
    assert not fixed.bounds


@pytest.mark.slow
def test_a_bound_that_rises_by_need_loses_nothing_and_takes_no_more_than_that() -> None:
    run = Simulation(schedule_of("auto", stragglers="drop"), 60, bimodal(6)).run()
    assert not run.stale
    assert run.share(is_slow) == pytest.approx(run.asked(is_slow), abs=0.005)
    longest = 1.2 * 1.25 * 6
    assert run.bounds[-1] <= bound_of(longest, 1.0, 2)
    quick = Simulation(schedule_of("auto", stragglers="drop"), 60, lambda rng, environment, example: 0.1).run()
    assert quick.bounds == []


def test_rollouts_without_end_raise_no_bound_above_its_limit() -> None:
    def duration(rng: random.Random, environment: str, example: int) -> float:
        return 1e6 if example < 100 else 0.2

    run = Simulation(schedule_of("auto", off_policy_limit=5, stragglers="drop"), 60, duration).run()
    assert run.bounds == [3, 4, 5]
    assert len(run.trained) == 60 * 8
    assert all(is_slow(example) for _, example in run.stale)


@pytest.mark.slow
def test_a_resumed_bound_rises_before_anything_is_dropped() -> None:
    run = Simulation(schedule_of("auto", stragglers="drop"), 60, bimodal(6), kills=(20.3, 41.7)).run()
    assert not run.stale
    assert run.bounds != sorted(run.bounds), "each process begins at the lead again"


def test_the_reason_of_a_raise_names_the_group() -> None:
    scheduler = make_scheduler(
        max_lead_steps=2,
        max_off_policy_steps="auto",
        off_policy_limit=3,
        rollouts_per_step=2,
        max_inflight_rollouts=4,
        stragglers="drop",
    )
    scheduler.handle(PolicyUpdated(0))
    play(scheduler, 1)
    scheduler.handle(BatchCommitted(1))
    scheduler.handle(PolicyUpdated(1))
    assert scheduler.snapshot().staleness_bound == 2
    raised, *_ = (each for each in play(scheduler, 2, version=1) if isinstance(each, BoundRaised))
    assert (raised.steps, scheduler.snapshot().staleness_bound) == (3, 3)
    assert "group 0 (environment words, example 0) of policy version 0" in raised.reason


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_off_policy_steps": "auto"}, "needs off_policy_limit"),
        ({"max_off_policy_steps": "auto", "off_policy_limit": 1}, "off_policy_limit = 1 is below max_lead_steps = 2"),
        ({"off_policy_limit": 8}, "remove one of them"),
        ({"max_off_policy_steps": 0}, 'expected a whole number of at least 1, or "auto"'),
        ({"max_off_policy_steps": "most"}, 'expected a whole number of at least 1, or "auto"'),
        ({"max_off_policy_steps": True}, 'expected a whole number of at least 1, or "auto"'),
    ],
)
def test_a_bound_that_cannot_be_is_refused_in_one_sentence(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)) as refused:
        ScheduleConfig.model_validate(values)
    assert refused.value.error_count() == 1
