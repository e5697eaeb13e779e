"""`counterpoint tune status DIRECTORY`: prints an experiment's trials as a table, live on a terminal, or as JSON for programs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from rich.console import Console, Group
from rich.live import Live

from counterpoint.cli.display.console import console_for, lasting
from counterpoint.cli.display.tune_table import TrialRow, table_of
from counterpoint.job.configuration.load import load
from counterpoint.job.number_format import duration
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import holder_of
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.files.wrong_types import first_wrong
from counterpoint.tune.config import TuneConfig
from counterpoint.tune.file_experiment import FILE
from counterpoint.tune.result import DEFAULT_METRIC, TRAINING_ITERATION, Result, lookup
from counterpoint.tune.runner.journal import LOCK_NAME
from counterpoint.tune.runner.trial_files import STATE_FILE
from counterpoint.tune.runs.exploit import read_note
from counterpoint.tune.trial import Trial

USAGE = """usage: counterpoint tune status DIRECTORY [--json] [--watch]

DIRECTORY is the experiment's, of `counterpoint tune` or of `tune.run`.
  --json    an object with a list of trials, and whether a process runs them (null: unknown)
  --watch   until every trial has ended"""

MAX_BYTES = 2**30
REFRESH_SECONDS = 2.0
SILENT_SECONDS = 60.0
"""How long an experiment may be without a sign before it is called silent: its state is written every ten seconds."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 whatever the trials' states: they were printed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--watch", action="store_true")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        print(USAGE)
        return 2
    if given.directory is None or unknown:
        print(USAGE)
        return 0 if unknown in (["-h"], ["--help"]) else 2
    config = _shown(given.directory)
    if given.json:
        trials = [_as_json(row, config) for row in rows(given.directory)]
        print(json.dumps({"name": config.name, "running": _is_run(given.directory), "trials": trials}, indent=1))
        return 0
    console = console_for(lasting(sys.stdout), pipe_width=140, markup=False)
    if given.watch:
        _watch(given.directory, config, console)
    console.print(_table(given.directory, rows(given.directory), config), soft_wrap=True)
    return 0


class _Trial(BaseModel):
    """What is read of a trial."""

    trial_id: str
    status: str
    logdir: str
    config: dict[str, Any]
    evaluated_params: dict[str, Any]
    last_result: Result | None = None
    num_failures: int = 0
    error_msg: str | None = None


class _Runner(BaseModel):
    """What is read of the runner's state."""

    metric: str | None = None
    mode: str | None = None


class _State(BaseModel):
    """What is read of an experiment's state."""

    runner: _Runner = Field(default_factory=_Runner)
    trials: list[_Trial]


def rows(directory: Path) -> list[TrialRow]:
    """Reads the trials of an experiment. Raises `UserError` for a damaged file."""
    return [_row(trial) for trial in _read(directory).trials]


def _read(directory: Path) -> _State:
    """The state of an experiment, without trials before its file is written. Raises `UserError` for a damaged file."""
    path = directory / STATE_FILE
    try:
        return _State.model_validate(read_json(path, MAX_BYTES))
    except FileNotFoundError:
        return _State(trials=[])
    except (UntrustedFileError, ValidationError) as error:
        wrong = first_wrong(error) if isinstance(error, ValidationError) else error
        raise UserError(f"{path} is damaged: {wrong}; a tuner that runs or is resumed writes it anew") from None


def _row(trial: _Trial) -> TrialRow:
    copied = read_note(Path(trial.logdir))
    return TrialRow(
        trial.trial_id,
        trial.status,
        {name: lookup(trial.config, name) for name in trial.evaluated_params},
        trial.last_result or {},
        trial.num_failures,
        trial.error_msg,
        copied.source if copied is not None else "",
    )


@dataclass(frozen=True)
class Shown:
    """What an experiment is called, and by what its trials are compared."""

    name: str
    metric: str
    mode: str


def _shown(directory: Path) -> Shown:
    """What is shown of an experiment: its file says it for `counterpoint tune`, its state for `tune.run`."""
    if (directory / FILE).exists():
        config = load(TuneConfig, directory / FILE, [])
        return Shown(config.name, config.metric, config.mode)
    if not (directory / STATE_FILE).exists():
        raise UserError(f"{directory}: there is no experiment ({FILE} is missing, and {STATE_FILE}, too)")
    runner = _read(directory).runner
    return Shown(directory.absolute().name, runner.metric or DEFAULT_METRIC, runner.mode or "max")


def _as_json(row: TrialRow, config: Shown) -> dict[str, Any]:
    return {
        "trial_id": row.trial_id,
        "status": row.status,
        "params": row.params,
        "iteration": row.result.get(TRAINING_ITERATION, 0),
        config.metric: lookup(row.result, config.metric),
        "failures": row.failures,
        "error": row.error,
        "copied": row.copies or None,
    }


def _watch(directory: Path, config: Shown, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            found = rows(directory)
            live.update(_table(directory, found, config), refresh=True)
            if found and _have_ended(found):
                return
            time.sleep(REFRESH_SECONDS)


def _table(directory: Path, found: list[TrialRow], config: Shown) -> Group:
    note = ""
    if found and not _have_ended(found):
        silent = time.time() - (directory / STATE_FILE).stat().st_mtime
        is_run = _is_run(directory)
        if is_run is False:
            by_file = (directory / FILE).exists()
            command = f"`counterpoint tune resume {directory}`" if by_file else "its script and resume='AUTO'"
            note = f"; no process runs it: it goes on with {command}"
        elif is_run and silent > SILENT_SECONDS:
            note = f"; its process has written nothing for {duration(silent)}"
    return table_of(found, config.name, config.metric, config.mode, note)


def _is_run(directory: Path) -> bool | None:
    """Whether a tuner is at work: the kernel releases its lock however it ends. None where the lock cannot be read."""
    try:
        return holder_of(directory / LOCK_NAME) is not None
    except OSError:  # such as a file system without locks, or another user's file
        return None


def _have_ended(found: list[TrialRow]) -> bool:
    return all(row.status in (Trial.TERMINATED, Trial.ERROR) for row in found)
