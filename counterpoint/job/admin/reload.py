"""Reads a command's file again, upon SIGHUP: what may change goes to the runs as changes, and the rest is reported.

The file is loaded as the command would load it, with its flags and its variables, by a process of its own (`--dry-run`): so a
file that is wrong changes nothing, and says why. It is compared with what was loaded last, not with the values in force: a value
that was changed in another way stays until its line in the file is edited.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.job.admin.ask import checked
from counterpoint.job.admin.change import change_run
from counterpoint.job.check import SAFE_PATH
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import to_toml
from counterpoint.run.changes import apply, changeable_keys, fixed_values, values_of
from counterpoint.run.config import RunConfig
from counterpoint.run.requests import ChangeRequest
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.child import ChildError, run

LOAD_SECONDS = 120.0
"""How long the file may take to load: what it names by import path is loaded, too."""

LATER = "it holds from the next start with --resume"


@dataclass(slots=True)
class Reloaded:
    """What has come of reading a file again."""

    applied: list[str] = field(default_factory=list)
    """Sentences, each about one run."""
    refused: list[str] = field(default_factory=list)
    """Sentences, each about what could not be applied."""

    def __str__(self) -> str:
        words = [f"applied: {each}" for each in self.applied] + [f"not applied: {each}" for each in self.refused]
        return "; ".join(words) or "nothing that is known here has changed"


class Reload:
    """Calls: reads the file again and says what came of it. One call at a time."""

    def __init__(
        self,
        job: Path,
        command: str,
        arguments: Sequence[str],
        config: JobConfig | RunConfig,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`config` is what `counterpoint COMMAND ARGUMENTS` loaded; `environment` are variables that are not set any more."""
        self._job = job
        self._command = [sys.executable, "-m", "counterpoint.cli.main", command, *arguments, "--dry-run"]
        self._environment = dict(environment or {})
        self._model = type(config)
        self._say = say
        self._runs, self._others = _parts(self._parsed(to_toml(config)))

    def __call__(self) -> None:
        """Reads, applies and reports. Raises nothing."""
        try:
            self._say(f"SIGHUP: the file was read again; {self.reload()}")
        except (UserError, OSError, ValueError, ChildError) as error:
            self._say(f"SIGHUP: the file cannot be read, and nothing has changed: {error}")

    def reload(self) -> Reloaded:
        """Reads the file and applies what may change. Raises `UserError` for a file that is wrong."""
        runs, others = _parts(self._load())
        result = Reloaded()
        for run_id in sorted({*runs, *self._runs}):
            if run_id in runs and run_id in self._runs:
                self._apply(run_id, self._runs[run_id], runs[run_id], result)
            else:
                result.refused.append(
                    f"run {run_id} is {'new in' if run_id in runs else 'gone from'} the file: {LATER}"
                )
        result.refused += [f"{key}: {LATER}" for key in differing(self._others, others)]
        return result

    def _apply(self, run_id: str, old: RunConfig, new: RunConfig, result: Reloaded) -> None:
        known = set(changeable_keys(old))
        keys = [key for key in changeable_keys(new) if key in known]
        before, after = values_of(old, keys), values_of(new, keys)
        changes = {key: after[key] for key in keys if after[key] != before[key]}
        fixed = differing(flat(fixed_values(old)), flat(fixed_values(new)))
        result.refused += [f"run {run_id}: {key}: {LATER}" for key in fixed]
        if not changes:
            return
        words = ", ".join(f"{key} = {value!r}" for key, value in changes.items())
        try:
            changed = change_run(self._job, run_id, checked(ChangeRequest, run_id, changes=changes))
        except UserError as error:
            result.refused.append(f"run {run_id}: {words}: {error}")
            return
        result.applied.append(f"run {run_id} from step {changed.step} on: {words}")
        self._runs[run_id] = _with(old, new, fixed)

    def _load(self) -> JobConfig | RunConfig:
        variables = {**os.environ, **self._environment, **SAFE_PATH}
        done = run("the process that reads it", self._command, LOAD_SECONDS, environment=variables)
        if done.code:
            raise UserError(done.errors.strip().removeprefix("counterpoint: error: ") or "it was not loaded")
        return self._parsed(done.output.decode())

    def _parsed(self, text: str) -> JobConfig | RunConfig:
        return self._model.model_validate(tomllib.loads(text))


def _with(old: RunConfig, new: RunConfig, fixed: Sequence[str]) -> RunConfig:
    """Returns what is loaded now: the new file, unless keys of it are still to be reported at the next time."""
    if not fixed:
        return new
    known = set(changeable_keys(old))
    return apply(old, values_of(new, [key for key in changeable_keys(new) if key in known]))


def _parts(config: JobConfig | RunConfig) -> tuple[dict[str, RunConfig], dict[str, Any]]:
    """Returns the runs by id, and the other keys."""
    if isinstance(config, RunConfig):
        return {config.run_id: config}, {}
    others = config.model_dump(mode="json", exclude={"orchestrator", "runs"})
    return {run.run_id: run for run in config.every_run}, flat(others)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a table's values by dotted key; the entries of a list of tables by their names, if they have names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
            value = {each["name"]: each for each in value}
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the keys whose values differ, or that only one has, sorted."""
    return [key for key in sorted({*old, *new}) if old.get(key, ...) != new.get(key, ...)]
