"""The base of an executor that is called: each method asks, and the blocking ones wait. As `TrialExecutor` in Ray Tune 1.x.

Derive from it to run trials somewhere else: `TrialRunner` drives such an executor (`counterpoint/tune/executors/polled.py`). The
executors of this project can be driven by the same calls (`counterpoint/tune/executors/called.py`); the runner drives them by
events instead.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from os import PathLike
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.resources import Resources
from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

Source = Checkpoint | str | PathLike[str]
"""A state to begin from: a checkpoint, or its path."""


class TrialExecutor:
    """Starts, stops, saves and restores trials. What interacts with the platform raises `NotImplementedError` here.

    The other methods are made of those, so that a class needs no more than `has_resources`, `start_trial`, `stop_trial`,
    `continue_training`, `get_next_available_trial` and `fetch_result`; with checkpoints also `save` and `restore`.
    """

    queue_trials: bool = False
    """Whether a trial that needs more than there is waits until there is more, as in a cluster that grows, instead of failing."""

    def __init__(self, queue_trials: bool = False) -> None:
        self.queue_trials = queue_trials

    # --- status and metadata ---

    def set_status(self, trial: Trial, status: str) -> None:
        """Gives a trial a status, and keeps its metadata if that is final. Raises `ValueError` for what is no status."""
        if status not in Trial.STATUSES:
            raise ValueError(f"{trial}: {status!r} is no status; expected one of {', '.join(Trial.STATUSES)}")
        trial.status = status
        if trial.is_finished():
            self.try_checkpoint_metadata(trial)

    def try_checkpoint_metadata(self, trial: Trial) -> None:
        """Keeps what is known of a trial; a value that is no data is logged, and the former metadata stay."""
        try:
            self._metadata()[trial.trial_id] = json.dumps(trial.as_dict(), default=_plain)
        except TypeError as error:
            logger.warning("%s: its metadata are not kept: %s", trial, error)

    def get_checkpoints(self) -> dict[str, str]:
        """A copy of the metadata that are kept, as JSON by trial id."""
        return dict(self._metadata())

    def _metadata(self) -> dict[str, str]:
        kept: dict[str, str] = self.__dict__.setdefault("_kept_metadata", {})  # a subclass may not call our __init__
        return kept

    # --- resources ---

    def has_resources(self, resources: Resources) -> bool:
        """Whether these resources are free now."""
        raise NotImplementedError(f"{type(self).__name__} does not define has_resources(resources)")

    def has_gpus(self) -> bool:
        """Whether any trial could get a GPU here."""
        return False

    def resource_string(self) -> str:
        """Used and total resources in one line."""
        raise NotImplementedError(f"{type(self).__name__} does not define resource_string()")

    def debug_string(self) -> str:
        """One line for people."""
        return self.resource_string()

    # --- the life of a trial ---

    def start_trial(self, trial: Trial, checkpoint: Source | None = None, train: bool = True) -> bool | None:
        """Starts a trial, from a checkpoint if there is one. With `train` it works towards its first result at once.

        Returns:
            False if it could not be started; its status is ERROR then.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define start_trial(trial, checkpoint, train)")

    def stop_trial(
        self, trial: Trial, error: bool = False, error_msg: str | None = None, stop_logger: bool = True
    ) -> None:
        """Ends a trial and frees its resources; the status is ERROR with `error`, or if that fails, else TERMINATED.

        Raises nothing. `stop_logger` also closes the trial's `loggers`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define stop_trial(trial, error, ...)")

    def continue_training(self, trial: Trial) -> None:
        """Lets a trial work towards its next result."""
        raise NotImplementedError(f"{type(self).__name__} does not define continue_training(trial)")

    def pause_trial(self, trial: Trial) -> None:
        """Saves a trial, ends its work and frees its resources. It is PAUSED then, or in ERROR if that fails."""
        try:
            saved = self.save(trial)
            if saved is not None:
                trial.checkpoint = as_checkpoint(saved, trial)
            self.stop_trial(trial, stop_logger=False)
        except Exception as error:
            logger.exception("%s could not be paused", trial)
            self.stop_trial(trial, error=True, error_msg=f"it could not be paused: {error}")
        else:
            self.set_status(trial, Trial.PAUSED)

    def unpause_trial(self, trial: Trial) -> None:
        """Makes a PAUSED trial PENDING, so that it may be started. Raises `TuneError` for one that is not PAUSED."""
        _require_paused(trial, "unpaused")
        self.set_status(trial, Trial.PENDING)

    def resume_trial(self, trial: Trial) -> None:
        """Starts a PAUSED trial from its checkpoint, and waits until it has started. Raises `TuneError` for any other."""
        _require_paused(trial, "resumed")
        self.start_trial(trial, trial.checkpoint)

    def reset_trial(
        self,
        trial: Trial,
        new_config: dict[str, Any],
        new_experiment_tag: str,
        logger_creator: Callable[[dict[str, Any]], Any] | None = None,
    ) -> bool:
        """Gives a running trial another configuration in place.

        Returns:
            False if it cannot take one: then it must be stopped and started again.
        """
        return False

    def get_running_trials(self) -> list[Trial]:
        """The trials that have been started and not been stopped."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_running_trials()")

    # --- results ---

    def get_next_available_trial(self) -> Trial | None:
        """Waits until one trial has a result or has failed, and returns it; None if nothing runs that could."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_next_available_trial()")

    def get_next_failed_trial(self) -> Trial | None:
        """A trial whose node or process was lost, each once; None if there is none. Does not wait."""
        return None

    def fetch_result(self, trial: Trial) -> Result:
        """The next result of a trial that runs. Raises what the trial raised."""
        raise NotImplementedError(f"{type(self).__name__} does not define fetch_result(trial)")

    # --- checkpoints ---

    def save(self, trial: Trial, storage: str = Checkpoint.PERSISTENT, result: Result | None = None) -> Source | None:
        """Saves a trial; `result` is the last one before it, by default the trial's. None if that fails."""
        raise NotImplementedError(f"{type(self).__name__} does not define save(trial, storage, result)")

    def restore(self, trial: Trial, checkpoint: Source | None = None, block: bool = False) -> bool:
        """Takes a running trial back to a checkpoint, by default its newest. False if that fails; its status is ERROR then.

        With `block` it waits until that has happened.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define restore(trial, checkpoint, block)")

    def export_trial_if_needed(self, trial: Trial) -> dict[str, str]:
        """Exports a trial in its `export_formats`. Returns the paths of what was exported, by format."""
        return {}

    # --- the loop of a runner ---

    def on_step_begin(self, trial_runner: Any) -> None:
        """Called before each step of the runner."""

    def on_step_end(self, trial_runner: Any) -> None:
        """Called after each step of the runner."""

    def cleanup(self, trial: Trial | None = None) -> None:
        """Ends what is left of a trial after its end; without one, all that this executor has started."""


def as_checkpoint(source: Source, trial: Trial) -> Checkpoint:
    """A checkpoint of this trial of what a user gave or a user's executor returned: one, or a path.

    Raises `TuneError` for anything else, such as an object in memory: it would be lost with the process.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, str | PathLike):
        iteration = trial.last_result.get("training_iteration", 0)
        return Checkpoint(trial.trial_id, iteration, str(source), trial.last_result)
    raise TuneError(
        f"{trial}: {source!r} is a {type(source).__name__}; expected a tune.Checkpoint or a path, which outlives this process"
    )


def _require_paused(trial: Trial, wanted: str) -> None:
    if trial.status != Trial.PAUSED:
        raise TuneError(f"{trial} is {trial.status} and cannot be {wanted}; expected it to be PAUSED")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{value!r} is no JSON")
