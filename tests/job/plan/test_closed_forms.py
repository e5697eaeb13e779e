"""The closed forms of a step's seconds, idle shares and mean staleness, beside the scheduler's own rules in a simulation."""

from __future__ import annotations

import statistics

import pytest

from counterpoint.job.plan.speed import mean_staleness, step_seconds
from tests.orchestrator.scheduling.simulation import (
    Duration,
    Simulation,
    bimodal,
    heavy_tailed,
    log_normal,
    schedule_of,
)

pytestmark = pytest.mark.slow

STEPS, ROLLOUTS = 150, 32


def simulated(duration: Duration, lead: int, in_flight: int) -> Simulation:
    schedule = schedule_of(60, stragglers="drop", max_lead_steps=lead, max_inflight_rollouts=in_flight)
    return Simulation(schedule, STEPS, duration).run()


@pytest.mark.parametrize("seconds", [0.5, 2.0, 3.0])
@pytest.mark.parametrize(("lead", "in_flight"), [(1, 64), (2, 64), (2, 32), (3, 64), (4, 128), (6, 64)])
def test_equal_rollouts_take_as_long_wait_as_much_and_are_as_old_as_predicted(
    seconds: float, lead: int, in_flight: int
) -> None:
    at_once = min(in_flight, lead * ROLLOUTS)
    servers = ROLLOUTS * seconds / at_once
    wall = step_seconds(1.0, servers, seconds, lead)
    run = simulated(lambda rng, environment, example: seconds, lead, in_flight)
    assert run.now / STEPS == pytest.approx(wall, rel=0.1)
    assert run.idle / run.now == pytest.approx(1 - 1 / wall, abs=0.05)
    assert 1 - sum(run.lasted) / (run.now * at_once) == pytest.approx(1 - servers / wall, abs=0.05)
    if servers != 1.0:  # a tie: either side may wait
        staleness = mean_staleness(1.0, servers, wall, at_once / ROLLOUTS, lead)
        assert statistics.fmean(run.staleness[80:]) == pytest.approx(staleness, rel=0.1)


@pytest.mark.parametrize(
    "duration", [bimodal(6), log_normal, heavy_tailed], ids=["bimodal", "log-normal", "heavy tail"]
)
@pytest.mark.parametrize("lead", [2, 3, 4])
def test_a_batch_of_unequal_rollouts_is_full_up_to_half_a_step_later(duration: Duration, lead: int) -> None:
    run = simulated(duration, lead, 128)
    groups = [max(run.lasted[first : first + 4]) for first in range(0, len(run.lasted), 4)]
    group = statistics.fmean(groups)
    servers = statistics.fmean(run.lasted) * ROLLOUTS / 128
    least, most = (step_seconds(1.0, servers, group, each) for each in (lead, lead - 0.5))
    assert 0.9 * least < run.now / STEPS < 1.1 * most
    assert run.idle / run.now < 1 - 1 / (1.1 * most)
    assert statistics.fmean(run.staleness[80:]) == pytest.approx(mean_staleness(1.0, servers, most, 4.0, lead), rel=0.1)
