"""Decides which evaluation is next, as policy versions come. Pure: `evaluations.py` plays it.

An evaluation is due at the first version unless it says otherwise, at the first that reaches or passes a multiple of its
interval, and at the last one. One is played at a time. If a newer version is due before an older one of the same evaluation has
begun, the older one is skipped. So a slow evaluation measures fewer versions, and none piles up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from counterpoint.run.evaluations import EvaluationConfig


class DueEvaluations:
    """The evaluations that wait, by name with their due version."""

    def __init__(
        self, evaluations: Sequence[EvaluationConfig], begun: int, steps: int, done: Mapping[str, int]
    ) -> None:
        """`begun` and `steps` are the run's first and last version, `done` the newest evaluated version of each evaluation."""
        self._intervals = {evaluation.name: evaluation.interval for evaluation in evaluations}
        self._steps = steps
        self._newest = {each.name: begun for each in evaluations if not each.at_start}
        self._newest |= {name: version for name, version in done.items() if name in self._intervals}
        """The newest version that was due, by name."""
        self._waiting: dict[str, int] = {}

    def version_loaded(self, version: int) -> list[tuple[str, int | None]]:
        """Returns the evaluations that are due at `version`, each with the version that it skips, or None."""
        due = [name for name in self._intervals if self._is_due(name, version)]
        skipped = [(name, self._waiting.pop(name, None)) for name in due]
        for name in due:
            self._newest[name] = self._waiting[name] = version
        return skipped

    def wait_again(self, name: str, version: int) -> None:
        """Adds an evaluation that was interrupted, by name and version."""
        if version > self._newest.get(name, -1):
            self._newest[name] = self._waiting[name] = version

    def next(self) -> tuple[str, int] | None:
        """Removes and returns the evaluation that waits for the oldest version, or returns None."""
        if not self._waiting:
            return None
        name = min(self._waiting, key=lambda each: self._waiting[each])
        return name, self._waiting.pop(name)

    @property
    def any_waiting(self) -> bool:
        """Whether an evaluation waits."""
        return bool(self._waiting)

    @property
    def all_begun(self) -> bool:
        """Whether every evaluation of the last version has begun."""
        return not self._waiting and all(self._newest.get(name, -1) >= self._steps for name in self._intervals)

    def _is_due(self, name: str, version: int) -> bool:
        newest, interval = self._newest.get(name), self._intervals[name]
        if newest is None:
            return True
        return version > newest and (version // interval > newest // interval or version >= self._steps)
