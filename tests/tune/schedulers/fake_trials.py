"""Trials for a scheduler under test: what it asks for is noted, and done at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.result import Result
from counterpoint.tune.schedulers.scheduler import Trials, TrialScheduler
from counterpoint.tune.trial import Trial


class FakeTrials(Trials):
    """Trials `t0`, `t1`, ... that a test moves by hand."""

    def __init__(self, scheduler: TrialScheduler) -> None:
        self.scheduler = scheduler
        self.trials: list[Trial] = []
        self.exploited: list[tuple[str, str, dict[str, Any]]] = []
        """Who took over whose checkpoint, by path, with which configuration."""
        self.stopped: list[str] = []
        self.free = True
        """Whether there are resources for any trial."""

    def add(self, config: dict[str, Any] | None = None, status: str = Trial.RUNNING) -> Trial:
        number = len(self.trials)
        trial = Trial("m:trained", config or {}, f"t{number}", experiment_tag=f"{number}_tag", status=status)
        self.trials.append(trial)
        self.scheduler.on_trial_add(self, trial)
        return trial

    def report(self, trial: Trial, time: float, score: float) -> str:
        """Gives the scheduler a result and does what it decides."""
        result = {"training_iteration": time, "score": score}
        trial.last_result = result
        decision = self.scheduler.on_trial_result(self, trial, result)
        if decision == TrialScheduler.STOP:
            self.scheduler.on_trial_complete(self, trial, result)
            trial.status = Trial.TERMINATED
        elif decision == TrialScheduler.PAUSE:
            trial.status = Trial.PAUSED
        return decision

    def fail(self, trial: Trial) -> None:
        trial.status = Trial.ERROR
        self.scheduler.on_trial_error(self, trial)

    def statuses(self) -> list[str]:
        return [trial.status for trial in self.trials]

    # --- Trials ---

    def get_trials(self) -> Sequence[Trial]:
        return self.trials

    def get_trial(self, trial_id: str) -> Trial:
        return self.trials[int(trial_id[1:])]

    def with_status(self, status: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == status]

    def has_resources_for_trial(self, trial: Trial) -> bool:
        return self.free

    def first_startable(self, status: str) -> Trial | None:
        return next(iter(self.with_status(status)), None)

    def save_trial(self, trial: Trial, result: Result) -> Checkpoint:
        iteration = result["training_iteration"]
        return Checkpoint(trial.trial_id, iteration, f"/{trial.trial_id}/{iteration}")

    def exploit(self, trial: Trial, source: Checkpoint, config: dict[str, Any], experiment_tag: str) -> None:
        self.exploited.append((trial.trial_id, source.path, config))
        trial.config, trial.experiment_tag = config, experiment_tag

    def pause_trial(self, trial: Trial) -> None:
        trial.status = Trial.PAUSED

    def unpause_trial(self, trial: Trial) -> None:
        trial.status = Trial.PENDING

    def stop_trial(self, trial: Trial) -> None:
        self.stopped.append(trial.trial_id)
        self.scheduler.on_trial_remove(self, trial)
        trial.status = Trial.TERMINATED
