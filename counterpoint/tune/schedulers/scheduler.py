"""The contract of a trial scheduler, and what it may see and ask for while it decides.

A scheduler is called by the experiment's state machine for each event of a trial. It has no clock and does no I/O; its random
choices come from a generator of its own with a seed, so that the same results give the same decisions. The names and meanings
are those of `TrialScheduler` in Ray Tune 1.x.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.result import DEFAULT_METRIC, Result
from counterpoint.tune.trial import Trial


class Trials(Protocol):
    """What a scheduler sees of the experiment and may ask of it. Each request becomes an instruction of the state machine."""

    def get_trials(self) -> Sequence[Trial]:
        """Every trial, in the order of creation. Schedulers that are called for each result should not walk over it."""

    def get_trial(self, trial_id: str) -> Trial:
        """The trial with this id. State of a scheduler names trials by id, since it is JSON."""

    def with_status(self, status: str) -> Collection[Trial]:
        """The trials of a status, in no particular order. Costs nothing to get or to ask whether it is empty."""

    def has_resources_for_trial(self, trial: Trial) -> bool:
        """Whether what the trial needs is free now."""

    def first_startable(self, status: str) -> Trial | None:
        """The first trial of a status, in the order of creation, for which resources are free. Does not walk over trials."""

    def save_trial(self, trial: Trial, result: Result) -> Checkpoint:
        """Asks for a checkpoint of a running trial after this result. What is returned is durable before anyone restores it.

        For a trial that is paused, or is being paused, it returns the checkpoint of that pause. The file is kept as long as
        `needs_checkpoint` says so; if it cannot be written, `on_save_failed` follows.
        """

    def exploit(self, trial: Trial, source: Checkpoint, config: dict[str, Any], experiment_tag: str) -> None:
        """Makes the trial go on from another trial's checkpoint with a new configuration; it stays the same trial.

        With NOOP from `on_trial_result` it goes on at once. With PAUSE, or if it is paused already, it goes on so at its next
        start: its own state is given up, and a checkpoint of it is not needed. If the source never becomes durable, the trial
        goes on as it was.
        """

    def pause_trial(self, trial: Trial) -> None:
        """Pauses a running trial after a checkpoint. For its own trial, `on_trial_result` may return PAUSE instead."""

    def unpause_trial(self, trial: Trial) -> None:
        """Makes a PAUSED trial, or one that is being paused, PENDING again, so that `choose_trial_to_run` may pick it."""

    def stop_trial(self, trial: Trial) -> None:
        """Ends a trial, whatever its status; the scheduler hears of it as of any other end, perhaps before this returns.

        For its own trial, `on_trial_result` may return STOP instead.
        """


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
    """Whether the metric is to be small (`min`) or large (`max`)."""

    def set_search_properties(self, metric: str | None, mode: str | None) -> bool:
        """Takes the experiment's metric and mode. With a mode alone, the metric is `_metric`: what a bare number is reported as.

        Returns:
            False if it has its own and they are not to be replaced.
        """
        if (self.metric and metric) or (self.mode and mode):
            return False
        self.metric, self.mode = self.metric or metric, self.mode or mode
        if self.mode and not self.metric:
            self.metric = DEFAULT_METRIC
        return True

    def callbacks(self) -> Sequence[Callback]:
        """Callbacks of its own, for what it writes. The runner calls them like the experiment's."""
        return ()

    def needs_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Whether it may still hand this checkpoint to `exploit`; while it may, its files are not deleted."""
        return False

    def on_save_failed(self, trials: Trials, checkpoint: Checkpoint) -> None:
        """Called when what `save_trial` returned could not be written, and will never be durable."""

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Called once, when a trial joins the experiment, before it is recorded.

        Only here a scheduler may complete `config` and `evaluated_params` itself.
        """

    def on_trial_error(self, trials: Trials, trial: Trial) -> None:
        """Called when a trial has failed for good."""

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        """Called for each result of a running trial, before the trial goes on.

        Returns:
            CONTINUE, PAUSE, STOP or NOOP.
        """
        return self.CONTINUE

    def on_trial_complete(self, trials: Trials, trial: Trial, result: Result) -> None:
        """Called once when a trial ends that was RUNNING and did not fail, also after STOP; with its last result."""

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


class FIFOScheduler(TrialScheduler):
    """Stops nothing: trials start in the order in which they were added, and run to their end."""
