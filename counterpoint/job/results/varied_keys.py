"""The configurations of runs side by side: their keys by dotted paths, and which of them differ from run to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.job.directory import JOB_FILE, own_runs, read_json, written_config
from counterpoint.transport import exact_json
from counterpoint.transport.errors import UserError

_OWN = frozenset({"run_id", "output_dir", "resume", "trainer.resume", "trainer.output_dir", "inference.port"})
"""Keys of a run that differ of themselves: what it is called, where it writes, and at which ports its servers are."""


def flat_config(directory: Path, run_id: str) -> dict[str, Any]:
    """Returns the values of a run by dotted path, as in a sweep's file: its own, and those of its job but for other runs.

    A number in a path is a position in a list of tables. Keys that are not set are absent. Raises `UserError` for a damaged job.
    """
    job = read_json(directory / JOB_FILE) if (directory / JOB_FILE).exists() else {}
    try:
        own = {run["run_id"]: run for run in own_runs(job)} if job else {}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{directory / JOB_FILE} is damaged: {error!r}") from None
    of_job = {name: value for name, value in job.items() if name not in ("orchestrator", "runs")}
    run = written_config(directory, run_id) or own.get(run_id, {})
    return dict(_flat(of_job)) | dict(_flat(run))


def varied_keys(configs: Sequence[Mapping[str, Any]], directories: Sequence[Path]) -> list[str]:
    """Returns the keys whose values differ, and that are no run's own: neither `_OWN` nor a place in its directory."""
    names = dict.fromkeys(name for config in configs for name in config if name not in _OWN)
    return [name for name in names if len({_outside(config.get(name), directories) for config in configs}) > 1]


def _outside(value: Any, directories: Sequence[Path]) -> str:
    """The value for comparison: a place in a job's directory, and an address on this machine, is the same for all."""
    text = str(value)
    if any(str(directory.absolute()) in text or str(directory) in text for directory in directories):
        return "a place of its own"
    return "a server of its own" if "://127.0.0.1:" in text else f"{type(value).__name__} {text}"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) or (isinstance(value, list) and value and all(isinstance(each, dict) for each in value)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        yield path, exact_json.dumps(value).decode()
    elif value is not None:
        yield path, value
