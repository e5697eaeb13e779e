"""Every way in which a trial fails, all at once: each has its own error, and the others go on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from counterpoint.tune import AsyncHyperBandScheduler, Experiment, Trial, run_experiments
from counterpoint.tune.executors.attempt import Deadlines
from counterpoint.tune.executors.executor import Completed, Failed, Reported, Started, Stopped
from counterpoint.tune.executors.local import LocalTrialExecutor
from counterpoint.tune.resources import Resources
from tests.tune.executors.driver import TRAINABLES, Driver, content

pytestmark = pytest.mark.slow

FAULTS = {
    "leaks": "MemoryError",
    "exits": "sys.exit(3)",
    "Exits": "SystemExit: 3",
    "exits_at_once": "ended with exit code 3",
    "segfaults": "was killed by SIGSEGV",
    "is_killed": "was killed by SIGKILL",
    "raises": "ValueError: no such luck",
    "reports_an_object": "is a builtins.object, which has no JSON form",
    "floods": "ValueError: the end of the flood",
}
"""What the error says."""


async def test_each_fault_is_its_own_trials(tmp_path: Path) -> None:
    executor = LocalTrialExecutor(cpus=4, deadlines=Deadlines(stop_seconds=0.5))
    driver = Driver(executor, tmp_path)
    memory = {"leaks": Resources(memory=2**29)}
    faulty = [driver.trial(name, resources=memory.get(name), log_to_file=name == "floods") for name in FAULTS]
    nan, good = driver.trial("reports_nan"), driver.trial("Counter")
    hanging = driver.trial("hangs")
    try:
        await driver.begin(hanging)
        executor.proceed(hanging)
        heard = await driver.run([*faulty, nan, good], lambda trial: 10)
        await driver.stop(hanging)
    finally:
        await executor.close()
    for trial, said in zip(faulty, FAULTS.values(), strict=True):
        *before, failure = heard[trial.trial_id]
        assert [type(event) for event in before] == [Started]
        assert isinstance(failure, Failed)
        assert said in failure.error, failure.error
    segfault = heard["segfaults"][-1]
    assert isinstance(segfault, Failed)
    assert "trainables.py" in segfault.error
    assert len(str(content(faulty[-1].logdir, "stderr"))) > 2**20
    losses = [event.result["loss"] for event in heard["reports-nan"] if isinstance(event, Reported)]
    assert math.isnan(losses[0])
    assert losses[1] == math.inf
    assert [type(event) for event in heard["reports-nan"]][-2:] == [Completed, Stopped]
    assert [type(event) for event in heard["Counter"]] == [Started, *[Reported] * 10, Stopped]


def test_each_fault_has_its_error_file_and_the_others_go_on(tmp_path: Path) -> None:
    """The same in an experiment, whose scheduler needs a metric that `Counter` does not report."""
    names = [*FAULTS, "Counter", "reports"]
    experiments = [
        Experiment(
            name,
            run=f"{TRAINABLES}:{name}",
            local_dir=str(tmp_path),
            resources_per_trial=Resources(memory=2**29 if name == "leaks" else 0),
            max_failures=1 if name == "is_killed" else 0,
        )
        for name in names
    ]
    trials = run_experiments(
        experiments,
        scheduler=AsyncHyperBandScheduler(metric="value", mode="max"),
        trial_executor=LocalTrialExecutor(cpus=4),
        raise_on_failed_trial=False,
        verbose=0,
    )
    found = {trial.trainable_name.rpartition(":")[2]: trial for trial in trials}
    assert found["reports"].status == Trial.TERMINATED
    assert found["reports"].num_results == 3
    assert found["reports"].error_file is None
    for name, said in {**FAULTS, "Counter": "value"}.items():
        trial = found[name]
        assert trial.status == Trial.ERROR
        text = content(str(trial.error_file)) or ""
        assert said in text, text
        assert text.count("Failure #") == (2 if name == "is_killed" else 1)
