"""The time that an experiment may take goes on counting after its runner was killed, though no snapshot had been written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from counterpoint.tune.executors.executor import Event, EventExecutor
from counterpoint.tune.resources import Resources
from counterpoint.tune.runner import codec
from counterpoint.tune.runner.journal import open_journal
from counterpoint.tune.runner.resume import Resume
from counterpoint.tune.runner.trial_files import read_runner_state
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.search.basic_variant import BasicVariantGenerator
from counterpoint.tune.stoppers.standard import CombinedStopper, MaximumIterationStopper, TimeoutStopper
from counterpoint.tune.trial import Trial
from tests.tune.search.experiment import SpaceOnly


class Full(EventExecutor):
    """Never has room for a trial."""

    def has_resources(self, resources: Resources) -> bool:
        return False

    def could_ever_run(self, trial: Trial) -> str | None:
        return None

    async def next_events(self, timeout: float) -> Sequence[Event]:
        return []

    async def close(self) -> None:
        pass


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def runner_of(directory: Path, clock: Clock, resume: Resume) -> tuple[TrialRunner, CombinedStopper]:
    stopper = CombinedStopper(MaximumIterationStopper(3), TimeoutStopper(10, clock))
    search = BasicVariantGenerator()
    search.add_configurations([SpaceOnly({"a": 1})])
    runner = TrialRunner(
        search,
        local_checkpoint_dir=directory,
        stopper=stopper,
        resume=resume,
        trial_executor=Full(),
        checkpoint_period=0.0,
    )
    return runner, stopper


def killed(runner: TrialRunner) -> None:
    """Nothing is written any more; only what the kernel would release is released."""
    assert runner._search is not None
    runner._search.close()
    assert runner._private is not None
    runner._private.close()
    runner._experiment.close()


@pytest.mark.slow
def test_time_goes_on_counting_after_a_kill(tmp_path: Path) -> None:
    clock = Clock()
    runner, _ = runner_of(tmp_path, clock, False)
    runner.step()
    clock.now += 7
    deadline = time.monotonic() + 60
    while read_runner_state(tmp_path)["stopper"]["stoppers"][1]["spent_s"] < 7:  # it is not written at each step
        runner.step()
        assert time.monotonic() < deadline
    killed(runner)
    assert all(isinstance(codec.unpack(record), list) for record in open_journal(tmp_path)[1])  # events, and no state
    clock.now += 500
    runner, stopper = runner_of(tmp_path, clock, True)
    assert stopper.state() == {"stoppers": [{"iterations": {}}, {"spent_s": 7.0}]}
    runner.step()
    clock.now += 2.5
    runner.step()
    assert runner.stopped_because is None
    clock.now += 1
    runner.step()
    assert runner.stopped_because is not None
    runner.close()
