"""The run that the trials of an experiment vary: what they share, and the configuration of each, checked before it joins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.job.check import check_run
from counterpoint.job.configuration.load import merge
from counterpoint.job.join import values_of_job
from counterpoint.job.sweep.grid import with_value_at
from counterpoint.run.config import RunConfig
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.configuration.schema import ITEM, keys_of, nearest
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError
from counterpoint.tune.trial import Trial

RESERVED = ("run_id", "output_dir", "resume")
"""Keys that the tuner sets, and no trial may."""


@dataclass(frozen=True)
class VariedRun:
    """What all trials share, and the job that they join."""

    name: str
    """The experiment's; the runs' ids begin with it."""
    directory: Path
    """The directory of the job."""
    base: Table
    """The values that all trials share: keys of a run, without those of the job."""

    def run_id(self, trial_id: str) -> str:
        """Returns the id of a trial's run."""
        return f"{self.name}.{trial_id}"

    def settings(self, trial_id: str, values: dict[str, Any]) -> Table:
        """Returns the content of the run's file. Raises `UserError` for a position beyond the end of a list."""
        settings = self.base
        for path, value in flat(values):
            try:
                settings = with_value_at(settings, path, value)
            except ValueError as error:
                raise UserError(f"trial {trial_id}: {path} = {value!r}: {error}") from None
        return settings | {"run_id": self.run_id(trial_id)}

    def config(self, trial: Trial, values: dict[str, Any] | None = None) -> RunConfig:
        """Returns the run's configuration, as its orchestrator will read it.

        `values` replace the trial's own. Raises `UserError` for what the schema or the environments refuse; whether the job takes
        it is known once the job runs (`counterpoint/job/join.py:check_joins`).
        """
        settings = self.settings(trial.trial_id, trial.config if values is None else values)
        below = values_of_job(str(self.directory)) | {"resume": True}
        run = validate(RunConfig, merge(below, settings), f"trial {trial.trial_id}")
        try:
            check_run(run)
        except UserError as error:
            raise UserError(f"trial {trial.trial_id}: {error}") from None
        return run


def flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables by dotted paths. An empty table is a value."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def problem_of(path: str) -> str | None:
    """Returns why trials cannot vary the key at a dotted path, with the nearest valid key; None if they can."""
    if path in RESERVED:
        return f"{path} is set by the tuner; leave it out"
    keys = keys_of(RunConfig)
    pattern = ".".join(ITEM if part.isdigit() else part for part in path.split("."))
    above = [pattern[:position] for position, character in enumerate(pattern) if character == "."]
    if pattern in keys or any(key in keys and keys[key].is_free for key in above):
        return None
    near = nearest(pattern, keys)
    return "a run has no such key" + (f"; the nearest is {near.replace(ITEM, '0')}" if near else "")
