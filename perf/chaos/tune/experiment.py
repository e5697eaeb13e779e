"""One experiment of the chaos, as a process that is killed and started again until it comes to its end.

    python -m perf.chaos.tune.experiment DIRECTORY SCHEDULER SEED

At the end it leaves beside the experiment's own files what the search algorithm has heard, as `heard.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from counterpoint import tune
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.tune.result import TRAINING_ITERATION, Result

TRIALS, STEPS, MAX_FAILURES = 6, 12, 4
NAME = "chaos"
HEARD = "heard.json"


class Recorder(tune.BasicVariantGenerator):
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


def scheduler_of(name: str, seed: int) -> tune.TrialScheduler:
    """The scheduler of a name."""
    match name:
        case "asha":
            return tune.AsyncHyperBandScheduler(
                metric="score", mode="max", max_t=STEPS, grace_period=2, reduction_factor=2
            )
        case "pbt":
            return tune.PopulationBasedTraining(
                time_attr=TRAINING_ITERATION,
                metric="score",
                mode="max",
                perturbation_interval=3,
                hyperparam_mutations={"level": [0.5, 1.0, 2.0]},
                seed=seed,
            )
    return tune.TrialScheduler()


def run(directory: Path, scheduler: str, seed: int) -> None:
    """Runs, or goes on with, the experiment."""
    algorithm = Recorder(seed)
    tune.run(
        "perf.chaos.tune.counting:Counting",
        name=NAME,
        config={"level": tune.uniform(0.5, 2.0), "steps": STEPS},
        num_samples=TRIALS,
        local_dir=str(directory),
        checkpoint_freq=2,
        keep_checkpoints_num=2,
        max_failures=MAX_FAILURES,
        search_alg=algorithm,
        scheduler=scheduler_of(scheduler, seed),
        resume="AUTO",
        trial_executor=tune.LocalTrialExecutor(cpus=3),
        checkpoint_period=0.5,
        raise_on_failed_trial=False,
    )
    write_atomically(directory / HEARD, json.dumps(algorithm.heard).encode())


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
