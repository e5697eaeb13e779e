"""The bound that loses nothing: its formula beside the scheduler's own rules, and what is said of it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from counterpoint.orchestrator.scheduling.events import (
    BatchCommitted,
    CancelGroup,
    FinalizeGroup,
    GroupFinalized,
    PolicyUpdated,
    RolloutEnded,
    ShipBatch,
    StartGroup,
)
from counterpoint.orchestrator.scheduling.lossless import (
    BOUND,
    LEAD,
    LEAST_STEPS,
    LOST,
    LOST_MEAN,
    LosslessBound,
    SaidOfStaleness,
    bound_of,
    in_words,
    need_of,
)
from counterpoint.orchestrator.scheduling.outcomes import DropReason, RolloutOutcome
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.run.config import ScheduleConfig
from tests.orchestrator.scheduling.counting_mix import CountingMix

SCHEDULE = ScheduleConfig(group_size=4, rollouts_per_step=32, max_inflight_rollouts=64)


def simulated(slow_seconds: float, limit: int, steps: int = 200) -> tuple[float, float]:
    """The share of slow groups among those trained, where a tenth is asked, and the seconds a step.

    The trainer makes a step in one second. Rollouts last half a second, or `slow_seconds`, or up to a fifth less.
    """
    schedule = SCHEDULE.model_copy(update={"max_off_policy_steps": limit, "stragglers": "drop"})
    scheduler, chance, count = RolloutScheduler(schedule, steps, CountingMix()), random.Random(0), itertools.count()
    todo: list[tuple[float, int, Callable[[], Any]]] = []
    slow: dict[int, bool] = {}
    versions: dict[int, int] = {}
    running: dict[int, set[str]] = {}
    trained: list[bool] = []
    now, version, trainer_free = 0.0, 0, 0.0

    def later(at: float, event: Callable[[], Any]) -> None:
        heapq.heappush(todo, (at, next(count), event))

    def handle(event: Any) -> None:
        nonlocal trainer_free
        for instruction in scheduler.handle(event):
            match instruction:
                case StartGroup(group_id, _, _, size):
                    slow[group_id] = chance.random() < 0.1
                    seconds = (slow_seconds if slow[group_id] else 0.5) * chance.uniform(0.8, 1.0)
                    versions[group_id] = version
                    running[group_id] = {f"{group_id}-{index}" for index in range(size)}
                    for rollout in sorted(running[group_id]):
                        later(now + seconds, lambda group_id=group_id, rollout=rollout: end(group_id, rollout))  # type: ignore[misc]
                case FinalizeGroup(group_id):
                    later(now, lambda group_id=group_id: handle(GroupFinalized(group_id, 4, 0)))  # type: ignore[misc]
                case CancelGroup(group_id, DropReason.STALE):
                    for rollout in sorted(running[group_id]):
                        later(now, lambda group_id=group_id, rollout=rollout: end(group_id, rollout, cancelled=True))  # type: ignore[misc]
                case ShipBatch(step, group_ids):
                    trained.extend(slow[group_id] for group_id in group_ids)
                    trainer_free = max(trainer_free, now) + 1.0
                    later(now, lambda step=step: handle(BatchCommitted(step)))  # type: ignore[misc]
                    later(trainer_free, lambda step=step: load(step))  # type: ignore[misc]

    def end(group_id: int, rollout: str, *, cancelled: bool = False) -> None:
        if rollout in running[group_id]:
            running[group_id].remove(rollout)
            outcome = RolloutOutcome.CANCELLED if cancelled else RolloutOutcome.COMPLETED
            handle(RolloutEnded(group_id, rollout, outcome, versions[group_id]))

    def load(step: int) -> None:
        nonlocal version
        version = step
        handle(PolicyUpdated(step))

    handle(PolicyUpdated(0))
    while todo:
        now, _, event = heapq.heappop(todo)
        event()
    settled = trained[len(trained) // 10 :]
    return sum(settled) / len(settled), now / steps


@pytest.mark.slow
@pytest.mark.parametrize("slow_seconds", [3.6, 5.0, 7.2])
def test_the_scheduler_loses_nothing_with_the_bound_and_much_with_two_less(slow_seconds: float) -> None:
    """Where generation is the bottleneck, as here, the lead is not used in full, and one less may do."""
    asked, wall = simulated(slow_seconds, 20)
    bound = bound_of(slow_seconds, wall, SCHEDULE.max_lead_steps)
    assert simulated(slow_seconds, bound)[0] == pytest.approx(asked, abs=0.005)
    assert simulated(slow_seconds, bound - 2)[0] < asked - 0.02


@pytest.mark.parametrize(
    ("seconds", "wall", "lead", "bound"), [(0.4, 1.0, 2, 3), (3.0, 1.0, 2, 5), (3.01, 1.0, 2, 6), (6.0, 1.5, 1, 5)]
)
def test_the_bound_is_the_lead_and_the_steps_that_a_rollout_lasts(
    seconds: float, wall: float, lead: int, bound: int
) -> None:
    assert bound_of(seconds, wall, lead) == bound


def test_what_is_kept_asks_for_the_bound_of_the_longest() -> None:
    need = need_of([0.5, 2.5], [], wall=1.0, lead=2, limit=4)
    assert (need.bound, need.lead, need.lost, need.lost_staleness) == (5, 1, 0.0, 0.0)


def test_what_is_lost_would_be_older_than_it_may_be() -> None:
    """A rollout that was cancelled early, since its group was old, asks for one step more at least."""
    need = need_of([0.5] * 6, [0.1, 3.5], wall=1.0, lead=2, limit=4)
    assert (need.bound, need.lead, need.lost, need.lost_staleness) == (6, 0, 0.25, 5.5)


def metrics_of(
    lost: list[float], kept: float = 0.5, phases: dict[str, float] | None = None, trainer: float = 0.0
) -> dict[str, float]:
    """The metrics after steps with 20 rollouts that are kept, and these that are lost. A step lasts a second by default."""
    bound, found = LosslessBound(), dict[str, float]()
    for _ in range(LEAST_STEPS):
        bound.add([kept] * 20 + [None], lost=False)
        bound.add(lost, lost=True)
        found = bound.take(phases or {"wall_seconds": 1.0}, trainer, SCHEDULE)
    return found


def test_too_few_steps_or_rollouts_tell_nothing() -> None:
    bound = LosslessBound()
    bound.add([0.5] * 100, lost=False)
    assert bound.take({"wall_seconds": 1.0}, 0.0, SCHEDULE) == {}
    for _ in range(LEAST_STEPS):
        assert LosslessBound().take({"wall_seconds": 1.0}, 0.0, SCHEDULE) == {}


def test_the_metrics_are_those_of_the_newest_steps() -> None:
    assert metrics_of([]) == {BOUND: 3, LEAD: 3, LOST: 0.0, LOST_MEAN: 0.0}
    assert metrics_of([2.5] * 5) == {BOUND: 5, LEAD: 1, LOST: 0.2, LOST_MEAN: 5.0}


def test_waits_for_stragglers_are_no_part_of_a_step() -> None:
    """With the bound nobody waits for them, and steps are shorter."""
    waited = {"wall_seconds": 5.0, "phase/wait_stragglers": 4.0}
    assert metrics_of([], 3.0, waited)[BOUND] == metrics_of([], 3.0)[BOUND] == 5


def test_a_batch_that_is_full_at_once_lasts_as_long_as_the_trainers_step_or_its_rollouts() -> None:
    at_once = {"wall_seconds": 4.0, "phase/wait_stragglers": 4.0}
    assert metrics_of([], 3.0, at_once, trainer=1.5)[BOUND] == 2 + 2
    assert metrics_of([], 6.4, at_once)[BOUND] == 2 + 4, "20 rollouts of 6.4 seconds are 2 seconds of 64 in flight"


def test_what_is_lost_is_said_once_and_again_when_more_is_needed() -> None:
    said, line = SaidOfStaleness(), {"step": 9, "staleness/mean": 2.0, **metrics_of([2.5] * 5)}
    words = said.news(line)
    assert "20.0%" in words
    assert "max_off_policy_steps = 5" in words
    assert "2.60" in words
    assert said.news(line) == ""
    assert said.news({**line, BOUND: 7}) != ""
    assert in_words({**line, LOST: 0.001}) == ""
    assert in_words({"step": 9, LOST: 0.3}) == ""


def test_what_waits_for_stragglers_cost_is_said() -> None:
    """Nothing is lost then, and the run takes much longer."""
    waited = {"wall_seconds": 5.0, "phase/wait_stragglers": 4.0}
    line = {"step": 9, "staleness/mean": 2.0, **waited, **metrics_of([], 3.0, waited)}
    assert "max_off_policy_steps = 5" in SaidOfStaleness().news(line)
    assert in_words({**line, "phase/wait_stragglers": 0.1}) == ""
