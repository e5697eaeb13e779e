"""`counterpoint tune status DIRECTORY`: prints an experiment's trials as a table, live on a terminal, or as JSON for programs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from cli.display.console import console_for, lasting
from cli.display.tune_table import Row, table_of
from job.configuration.load import load
from job.number_format import duration
from transport.errors import UserError
from transport.files.untrusted import UntrustedFileError, read_json
from tune.config import TuneConfig
from tune.file_experiment import FILE
from tune.result import DEFAULT_METRIC, TRAINING_ITERATION, lookup
from tune.runner.trial_files import STATE_FILE, read_runner_state
from tune.runs.exploit import read_note
from tune.trial import Trial

USAGE = """usage: counterpoint tune status DIRECTORY [--json] [--watch]

DIRECTORY is the experiment's, of `counterpoint tune` or of `tune.run`.
  --json    an object with a list of trials
  --watch   until every trial has ended"""

MAX_BYTES = 2**30
REFRESH_SECONDS = 2.0
SILENT_SECONDS = 60.0
"""After which an experiment that has not ended is said to be silent: its state is written every ten seconds."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 whatever the trials' states: they were printed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--watch", action="store_true")
    given, unknown = parser.parse_known_args(arguments)
    if given.directory is None or unknown:
        print(USAGE)
        return 0 if unknown in (["-h"], ["--help"]) else 2
    config = _shown(given.directory)
    if given.json:
        print(
            json.dumps(
                {"name": config.name, "trials": [_as_json(row, config) for row in rows(given.directory)]}, indent=1
            )
        )
        return 0
    console = console_for(lasting(sys.stdout), pipe_width=140, markup=False)
    if given.watch:
        _watch(given.directory, config, console)
    console.print(_table(given.directory, rows(given.directory), config), soft_wrap=True)
    return 0


def rows(directory: Path) -> list[Row]:
    """Reads the trials of an experiment. Raises `UserError` for a damaged file."""
    path = directory / STATE_FILE
    try:
        trials = read_json(path, MAX_BYTES)["trials"]
    except FileNotFoundError:
        return []
    except (UntrustedFileError, KeyError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return [_row(trial) for trial in trials]


def _row(trial: dict[str, Any]) -> Row:
    copied = read_note(Path(trial["logdir"]))
    params = {name: lookup(trial["config"], name) for name in trial["evaluated_params"]}
    return Row(
        trial["trial_id"],
        trial["status"],
        params,
        trial.get("last_result") or {},
        trial.get("num_failures", 0),
        trial.get("error_msg"),
        copied.source if copied is not None else "",
    )


@dataclass(frozen=True)
class Shown:
    """What an experiment is called, and by what its trials are compared."""

    name: str
    metric: str
    mode: str


def _shown(directory: Path) -> Shown:
    """Of `counterpoint tune`, its file says it; of `tune.run`, its state."""
    if (directory / FILE).exists():
        config = load(TuneConfig, directory / FILE, [])
        return Shown(config.name, config.metric, config.mode)
    if not (directory / STATE_FILE).exists():
        raise UserError(f"{directory}: there is no experiment ({FILE} is missing, and {STATE_FILE}, too)")
    runner = read_runner_state(directory)
    return Shown(directory.absolute().name, runner.get("metric") or DEFAULT_METRIC, runner.get("mode") or "max")


def _as_json(row: Row, config: Shown) -> dict[str, Any]:
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


def _table(directory: Path, found: list[Row], config: Shown) -> Group:
    note = ""
    if found and not _have_ended(found):
        silent = time.time() - (directory / STATE_FILE).stat().st_mtime
        if silent > SILENT_SECONDS:
            note = f"; nothing was written for {duration(silent)}: if its tuner has ended, resume it"
    return table_of(found, config.name, config.metric, config.mode, note)


def _have_ended(found: list[Row]) -> bool:
    return all(row.status in (Trial.TERMINATED, Trial.ERROR) for row in found)
