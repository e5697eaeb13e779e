"""HyperBand's brackets: who waits, who is dropped, and that nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.tune.schedulers.differential.ours import OurSide
from tests.tune.schedulers.differential.scenario import scenario
from tests.tune.schedulers.differential.world import PAUSED, PENDING, RUNNING, World
from tests.tune.schedulers.fake_trials import FakeTrials
from tune.schedulers.hyperband import HyperBandScheduler
from tune.schedulers.hyperband_bohb import HyperBandForBOHB
from tune.trial import Trial


def hyperband(**arguments: Any) -> HyperBandScheduler:
    return HyperBandScheduler(metric="score", mode="max", **arguments)


def test_the_bands_are_those_of_the_paper() -> None:
    scheduler = hyperband(max_t=81, reduction_factor=3)
    trials = FakeTrials(scheduler)
    for _ in range(5 + 8 + 15 + 34 + 81 + 1):
        trials.add()
    first, second = scheduler.state()["bands"]
    assert [(b["places"], b["milestone"], b["halvings"]) for b in first] == [
        (5, 81, 0),
        (8, 27, 1),
        (15, 9, 2),
        (34, 3, 3),
        (81, 1, 4),
    ]
    assert [len(b["live"]) for b in second] == [1]


def test_the_best_of_a_bracket_go_on_when_the_last_has_come() -> None:
    trials = FakeTrials(hyperband(max_t=9, reduction_factor=3))
    members = [trials.add() for _ in range(3 + 5)][3:]
    decisions = [trials.report(trial, 3, score) for trial, score in zip(members, (1, 5, 3, 4, 2), strict=True)]
    assert decisions == ["PAUSE"] * 4 + ["STOP"]
    assert trials.stopped == ["t3", "t5"]
    assert trials.statuses()[3:] == ["TERMINATED", "PENDING", "TERMINATED", "PENDING", "TERMINATED"]


def test_a_trial_that_fails_is_not_waited_for() -> None:
    trials = FakeTrials(hyperband(max_t=9, reduction_factor=3))
    members = [trials.add() for _ in range(3 + 5)][3:]
    for trial in members[:-1]:
        assert trials.report(trial, 3, 1.0) == "PAUSE"
    trials.fail(members[-1])
    assert sorted(trials.statuses()[3:]) == ["ERROR", "PENDING", "PENDING", "TERMINATED", "TERMINATED"]


def bohb() -> FakeTrials:
    """Brackets, with max_t 3 and a factor of 3, have three trials with a halving at 1, then two that run to 3 at once."""
    return FakeTrials(HyperBandForBOHB(metric="score", mode="max", max_t=3, reduction_factor=3))


def test_with_bohb_a_bracket_is_halved_once_it_is_full() -> None:
    trials = bohb()
    for score in (1, 5):
        assert trials.report(trials.add(), 1, score) == "PAUSE"
    assert trials.stopped == []
    third = trials.add()
    assert trials.report(third, 1, 2) == "STOP", "the bracket is full, and this one is not the best"
    assert trials.statuses() == ["TERMINATED", "PENDING", "TERMINATED"]


def test_with_bohb_a_bracket_waits_for_a_search_that_thinks_and_no_longer() -> None:
    trials = bohb()
    for score in (1, 5):
        trials.report(trials.add(), 1, score)
    trials.search_thinks = True
    assert trials.scheduler.choose_trial_to_run(trials) is None, "a third trial may come"
    trials.search_thinks = False
    assert trials.scheduler.choose_trial_to_run(trials) is trials.trials[1], "the best of those that are there goes on"
    assert trials.statuses() == ["TERMINATED", "PENDING"]
    assert trials.report(trials.add(), 1, 9) == "CONTINUE", (
        "it is in the next bracket, not with those that were compared"
    )


def test_with_bohb_a_trial_that_waits_for_resources_halves_nothing() -> None:
    trials = bohb()
    trials.report(trials.add(), 1, 1)
    trials.add(status=Trial.PENDING)
    trials.free = False
    assert trials.scheduler.choose_trial_to_run(trials) is None
    assert trials.statuses() == ["PAUSED", "PENDING"]


@pytest.mark.parametrize("scheduler", ["hyperband", "bohb", "pbt_synch"])
def test_whenever_nothing_runs_something_can_be_started(scheduler: str) -> None:
    """Whatever comes late, fails or is removed."""

    class LiveSide(OurSide):
        def between_events(self, draws: random.Random) -> None:
            super().between_events(draws)
            if RUNNING not in self.statuses() and self.unfinished():
                assert self.choose() is not None or not self.unfinished()

        def statuses(self) -> set[str]:
            return {trial.status for trial in self.world.trials}

        def unfinished(self) -> set[str]:
            return self.statuses() & {PAUSED, PENDING}

    for seed in range(30):
        stream = scenario(scheduler, seed)
        world = World(stream)
        world.play(LiveSide(stream, world))
