"""Whether a run is paused: `control/paused.json`, which exists as long as it is.

The run's orchestrator writes and removes it, before anything else happens, so that a run that was paused when its orchestrator
was killed stays paused. Whoever shows the run reads it, as an untrusted file.
"""

from __future__ import annotations

from pathlib import Path

import orjson
from pydantic import Field, ValidationError

from counterpoint.transport.config import Config
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

PAUSED_FILE = "paused.json"

MAX_BYTES = 2**14


class Pause(Config):
    """A pause."""

    since: float = Field(ge=0, allow_inf_nan=False)
    """The time when it began, in seconds since 1970."""
    reason: str = Field(default="", max_length=500)
    """The reason, for people."""


def read_pause(run_dir: Path) -> Pause | None:
    """Returns the pause of a run; None if it is not paused. A damaged file is a pause of unknown reason."""
    path = _path(run_dir)
    try:
        return Pause.model_validate(read_json(path, MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UntrustedFileError, ValidationError):
        return Pause(since=0.0, reason=f"{path} cannot be read")


def write_pause(run_dir: Path, pause: Pause) -> None:
    """Marks the run as paused. Raises `OSError`."""
    write_atomically(_path(run_dir), orjson.dumps(pause.model_dump()))


def remove_pause(run_dir: Path) -> None:
    """Marks the run as not paused. Raises `OSError`."""
    _path(run_dir).unlink(missing_ok=True)


def _path(run_dir: Path) -> Path:
    return run_dir / "control" / PAUSED_FILE
