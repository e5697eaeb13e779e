"""Ray's side: its schedulers over a light controller and trials of the shape that they use. Ray itself is not started."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.tune.schedulers import trial_scheduler

from tests.tune.schedulers.differential.ours import custom_explore, mutations
from tests.tune.schedulers.differential.reference import CORRECTED, PLAIN
from tests.tune.schedulers.differential.scenario import Scenario
from tests.tune.schedulers.differential.world import ERROR, PAUSED, RUNNING, TERMINATED, World

trial_scheduler.tag_scheduler = lambda scheduler: None  # It would report the use of Ray.


class RayTrial:
    """What Ray's schedulers read of a trial, and set."""

    is_saving = False

    def __init__(self, trial_id: str, config: dict[str, Any], tag: str, world: World) -> None:
        self.trial_id = trial_id
        self.config = config
        self.experiment_tag = tag
        self.status = "PENDING"
        self.evaluated_params: dict[str, Any] = {}
        self.last_result: dict[str, Any] = {}
        self.temporary_state = SimpleNamespace(saving_to=None)
        self.checkpoint: Any = None
        self.run_metadata = SimpleNamespace(checkpoint_manager=CheckpointManager(self, world))
        self.local_experiment_path = self.local_dir = ""

    def is_finished(self) -> bool:
        return self.status in (TERMINATED, ERROR)

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag


class CheckpointManager:
    """Notices what a trial is to go on from: PBT sets it last."""

    checkpoint_config = SimpleNamespace(num_to_keep=None)

    def __init__(self, trial: RayTrial, world: World) -> None:
        self.trial = trial
        self.world = world

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "_latest_checkpoint_result":
            source = value.checkpoint
            trial = self.trial
            trial.checkpoint = SimpleNamespace(trial_id=trial.trial_id, time=source.time)
            self.world.took_over(trial.trial_id, source.trial_id, source.time, trial.config, trial.experiment_tag)


class RaySide:
    """A scheduler of Ray's, and a controller around it."""

    search_alg = SimpleNamespace(searcher=SimpleNamespace(on_pause=lambda trial_id: None))
    directory = ""
    """For the policy files, which are off otherwise."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.scenario = scenario
        self.world = world
        arguments = dict(scenario.arguments)
        if scenario.scheduler.startswith("pbt"):
            arguments["hyperparam_mutations"] = mutations(lambda: random)
            arguments["custom_explore_fn"] = custom_explore if scenario.custom_explore else None
            arguments["log_config"] = False
        self.scheduler = (PLAIN if scenario.plain else CORRECTED)[scenario.scheduler](**arguments)
        if scenario.scheduler == "hyperband":
            self.scheduler._unpause_trial = self.unpaused
        seeded = random.Random(scenario.seed).getstate()
        random.setstate(seeded)  # noqa: TID251 - Ray draws from the global generator
        np.random.set_state(("MT19937", np.array(seeded[1][:-1], dtype=np.uint32), int(seeded[1][-1]), 0, 0.0))

    # --- Side ---

    def new_trial(self, trial_id: str, config: dict[str, Any], tag: str) -> RayTrial:
        trial = RayTrial(trial_id, config, tag, self.world)
        trial.local_dir = trial.local_experiment_path = self.directory
        return trial

    def add(self, trial: RayTrial) -> None:
        self.scheduler.on_trial_add(self, trial)

    def result(self, trial: RayTrial, result: dict[str, Any]) -> str:
        decision: str = self.scheduler.on_trial_result(self, trial, result)
        if trial.trial_id in self.world.exploited and not self.scenario.arguments["synch"]:
            others = [
                other for other in self.world.trials if other.status in ("PENDING", PAUSED) and other is not trial
            ]
            if not others:  # Ray pauses it and starts it at once; we change it in place.
                assert self.choose() is trial
                trial.status = RUNNING
        return decision

    def complete(self, trial: RayTrial, result: dict[str, Any]) -> None:
        self.scheduler.on_trial_complete(self, trial, result)

    def remove(self, trial: RayTrial) -> None:
        self.scheduler.on_trial_remove(self, trial)

    def error(self, trial: RayTrial) -> None:
        self.scheduler.on_trial_error(self, trial)

    def choose(self) -> RayTrial | None:
        chosen: RayTrial | None = self.scheduler.choose_trial_to_run(self)
        return chosen

    def pause(self, trial: RayTrial) -> None:
        trial.status = PAUSED
        trial.checkpoint = self._schedule_trial_save(trial)

    def between_events(self, draws: random.Random) -> None:
        draws.random()

    # --- the controller that the scheduler sees ---

    def get_trials(self) -> list[RayTrial]:
        return self.world.trials

    def get_live_trials(self) -> list[RayTrial]:
        return [trial for trial in self.world.trials if not trial.is_finished()]

    def stop_trial(self, trial: RayTrial) -> None:
        assert trial.status == PAUSED
        self.world.stopped(trial.trial_id)
        self.scheduler.on_trial_remove(self, trial)
        trial.status = TERMINATED

    def unpaused(self, controller: Any, trial: RayTrial) -> None:
        bracket, _ = self.scheduler._trial_info[trial]
        if trial not in bracket.trials_to_unpause:
            self.world.unpaused(trial.trial_id)

    def pause_trial(self, trial: RayTrial, should_checkpoint: bool = True) -> None:
        trial.status = PAUSED

    def _schedule_trial_save(self, trial: RayTrial, result: Any = None) -> SimpleNamespace:
        if trial.status == RUNNING:
            self.world.saved(trial.trial_id)
        return SimpleNamespace(trial_id=trial.trial_id, time=self.world.clock[trial.trial_id])
