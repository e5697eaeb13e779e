"""Searchers around a searcher, as in Ray Tune 1.x: one limits how many trials are unfinished, one repeats each configuration."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import Result, number_in
from counterpoint.tune.search.searcher import Searcher
from counterpoint.tune.search.variants import copied

TRIAL_INDEX = "__trial_index__"
"""The key of a repeated configuration that counts the repeats from 0, such as for a seed."""


class _Wrapper(Searcher):
    def __init__(self, searcher: Searcher) -> None:
        if not isinstance(searcher, Searcher):
            raise TuneError(
                f"{type(self).__name__} wraps a Searcher, not a {type(searcher).__name__}; for BasicVariantGenerator use its "
                "max_concurrent"
            )
        super().__init__(searcher.metric, searcher.mode)
        self.searcher = searcher

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any]) -> bool:
        """Offers them to the inner searcher."""
        taken = self.searcher.set_search_properties(metric, mode, config)
        self.metric, self.mode = self.searcher.metric, self.searcher.mode
        return taken

    def on_trial_result(self, trial_id: str, result: Result) -> None:
        """Tells the inner searcher."""
        self.searcher.on_trial_result(trial_id, result)


class ConcurrencyLimiter(_Wrapper):
    """Suggests nothing while `max_concurrent` of its trials are unfinished.

    With `batch` it waits until all of them have ended, and only then tells the inner searcher of their results. Raises
    `TuneError` below 1.
    """

    def __init__(self, searcher: Searcher, max_concurrent: int, batch: bool = False) -> None:
        super().__init__(searcher)
        if max_concurrent < 1:
            raise TuneError(f"max_concurrent is {max_concurrent}; it must be at least 1")
        self.max_concurrent = max_concurrent
        self.batch = batch
        self._live: set[str] = set()
        self._ended: list[tuple[str, Result | None, bool]] = []  # of the batch

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The inner searcher's suggestion, if there is room."""
        if len(self._live) + len(self._ended) >= self.max_concurrent:
            return None
        suggestion = self.searcher.suggest(trial_id)
        if isinstance(suggestion, dict):
            self._live.add(trial_id)
        return suggestion

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """Makes room, and tells the inner searcher, now or at the end of the batch."""
        if trial_id not in self._live:
            return
        self._live.remove(trial_id)
        self._ended.append((trial_id, result, error))
        if self.batch and self._live:
            return
        ended, self._ended = self._ended, []
        for one in ended:
            self.searcher.on_trial_complete(*one)

    def state(self) -> dict[str, Any]:
        """What is unfinished, and the inner state."""
        ended = [list(one) for one in self._ended]
        return {"live": sorted(self._live), "ended": ended, "searcher": self.searcher.state()}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes both back."""
        self._live = set(state["live"])
        self._ended = [(trial_id, result, error) for trial_id, result, error in state["ended"]]
        self.searcher.restore_state(state["searcher"])


@dataclass
class _Group:
    """Trials of one configuration; the inner searcher knows the first only."""

    first: str
    config: dict[str, Any]
    scores: dict[str, list[float | None] | None]
    """The score of each trial; None while it is unfinished."""


class Repeater(_Wrapper):
    """Suggests each configuration `repeat` times and tells the inner searcher the mean of what they report.

    A repeat that failed, or has no number for the metric, is left out of the mean; if all are, the configuration has failed.
    With `set_index` each repeat finds its number in its configuration under `TRIAL_INDEX`. `num_samples` counts repeats.
    Raises `TuneError` if `repeat` is below 1.
    """

    def __init__(self, searcher: Searcher, repeat: int = 1, set_index: bool = True) -> None:
        super().__init__(searcher)
        if repeat < 1:
            raise TuneError(f"repeat is {repeat}; it must be at least 1")
        self.repeat = repeat
        self.set_index = set_index
        self._groups: list[_Group] = []  # the unfinished ones; only the last takes more trials

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The open group's configuration, or a new one of the inner searcher."""
        if not self._groups or len(self._groups[-1].scores) >= self.repeat:
            config = self.searcher.suggest(trial_id)
            if not isinstance(config, dict):
                return config
            self._groups.append(_Group(trial_id, copied(config), {}))
        group = self._groups[-1]
        index = len(group.scores)
        group.scores[trial_id] = None
        repeated: dict[str, Any] = copied(group.config)
        return repeated | ({TRIAL_INDEX: index} if self.set_index else {})

    def on_trial_result(self, trial_id: str, result: Result) -> None:
        """Tells the inner searcher of the first of each group only."""
        if any(group.first == trial_id for group in self._groups):
            self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """Tells the inner searcher once the group is complete."""
        group = next((group for group in self._groups if trial_id in group.scores), None)
        if group is None or group.scores[trial_id] is not None:
            return
        metrics = [self.metric] if isinstance(self.metric, str) else list(self.metric or [])
        values = [None if error else number_in(result, metric) for metric in metrics]
        group.scores[trial_id] = values
        if len(group.scores) < self.repeat or any(scores is None for scores in group.scores.values()):
            return
        self._groups.remove(group)
        columns = zip(*[scores for scores in group.scores.values() if scores is not None], strict=True)
        means = {metric: _mean(list(column)) for metric, column in zip(metrics, columns, strict=True)}
        failed = not means or any(mean is None for mean in means.values())
        self.searcher.on_trial_complete(group.first, None if failed else means, error=failed)

    def state(self) -> dict[str, Any]:
        """The unfinished groups, and the inner state."""
        return {"groups": [asdict(group) for group in self._groups], "searcher": self.searcher.state()}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes both back."""
        self._groups = [_Group(**group) for group in state["groups"]]
        self.searcher.restore_state(state["searcher"])


def _mean(column: list[float | None]) -> float | None:
    numbers = [value for value in column if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None
