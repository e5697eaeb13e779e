"""A trainable's checkpoint directory: what the trainable wrote, and beside it how far the trial had come. Whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.json_values import as_json

METADATA = "tune_metadata.json"
DICT = "checkpoint.json"
"""Holds what `save_checkpoint` returned, when that was a dict."""

_LONGEST = 64 * 2**20


@dataclass
class TrainableProgress:
    """How far a trial has come; goes on counting after a restore."""

    iteration: int = 0
    time_total: float = 0.0
    timesteps_total: int | None = None
    episodes_total: int | None = None


def write(path: Path, fill: Callable[[str], Any], progress: TrainableProgress, trial_id: str) -> None:
    """Has `fill` write into a directory, which then becomes `path`, flushed to the disk.

    `fill` returns None, a dict, or the path of what it wrote in that directory, as `Trainable.save_checkpoint` does. Whatever was
    at `path` is replaced.
    """
    # It imports numpy, which nothing needs before a trial saves.
    from counterpoint.transport.files.atomic import publish_directory, remove_directory

    remove_directory(path)
    with publish_directory(path) as partial:
        returned = fill(str(partial))
        metadata = {"trial_id": trial_id, **asdict(progress), **_told(returned, partial)}
        (partial / METADATA).write_text(json.dumps(metadata))


def _told(returned: Any, partial: Path) -> dict[str, Any]:
    if isinstance(returned, dict):
        (partial / DICT).write_text(json.dumps(as_json(returned, "what save_checkpoint returned", finite=False)))
        return {"kind": "dict"}
    if returned is None:
        return {"kind": "directory", "inside": "."}
    wrote = partial / str(returned)
    if not wrote.resolve().is_relative_to(partial.resolve()) or not wrote.exists():
        raise TuneError(
            f"save_checkpoint returned {str(returned)!r}; expected None, a dict, or a path in the directory that it was given"
        )
    return {"kind": "directory", "inside": str(wrote.resolve().relative_to(partial.resolve()))}


def read(path: Path) -> tuple[Any, TrainableProgress]:
    """Returns what `load_checkpoint` takes, a dict or a path, and how far the trial had come.

    Raises `TuneError` if no trainable's checkpoint is there.
    """
    metadata = _json(path, METADATA)
    try:
        progress = TrainableProgress(**{name: metadata[name] for name in asdict(TrainableProgress())})
        kind, inside = metadata["kind"], metadata.get("inside", ".")
    except KeyError as error:
        raise TuneError(f"{path / METADATA} has no {error}; it was not written by the tuner") from None
    if kind == "dict":
        return _json(path, DICT), progress
    return str(path if inside == "." else path / inside), progress


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        with (path / name).open("rb") as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise TuneError(f"{path} is no checkpoint of a trainable: {name}: {error.strerror}") from None
    if len(content) > _LONGEST:
        raise TuneError(f"{path / name} has more than {_LONGEST} bytes")
    try:
        value = json.loads(content)
    except ValueError as error:
        raise TuneError(f"{path / name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise TuneError(f"{path / name} holds no JSON object")
    return value
