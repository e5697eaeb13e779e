"""HyperBand's brackets: who waits, who is dropped, and that nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from counterpoint.tune.schedulers.hyperband import HyperBandScheduler
from tests.tune.schedulers.differential.ours import OurSide
from tests.tune.schedulers.differential.scenario import scenario
from tests.tune.schedulers.differential.world import PAUSED, PENDING, RUNNING, World
from tests.tune.schedulers.fake_trials import FakeTrials


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


@pytest.mark.parametrize("scheduler", ["hyperband", "pbt_synch"])
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
