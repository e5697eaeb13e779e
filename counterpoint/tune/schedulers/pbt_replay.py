"""Trains one trial with the schedule of configurations that population based training has found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import TRAINING_ITERATION, Result
from counterpoint.tune.schedulers.scheduler import Trials, TrialScheduler
from counterpoint.tune.search.variants import format_vars
from counterpoint.tune.trial import Trial

Change = tuple[int, dict[str, Any]]
"""The iteration from which on it holds, and the configuration that holds then."""


class PopulationBasedTrainingReplay(TrialScheduler):
    """Replays `pbt_policy_ID.txt`, ours or Ray's, with a single trial.

    The trial starts with the configuration with which the history of the file began, and changes it at the iterations at
    which the file did; it goes on from its own checkpoint each time. Raises `TuneError` if the file is missing or damaged.
    """

    def __init__(self, policy_file: str) -> None:
        path = Path(policy_file).expanduser()
        if not path.is_file():
            raise TuneError(
                f"policy file {path} does not exist; expected a pbt_policy_ID.txt of an experiment with PBT"
            )
        self._tag = f"replay_{path.name}"
        self.config, self.changes = _changes(path)
        """The configuration to begin with, and the changes in their order."""
        self._done = 0
        self._trial_id: str | None = None

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Gives the one trial its first configuration. Raises `TuneError` for a second trial."""
        if self._trial_id is not None:
            raise TuneError(
                f"PopulationBasedTrainingReplay has {self._trial_id} and was given {trial}: it replays one trial; "
                "pass num_samples=1"
            )
        if not self.changes and not trial.config:
            raise TuneError("the policy file is empty and the trial has no config: there is nothing to train with")
        self._trial_id = trial.trial_id
        if self.changes:
            trial.config = self.config

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        """Changes the configuration if its time has come."""
        if TRAINING_ITERATION not in result or self._done == len(self.changes):
            return self.CONTINUE
        change_at, config = self.changes[self._done]
        if result[TRAINING_ITERATION] < change_at:
            return self.CONTINUE
        self._done += 1
        tagged = format_vars({("config", key): value for key, value in config.items()})
        trials.exploit(trial, trials.save_trial(trial, result), config, f"{self._tag}@perturbed[{tagged}]")
        return self.NOOP

    def debug_string(self) -> str:
        """How many of the changes were made."""
        return f"PopulationBasedTrainingReplay: {self._done} of {len(self.changes)} changes made"

    def state(self) -> dict[str, Any]:
        """The trial, and how far it is."""
        return {"trial_id": self._trial_id, "done": self._done}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        self._trial_id, self._done = state["trial_id"], state["done"]


def _changes(path: Path) -> tuple[dict[str, Any], list[Change]]:
    """The first configuration, and the changes that led to the last row, whose source is the trial of the row before it."""
    changes: list[Change] = []
    first: dict[str, Any] = {}
    source_tag = None
    for number, line in reversed([*enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]):
        try:
            tag, next_source_tag, _, iteration, old_config, config = json.loads(line)
        except (ValueError, TypeError) as error:
            raise TuneError(
                f"{path}, line {number}: {line[:80]!r} is no row of a policy ({error}); expected a JSON list of the two tags, "
                "the two iterations, the old and the new configuration"
            ) from None
        if source_tag is not None and tag != source_tag:
            break  # What comes before was overwritten by a later row.
        source_tag, first = next_source_tag, old_config
        changes.append((iteration, config))
    return first, changes[::-1]
