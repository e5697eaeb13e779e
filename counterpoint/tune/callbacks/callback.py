"""The contract of a callback: what hears of every event of an experiment, and decides nothing. As `Callback` in Ray Tune 1.x.

The runner calls it outside its state machine, one call at a time and always from the same thread, in the order of the events.
A callback that raises ends nothing: `Callbacks` logs the traceback once a method and the experiment goes on.

Iteration counting, as Ray Tune documents it: `iteration` is the number of completed steps of the runner's loop; it is increased
before `on_step_end`, so `on_step_begin` of the first step sees 0 and its `on_step_end` sees 1. It counts on after a resume.

Info keys: every method has `**info` for what later versions add, so an override must take it. `on_trial_save` has `checkpoint`
(`tune.checkpoint.Checkpoint`, durable).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial

if TYPE_CHECKING:
    from counterpoint.tune.checkpoint import Checkpoint
    from counterpoint.tune.stoppers.stopper import Stopper

logger = logging.getLogger(__name__)


class Callback:
    """Hears of every event. The base does nothing."""

    def setup(
        self,
        stop: Stopper | None = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        """Called once in a process, before the first step, also after a resume (`restore_state` was called before, then)."""

    def on_step_begin(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Called at the start of a step of the runner's loop."""

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Called at the end of a step; the counter has been increased."""

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Called when a trial has started: the first time, after a failure, and after a pause."""

    def on_trial_restore(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Called after `on_trial_start` when the trial began from a checkpoint, and after a restore in place."""

    def on_trial_save(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, checkpoint: Checkpoint, **info: Any
    ) -> None:
        """Called when a checkpoint of the trial is durable."""

    def on_trial_result(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, result: Result, **info: Any
    ) -> None:
        """Called for each result, once the search algorithm and the scheduler have been told."""

    def on_trial_complete(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Called once, when the trial is TERMINATED, also by a scheduler or a stopper."""

    def on_trial_recover(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Called when the trial has failed and will be started again."""

    def on_trial_fail(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: Any) -> None:
        """Called once, when the trial is in ERROR: it has failed for good."""

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """Called once, when the experiment is over; close here what is open."""

    def state(self) -> dict[str, Any]:
        """All that must survive a restart, as JSON values."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""


class Callbacks:
    """The callbacks of an experiment: what the runner calls. One that raises is logged, and the others still hear."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = list(callbacks)
        self._told: set[tuple[int, str]] = set()

    def notify(self, method: str, **arguments: Any) -> None:
        """Calls a method of `Callback` of each, with the arguments by name."""
        for index, callback in enumerate(self.callbacks):
            self._call(index, callback, method, **arguments)

    def state(self) -> dict[str, Any]:
        """The states of all, in their order; empty for one that raises."""
        return {
            "callbacks": [self._call(index, callback, "state") or {} for index, callback in enumerate(self.callbacks)]
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned; the callbacks must be the same, in the same order."""
        for index, (callback, saved) in enumerate(zip(self.callbacks, state["callbacks"], strict=False)):
            self._call(index, callback, "restore_state", saved)

    def _call(self, index: int, callback: Callback, method: str, *given: Any, **arguments: Any) -> Any:
        try:
            return getattr(callback, method)(*given, **arguments)
        except Exception:
            if (index, method) not in self._told:
                self._told.add((index, method))
                logger.exception("%s.%s failed; it will not be logged again", type(callback).__qualname__, method)
            return None
