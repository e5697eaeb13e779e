"""Our side: our schedulers over simulated trials, restored from their JSON state now and then."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.result import Result
from counterpoint.tune.schedulers.async_hyperband import AsyncHyperBandScheduler
from counterpoint.tune.schedulers.hyperband import HyperBandScheduler
from counterpoint.tune.schedulers.median_stopping import MedianStoppingRule
from counterpoint.tune.schedulers.pbt import PopulationBasedTraining
from counterpoint.tune.schedulers.scheduler import Trials, TrialScheduler
from counterpoint.tune.trial import Trial
from tests.tune.schedulers.differential.scenario import Scenario
from tests.tune.schedulers.differential.world import PAUSED, PENDING, RUNNING, TERMINATED, World


class OurSide(Trials):
    """A scheduler and the trials around it."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.scenario = scenario
        self.world = world
        self.scheduler = self.new_scheduler()

    def new_scheduler(self) -> TrialScheduler:
        arguments, seed = self.scenario.arguments, self.scenario.seed
        if self.scenario.scheduler == "asha":
            return AsyncHyperBandScheduler(**arguments, seed=seed)
        if self.scenario.scheduler == "hyperband":
            return HyperBandScheduler(**arguments)
        if self.scenario.scheduler == "median":
            return MedianStoppingRule(**arguments)
        return PopulationBasedTraining(
            **arguments,
            hyperparam_mutations=mutations(lambda: vars(self.scheduler)["_random"]),
            custom_explore_fn=custom_explore if self.scenario.custom_explore else None,
            seed=seed,
        )

    # --- Side ---

    def new_trial(self, trial_id: str, config: dict[str, Any], tag: str) -> Trial:
        return Trial("m:simulated", config, trial_id, experiment_tag=tag)

    def add(self, trial: Trial) -> None:
        self.scheduler.on_trial_add(self, trial)

    def result(self, trial: Trial, result: dict[str, Any]) -> str:
        trial.last_result = result
        decision = self.scheduler.on_trial_result(self, trial, result)
        if trial.trial_id in self.world.exploited:
            assert decision in ("PAUSE", "NOOP")
            trial.status = PAUSED if decision == "PAUSE" else RUNNING
        return decision

    def complete(self, trial: Trial, result: dict[str, Any]) -> None:
        self.scheduler.on_trial_complete(self, trial, result)

    def remove(self, trial: Trial) -> None:
        self.scheduler.on_trial_remove(self, trial)

    def error(self, trial: Trial) -> None:
        self.scheduler.on_trial_error(self, trial)

    def choose(self) -> Trial | None:
        return self.scheduler.choose_trial_to_run(self)

    def pause(self, trial: Trial) -> None:
        trial.status = PAUSED

    def between_events(self, draws: random.Random) -> None:
        if draws.random() < 0.03:
            state = json.loads(json.dumps(self.scheduler.state(), allow_nan=False))
            self.scheduler = self.new_scheduler()
            self.scheduler.restore_state(state)

    # --- Trials ---

    def get_trials(self) -> Sequence[Trial]:
        return self.world.trials

    def get_trial(self, trial_id: str) -> Trial:
        return next(trial for trial in self.world.trials if trial.trial_id == trial_id)

    def with_status(self, status: str) -> list[Trial]:
        return [trial for trial in self.world.trials if trial.status == status]

    def has_resources_for_trial(self, trial: Trial) -> bool:
        return True

    def first_startable(self, status: str) -> Trial | None:
        return next(iter(self.with_status(status)), None)

    def save_trial(self, trial: Trial, result: Result) -> Checkpoint:
        if trial.status == RUNNING:
            self.world.saved(trial.trial_id)
        time = self.world.clock[trial.trial_id]
        return Checkpoint(trial.trial_id, time, f"/{trial.trial_id}/{time}")

    def exploit(self, trial: Trial, source: Checkpoint, config: dict[str, Any], experiment_tag: str) -> None:
        assert self.scheduler.needs_checkpoint(source)
        trial.config, trial.experiment_tag = config, experiment_tag
        self.world.took_over(trial.trial_id, source.trial_id, int(source.iteration), config, experiment_tag)

    def pause_trial(self, trial: Trial) -> None:
        raise AssertionError("none of the schedulers pauses another trial")

    def unpause_trial(self, trial: Trial) -> None:
        assert trial.status == PAUSED
        trial.status = PENDING
        self.world.unpaused(trial.trial_id)

    def stop_trial(self, trial: Trial) -> None:
        assert trial.status in (PAUSED, PENDING)
        self.world.stopped(trial.trial_id)
        self.scheduler.on_trial_remove(self, trial)
        trial.status = TERMINATED


def mutations(generator: Any) -> dict[str, Any]:
    """Each kind of mutation. The functions draw from the generator that the scheduler draws from."""
    return {
        "lr": lambda: generator().uniform(0.001, 1.0),
        "layers": lambda: generator().uniform(1, 20),
        "width": [16, 32, 64, 128],
        "flag": lambda: generator().random() < 0.5,
        "nested": {"a": lambda: generator().expovariate(1.0), "b": (1, 2, 3)},
    }


def custom_explore(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "lr": min(config["lr"], 0.5)}
