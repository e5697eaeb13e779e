"""Random events, requests, kills of the runner and replays: whatever happens, the rules of the state machine hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.tune.result import Result
from counterpoint.tune.runner.events import Opened, StopRequested, TrialStopRequested
from counterpoint.tune.runner.machine import ExperimentMachine
from counterpoint.tune.schedulers.scheduler import Trials
from counterpoint.tune.trial import Trial
from tests.tune.runner.world import RestlessScheduler, World

HOWS = ("well", "well", "well", "well", "dies", "odd", "returns", "fails")

MAX_FAILURES = 2


def new_machine(seed: int, calm: float) -> ExperimentMachine:
    return ExperimentMachine(RestlessScheduler(seed, calm), ("value",), max_pending=2)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    calm=st.sampled_from([0.3, 0.6, 0.9]),
    moves=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=120),
    frequency=st.integers(0, 2),
    keep=st.sampled_from([None, 1, 2]),
    at_end=st.booleans(),
)
def test_the_rules_hold_whatever_happens(
    seed: int, calm: float, moves: list[tuple[int, int]], frequency: int, keep: int | None, at_end: bool
) -> None:
    world = World(new_machine(seed, calm))
    world.trial_fields = {
        "max_failures": MAX_FAILURES,
        "checkpoint_freq": frequency,
        "keep_checkpoints_num": keep,
        "checkpoint_at_end": at_end,
    }
    world.kill_runner(new_machine(seed, calm))  # the first runner of all begins as any other does
    for kind, choice in moves:
        if kind < 8:
            world.propose()
        elif kind < 25:
            world.offer()
        elif kind < 28:
            world.kill_runner(new_machine(seed, calm))
        elif kind < 31:
            world.take_snapshot()
        elif kind == 31 and choice < 20:
            world.send(StopRequested("somebody asked"))
        elif kind == 32 and world.proposed:
            world.send(TrialStopRequested(f"t{1 + choice % world.proposed:04d}"))
        elif world.lives:
            life = list(world.lives.values())[choice % len(world.lives)]
            world.go_on(life, HOWS[kind % len(HOWS)])
        world.check(MAX_FAILURES)
    world.kill_runner(new_machine(seed, calm))
    world.run_to_the_end()
    world.check(MAX_FAILURES)
    trials = world.machine.table.trials
    assert len(trials) == world.proposed
    assert all(trial.status in (Trial.TERMINATED, Trial.ERROR) for trial in trials)
    assert sorted(world.ended) == sorted(world.told_complete) == [trial.trial_id for trial in trials]
    assert not world.lives


class CopyingScheduler(RestlessScheduler):
    """Has the second trial copy the first, once there is something to copy."""

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        first, second = trials.get_trials()
        if trial is first and not self.saved:
            self.saved.append(trials.save_trial(first, result))
        elif trial is second and trial.checkpoint is None:
            trials.exploit(second, self.saved[0], {}, "tag")
        return self.CONTINUE


def test_the_iterations_that_a_copy_repeats_count_once_and_without_a_warning() -> None:
    """A run's checkpoint may be of an earlier step than the result for which it was made; so a copy may repeat that result."""
    world = World(ExperimentMachine(CopyingScheduler(0), ("value",), max_pending=2), total=2)
    world.send(Opened())
    world.propose()
    assert world.offer()
    assert world.offer()
    first, second = world.lives.values()
    for life, doings in ((first, ["starting", "training", "saving"]), (second, ["starting", "training", "resetting"])):
        for doing in doings:
            assert life.doing == doing
            world.go_on(life)
    second.iteration -= 1
    world.go_on(second)
    world.go_on(second)
    assert world.results["t0002"] == [1, 2], "its own, and the one after those of the first"
    assert not world.warned
