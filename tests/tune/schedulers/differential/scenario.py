"""What one stream is made of: a scheduler with its arguments, and how the trials behave. Drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SCHEDULERS = ("asha", "hyperband", "median", "pbt", "pbt_synch")


@dataclass(frozen=True)
class Scenario:
    """One stream."""

    scheduler: str
    seed: int
    plain: bool
    """Ray's own class as it is, on a stream without what it is corrected for. Else the corrected one, and all may happen."""
    arguments: dict[str, Any]
    trials: int
    late_trials: int
    slots: int
    events: int
    ties: bool
    """Scores are multiples of 1/4, so that many are equal and sums are exact; else they are any numbers."""
    custom_explore: bool = False


def scenario(scheduler: str, seed: int) -> Scenario:
    draws = random.Random(f"{scheduler} {seed}")
    plain = draws.random() < 0.5
    arguments: dict[str, Any] = {
        "metric": "score",
        "mode": draws.choice(["min", "max"]),
        "time_attr": "training_iteration",
    }
    arguments |= ARGUMENTS[scheduler](draws, plain)
    trials = draws.randint(2, 24)
    return Scenario(
        scheduler=scheduler,
        seed=seed,
        plain=plain,
        arguments=arguments,
        trials=trials,
        late_trials=draws.choice([0, 0, 3, 10]),
        slots=draws.choice([1, 3, 8, 40]),
        events=draws.choice([40, 120, 300]),
        ties=draws.random() < 0.6,
        custom_explore=draws.random() < 0.2,
    )


def _asha(draws: random.Random, plain: bool) -> dict[str, Any]:
    return {
        "max_t": draws.choice([4, 9, 16, 27, 100]),
        "grace_period": draws.choice([1, 1, 2, 4]),
        # Below 2 a step of 1 may jump over a rung.
        "reduction_factor": draws.choice([2, 3, 4, 2.5] if plain else [2, 3, 4, 1.5, 1.1]),
        "brackets": draws.choice([1, 1, 2, 3]),
        "stop_last_trials": draws.random() < 0.7,
    }


def _hyperband(draws: random.Random, plain: bool) -> dict[str, Any]:
    return {
        "max_t": draws.choice([1, 3, 4, 9, 10, 16, 27]),
        "reduction_factor": draws.choice([2, 3, 4, 2.5]),
        "stop_last_trials": draws.random() < 0.7,
    }


def _median(draws: random.Random, plain: bool) -> dict[str, Any]:
    return {
        "grace_period": draws.choice([0, 1, 3, 5]),
        "min_samples_required": draws.choice([1, 2, 3, 5]),
        "min_time_slice": draws.choice([0, 0, 2, 5]),
        # What Ray counts twice, it counts after a stop.
        "hard_stop": not plain and draws.random() < 0.7,
    }


def _pbt(draws: random.Random, plain: bool) -> dict[str, Any]:
    return {
        "perturbation_interval": draws.choice([1, 2, 3, 5]),
        "burn_in_period": draws.choice([0, 0, 4]),
        "quantile_fraction": draws.choice([0.0, 0.125, 0.25, 0.25, 0.4, 0.5]),
        "resample_probability": draws.choice([0.0, 0.25, 0.25, 1.0]),
        "perturbation_factors": draws.choice([(1.2, 0.8), (2.0, 0.5), (1.1, 1.0, 0.9)]),
        "require_attrs": False,
        "synch": False,
    }


def _pbt_synch(draws: random.Random, plain: bool) -> dict[str, Any]:
    return {**_pbt(draws, plain), "synch": True}


ARGUMENTS = {
    "asha": _asha,
    "hyperband": _hyperband,
    "median": _median,
    "pbt": _pbt,
    "pbt_synch": _pbt_synch,
}
