"""Population based training on a problem with a known optimum, beside random search with the same budget.

The toy problem of the paper (https://arxiv.org/abs/1711.09846, section 4.1): a model of two numbers is worth
`1.2 - theta0^2 - theta1^2`, which is at most 1.2, but a step descends only the slopes that the hyperparameter `h` weighs: one of
the two. No fixed `h` gets beyond 0.39, however often one draws. A population that copies its best models and changes their `h`
descends both.

    python examples/tune/two_slopes.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from counterpoint import tune
from counterpoint.tune import LocalTrialExecutor

OPTIMUM = 1.2

BEST_WITH_FIXED_H = OPTIMUM - 0.9**2
"""One of the two numbers stays where it began."""

ITERATIONS = 40

SLOPES = [[1.0, 0.0], [0.0, 1.0]]


class TwoSlopes(tune.Trainable):
    """A model of two numbers. Every iteration is ten small steps down the slopes that `h` weighs."""

    def setup(self, config: dict[str, Any]) -> None:
        """Begins far from the optimum."""
        self.theta = [0.9, 0.9]

    def step(self) -> dict[str, Any]:
        """Ten steps of gradient descent."""
        for _ in range(10):
            self.theta = [
                theta - 0.02 * 2 * weight * theta for theta, weight in zip(self.theta, self.config["h"], strict=True)
            ]
        return {"worth": OPTIMUM - sum(theta**2 for theta in self.theta)}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """The model."""
        return {"theta": self.theta}

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes back the model."""
        self.theta = checkpoint["theta"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Nothing but the config depends on it."""
        return True


def trained(scheduler: tune.TrialScheduler, directory: str, name: str, h: Any, num_samples: int) -> list[tune.Trial]:
    """The trials after 40 iterations each."""
    experiment = {
        "run": TwoSlopes,
        "config": {"h": h},
        "num_samples": num_samples,
        "stop": {"training_iteration": ITERATIONS},
        "local_dir": directory,
    }
    executor = LocalTrialExecutor(cpus=4, reuse_actors=True)
    return tune.run_experiments({name: experiment}, scheduler=scheduler, trial_executor=executor, verbose=0)


def population(directory: str) -> list[tune.Trial]:
    """Four trials that wait for each other every fourth iteration, when the two that are behind take over one ahead."""
    pbt = tune.PopulationBasedTraining(
        time_attr="training_iteration",
        metric="worth",
        mode="max",
        perturbation_interval=4,
        quantile_fraction=0.5,
        resample_probability=0.5,
        hyperparam_mutations={"h": SLOPES},
        synch=True,
    )
    return trained(pbt, directory, "population", tune.grid_search(SLOPES), num_samples=2)


def random_search(directory: str) -> list[tune.Trial]:
    """Four trials to the end."""
    return trained(tune.FIFOScheduler(), directory, "random_search", tune.choice(SLOPES), num_samples=4)


def replay(directory: str, trial: tune.Trial) -> list[tune.Trial]:
    """One trial, with the schedule of configurations that led to a trial of the population."""
    policy = Path(trial.local_dir) / f"pbt_policy_{trial.trial_id}.txt"
    return trained(tune.PopulationBasedTrainingReplay(str(policy)), directory, "replay", SLOPES[0], num_samples=1)


def best(trials: list[tune.Trial]) -> tune.Trial:
    """The trial that is worth most."""
    return max(trials, key=worth)


def worth(trial: tune.Trial) -> float:
    """What the model of a trial is worth."""
    return float(trial.last_result["worth"])


def main() -> None:
    """Prints what each reaches."""
    with tempfile.TemporaryDirectory() as directory:
        winner = best(population(directory))
        print(f"optimum                           {OPTIMUM:.4f}")
        print(f"population based training         {worth(winner):.4f}")
        print(f"one trial that replays its best   {worth(best(replay(directory, winner))):.4f}")
        print(f"random search, the same budget    {worth(best(random_search(directory))):.4f}")


if __name__ == "__main__":
    main()
