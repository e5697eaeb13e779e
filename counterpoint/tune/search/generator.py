"""Makes trials of what a searcher suggests: the search algorithm around every `Searcher`. As Ray's of the same name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from counterpoint.tune.errors import TuneError
from counterpoint.tune.experiment import Experiment
from counterpoint.tune.json_values import as_json
from counterpoint.tune.result import Result
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.search.searcher import Searcher
from counterpoint.tune.search.space_check import check_same_space, describe
from counterpoint.tune.search.spaces import Function
from counterpoint.tune.search.variants import (
    copied,
    flat_name,
    format_vars,
    is_grid,
    leaves,
    unresolved,
    value_at,
    variants,
)
from counterpoint.tune.trial import Trial


class SearchGenerator(SearchAlg):
    """Asks the searcher for each of `num_samples` trials of one experiment.

    What is suggested is put into the experiment's configuration; functions (`sample_from`) that stand in it are called then.
    """

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.max_concurrent = getattr(searcher, "max_concurrent", None) or 0  # of a user's searcher it may be None
        self._experiment: Experiment | None = None
        self._space: dict[str, str] = {}
        self._prefix = secrets.token_hex(3)[:5]
        self._created = 0
        self._finished = False

    @property
    def total_samples(self) -> int:
        """The experiment's `num_samples`; 0 if it is without end."""
        return 0 if self._experiment is None else max(0, self._experiment.num_samples)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any]) -> bool:
        """Offers them to the searcher."""
        return self.searcher.set_search_properties(metric, mode, config)

    def add_configurations(self, experiments: Sequence[Experiment]) -> None:
        """Takes the one experiment; its space goes to a searcher that has none. Raises `TuneError` for a second one."""
        if len(experiments) != 1 or self._experiment is not None:
            raise TuneError(
                f"{type(self.searcher).__name__} searches for one experiment; give each experiment a searcher of its own"
            )
        self._experiment = experiments[0]
        self._space = describe(self._experiment.config)
        self.searcher.set_search_properties(None, None, self._experiment.config)

    def next_trial(self) -> Trial | None:
        """The next trial; None at the end, and while the searcher waits for results."""
        if self.is_finished() or self._experiment is None:
            return None
        trial_id = f"{self._prefix}_{self._created:05d}"
        suggestion = self.searcher.suggest(trial_id)
        if isinstance(suggestion, str):
            self._finished = True
            return None
        if suggestion is None:
            return None
        config = as_json(_completed(self.searcher, self._experiment.config, suggestion))
        self._created += 1
        chosen = {path: value_at(config, path) for path, _ in leaves(suggestion)}
        tag = f"{self._created}_{format_vars(chosen)}" if chosen else str(self._created)
        params = {flat_name(path): value for path, value in chosen.items()}
        return self._experiment.make_trial(trial_id, config, params, tag)

    def is_finished(self) -> bool:
        """Whether all samples are proposed, or the searcher has no more."""
        samples = 0 if self._experiment is None else self._experiment.num_samples
        return self._finished or 0 <= samples <= self._created

    def on_trial_result(self, trial_id: str, result: Result) -> None:
        """Tells the searcher."""
        self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """Tells the searcher."""
        self.searcher.on_trial_complete(trial_id, result, error)

    def state(self) -> dict[str, Any]:
        """Its count, and the searcher's state."""
        return {
            "prefix": self._prefix,
            "created": self._created,
            "finished": self._finished,
            "space": self._space,
            "searcher": self.searcher.state(),
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes both back. The experiment must have been added, with the space that it had."""
        if self._experiment is not None:
            check_same_space(self._experiment.config, state["space"])
        self._prefix, self._created, self._finished = state["prefix"], state["created"], state["finished"]
        self.searcher.restore_state(state["searcher"])


def _completed(searcher: Searcher, config: dict[str, Any], suggestion: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the suggestion in it and its functions called."""
    space = _merged(config, suggestion)
    domains, grids = unresolved(space)
    left = [*grids, *(path for path, domain in domains.items() if not isinstance(domain, Function))]
    if left:
        raise TuneError(
            f"{type(searcher).__name__} suggested nothing for {', '.join(map(flat_name, left))}; take these keys "
            "out of the configuration, or into the searcher's space"
        )
    complete: dict[str, Any] = next(variants(space, np.random.default_rng(0)))[1]
    return complete


def _merged(config: dict[str, Any], suggestion: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the suggested values in it."""
    merged: dict[str, Any] = copied(config)
    for key, value in suggestion.items():
        there = merged.get(key)
        if isinstance(there, dict) and isinstance(value, dict) and not is_grid(there):
            merged[key] = _merged(there, value)
        else:
            merged[key] = copied(value)
    return merged
