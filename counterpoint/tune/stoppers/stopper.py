"""The contract of a stopper: whether a trial has reported for long enough, and whether the whole experiment has. As Ray Tune's.

It may have a clock, so the runner asks it outside the state machine: `__call__` for each result of a running trial, in order
and once a result, then `stop_all`, which is also asked when no result came for a while.
"""

from __future__ import annotations

from typing import Any

from counterpoint.tune.result import Result


class Stopper:
    """Decides when to stop. The base never does."""

    def __call__(self, trial_id: str, result: Result) -> bool:
        """Whether the trial ends with this result."""
        return False

    def stop_all(self) -> bool:
        """Whether every trial ends now and no other starts."""
        return False

    def state(self) -> dict[str, Any]:
        """All that must survive a restart, as JSON values."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""

    def catch_up(self, state: dict[str, Any]) -> None:
        """Takes the time that has passed from a state that was saved later than the one that was restored.

        Between the two the results are told again, and the time is not: a stopper with a clock overrides this.
        """
