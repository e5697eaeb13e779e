"""The contract of a search algorithm: what proposes trials and hears of their results. As `SearchAlgorithm` in Ray Tune 1.x.

It runs outside the experiment's state machine, in a thread of its own, so that a slow model (a Gaussian process) delays nothing
but the next proposal. All calls come from that one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.experiment import Experiment
from counterpoint.tune.result import Result
from counterpoint.tune.trial import Trial


def undefined(search: object, method: str) -> TuneError:
    """Returns the error of a method that a user's class must have."""
    return TuneError(f"{type(search).__name__} defines no {method}; write it")


class Learning:
    """What search algorithms and searchers have in common: they hear of results, and outlive a restart."""

    def on_trial_result(self, trial_id: str, result: Result) -> None:
        """Hears of each result."""

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """Hears once that a trial has ended: with its last result, or None if it never reported; `error` if it failed."""

    def state(self) -> dict[str, Any]:
        """All that must survive a restart, as JSON values."""
        raise undefined(self, "state(), which returns all that it has learned as JSON values, for a resume")

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned; what is proposed then is what would have been proposed without the restart."""
        raise undefined(self, "restore_state(state), which takes back what state() returned")


class SearchAlg(Learning):
    """Proposes trials until it is finished."""

    max_pending_trials: int = 1
    """How many trials may be PENDING before it is asked for no more. What learns from results proposes late, so 1."""

    max_concurrent: int = 0
    """How many of its trials may run at a time, one that is being stopped included; 0 for any number."""

    @property
    def total_samples(self) -> int:
        """How many trials it will propose in all, as far as is known; 0 if unknown."""
        return 0

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any]) -> bool:
        """Takes the experiment's metric, mode and space, if it has none of its own.

        Returns:
            False if it has its own and they are not to be replaced.
        """
        return True

    def add_configurations(self, experiments: Sequence[Experiment]) -> None:
        """Takes the experiments whose trials it is to propose. Also called before `restore_state`."""
        raise undefined(self, "add_configurations(experiments)")

    def next_trial(self) -> Trial | None:
        """The next trial to add, or None if there is none now (see `is_finished`)."""
        raise undefined(self, "next_trial()")

    def is_finished(self) -> bool:
        """Whether `next_trial` will never return a trial again."""
        raise undefined(self, "is_finished()")


class NoSearch(SearchAlg):
    """Proposes nothing: for a runner whose trials are added by hand."""

    def add_configurations(self, experiments: Sequence[Experiment]) -> None:
        """Refuses experiments, which it would not search. Raises `TuneError`."""
        raise TuneError(
            f"{len(experiments)} experiments are given, and no search algorithm; give BasicVariantGenerator()"
        )

    def next_trial(self) -> Trial | None:
        """There is none."""
        return None

    def is_finished(self) -> bool:
        """Always."""
        return True

    def state(self) -> dict[str, Any]:
        """There is none."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """There is none."""
