"""What the runner itself writes into a trial's directory and the experiment's; loggers write the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.tune.trial import Trial

STATE_FILE = "experiment_state.json"
"""The trials as JSON, for people and tools; the runner itself resumes from the journal."""

_LARGEST_STATE = 2**30


def write_state(directory: Path, trials: Sequence[Trial], runner: dict[str, Any]) -> None:
    """Replaces the experiment's state file. Raises `OSError`."""
    content = {"runner": runner, "trials": [_shown(trial) for trial in trials]}
    data = orjson.dumps(content, default=_shown_value, option=orjson.OPT_NON_STR_KEYS)
    write_atomically(directory / STATE_FILE, data, durable=False)


def read_runner_state(directory: Path) -> dict[str, Any]:
    """What `write_state` was given as the runner's; empty if there is none, or none that can be read."""
    try:
        state = read_json(directory / STATE_FILE, _LARGEST_STATE).get("runner")
    except (OSError, UntrustedFileError):
        return {}
    return state if isinstance(state, dict) else {}


def _shown(trial: Trial) -> dict[str, Any]:
    return {**trial.as_dict(), "logdir": trial.logdir, "error_file": trial.error_file}


def _shown_value(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    return str(value)
