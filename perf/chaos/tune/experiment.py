"""One experiment of the chaos, as a process that is killed and started again until it comes to its end.

    python -m perf.chaos.tune.experiment DIRECTORY SCHEDULER SEED

At the end it leaves beside the experiment's own files what the search algorithm has heard, as `heard.json`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.tune.callbacks.defaults import with_default_loggers
from counterpoint.tune.executors.local import LocalTrialExecutor
from counterpoint.tune.experiment import Experiment
from counterpoint.tune.result import TRAINING_ITERATION, Result
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.schedulers.async_hyperband import AsyncHyperBandScheduler
from counterpoint.tune.schedulers.pbt import PopulationBasedTraining
from counterpoint.tune.schedulers.scheduler import TrialScheduler
from counterpoint.tune.search.basic_variant import BasicVariantGenerator
from counterpoint.tune.search.spaces import uniform

TRIALS, STEPS, MAX_FAILURES = 6, 12, 4
NAME = "chaos"
HEARD = "heard.json"


class Recorder(BasicVariantGenerator):
    """Random search that remembers, in its state, all that it heard."""

    def __init__(self, seed: int) -> None:
        super().__init__(random_state=seed)
        self.heard: list[list[Any]] = []

    def on_trial_result(self, trial_id: str, result: Result) -> None:
        """See the base."""
        self.heard.append([trial_id, result[TRAINING_ITERATION]])

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """See the base."""
        super().on_trial_complete(trial_id, result, error)
        self.heard.append([trial_id, "error" if error else "complete"])

    def state(self) -> dict[str, Any]:
        """See the base."""
        return {**super().state(), "heard": [list(each) for each in self.heard]}

    def restore_state(self, state: dict[str, Any]) -> None:
        """See the base."""
        self.heard = [list(each) for each in state["heard"]]
        super().restore_state(state)


def scheduler_of(name: str, seed: int) -> TrialScheduler:
    """The scheduler of a name."""
    match name:
        case "asha":
            return AsyncHyperBandScheduler(metric="score", mode="max", max_t=STEPS, grace_period=2, reduction_factor=2)
        case "pbt":
            return PopulationBasedTraining(
                time_attr=TRAINING_ITERATION,
                metric="score",
                mode="max",
                perturbation_interval=3,
                hyperparam_mutations={"level": [0.5, 1.0, 2.0]},
                seed=seed,
            )
    return TrialScheduler()


async def run(directory: Path, scheduler: str, seed: int) -> None:
    """Runs, or goes on with, the experiment."""
    experiment = Experiment(
        NAME,
        "perf.chaos.tune.counting:Counting",
        config={"level": uniform(0.5, 2.0), "steps": STEPS},
        num_samples=TRIALS,
        local_dir=str(directory),
        checkpoint_freq=2,
        keep_checkpoints_num=2,
        max_failures=MAX_FAILURES,
    )
    algorithm = Recorder(seed)
    algorithm.add_configurations([experiment])
    runner = TrialRunner(
        algorithm,
        scheduler_of(scheduler, seed),
        local_checkpoint_dir=experiment.directory,
        resume="AUTO",
        trial_executor=LocalTrialExecutor(cpus=3),
        callbacks=with_default_loggers(None),
        metric="score",
        checkpoint_period=0.5,
    )
    try:
        while not runner.is_finished():
            await runner.step_async()
    finally:
        await runner.cleanup()
    write_atomically(directory / HEARD, json.dumps(algorithm.heard).encode())


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
