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


def test_with_bohb_a_bracket_is_halved_once_it_is_full_or_nothing_else_can_be_done() -> None:
    trials = FakeTrials(HyperBandForBOHB(metric="score", mode="max", max_t=9, reduction_factor=3))
    for _ in range(3):
        trials.add(status=Trial.TERMINATED)
    members = [trials.add() for _ in range(4)]
    for trial, score in zip(members, (1, 5, 3, 4), strict=True):
        assert trials.report(trial, 3, score) == "PAUSE"
    assert trials.stopped == []
    fifth = trials.add()
    assert trials.report(fifth, 3, 2) == "STOP", "the bracket is full, and this one is among the worst"
    assert trials.statuses()[3:] == ["TERMINATED", "PENDING", "TERMINATED", "PENDING", "TERMINATED"]

    trials = FakeTrials(HyperBandForBOHB(metric="score", mode="max", max_t=9, reduction_factor=3))
    for _ in range(3):
        trials.add(status=Trial.TERMINATED)
    for score in (1, 5, 3):
        trials.report(trials.add(), 3, score)
    assert trials.statuses()[3:] == ["PAUSED"] * 3
    chosen = trials.scheduler.choose_trial_to_run(trials)
    assert chosen is trials.trials[4], "nothing runs and no trial is to come: the best of the three go on"


@pytest.mark.parametrize("scheduler", ["hyperband", "pbt_synch"])
def test_whenever_nothing_runs_something_can_be_started(scheduler: str) -> None:
    """Whatever comes late, fails or is removed."""

    class LiveSide(OurSide):
        def between_events(self, draws: random.Random) -> None:
            super().between_events(draws)
            statuses = {trial.status for trial in self.world.trials}
            if RUNNING not in statuses and statuses & {PAUSED, PENDING}:
                assert self.choose() is not None

    for seed in range(30):
        stream = scenario(scheduler, seed)
        world = World(stream)
        world.play(LiveSide(stream, world))
