"""The contract of a trial scheduler, and what it may see and ask for while it decides.

A scheduler is called by the experiment's state machine for each event of a trial. It has no clock and does no I/O; its random
choices come from a generator of its own with a seed, so that the same results give the same decisions. The names and meanings
are those of `TrialScheduler` in Ray Tune 1.x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tune.checkpoint import Checkpoint
from tune.result import Result
from tune.trial import Trial


class Trials(Protocol):
    """What a scheduler sees of the experiment and may ask of it. Each request becomes an instruction of the state machine."""

    def get_trials(self) -> Sequence[Trial]:
        """Every trial, in the order of creation. Schedulers that are called for each result should not walk over it."""

    def has_resources_for_trial(self, trial: Trial) -> bool:
        """Whether what the trial needs is free now."""

    def first_startable(self, status: str) -> Trial | None:
        """The first trial of a status, in the order of creation, for which resources are free. Does not walk over trials."""

    def save_trial(self, trial: Trial, result: Result) -> Checkpoint:
        """Asks for a checkpoint of a running trial after this result. What is returned is durable before anyone restores it."""

    def exploit(self, trial: Trial, source: Checkpoint, config: dict[str, Any], experiment_tag: str) -> None:
        """Makes the trial go on from another trial's checkpoint with a new configuration; it stays the same trial."""

    def pause_trial(self, trial: Trial) -> None:
        """Pauses a running trial after a checkpoint. For its own trial, `on_trial_result` may return PAUSE instead."""

    def unpause_trial(self, trial: Trial) -> None:
        """Makes a PAUSED trial PENDING again, so that `choose_trial_to_run` may pick it."""

    def stop_trial(self, trial: Trial) -> None:
        """Ends a trial, whatever its status. For its own trial, `on_trial_result` may return STOP instead."""


class TrialScheduler:
    """Decides at each result whether a trial goes on, and which trial starts next. The base continues everything, in order.

    Whatever a callback raises ends the experiment with the scheduler's name and the traceback: a scheduler that fails has no
    state to trust.
    """

    CONTINUE = "CONTINUE"
    PAUSE = "PAUSE"
    STOP = "STOP"
    NOOP = "NOOP"
    """The scheduler has dealt with the trial itself, through `Trials`."""

    metric: str | None = None
    mode: str | None = None
    """`min` or `max`."""

    def set_search_properties(self, metric: str | None, mode: str | None) -> bool:
        """Takes the experiment's metric and mode.

        Returns:
            False if it has its own and they are not to be replaced.
        """
        if self.metric is not None and metric is not None:
            return False
        self.metric, self.mode = self.metric or metric, self.mode or mode
        return True

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Called once, when a trial joins the experiment."""

    def on_trial_error(self, trials: Trials, trial: Trial) -> None:
        """Called when a trial has failed for good."""

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        """Called for each result of a running trial, before the trial goes on.

        Returns:
            CONTINUE, PAUSE, STOP or NOOP.
        """
        return self.CONTINUE

    def on_trial_complete(self, trials: Trials, trial: Trial, result: Result) -> None:
        """Called when a trial has completed, with its last result."""

    def on_trial_remove(self, trials: Trials, trial: Trial) -> None:
        """Called when a trial that is PENDING or PAUSED is ended from outside."""

    def choose_trial_to_run(self, trials: Trials) -> Trial | None:
        """The PENDING (or, if none, PAUSED) trial to start next, for which resources are free; None to start none."""
        return trials.first_startable(Trial.PENDING) or trials.first_startable(Trial.PAUSED)

    def debug_string(self) -> str:
        """One line for the status display."""
        return type(self).__name__

    def state(self) -> dict[str, Any]:
        """All that must survive a restart, as JSON values."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned. Trials are named by id in it."""
