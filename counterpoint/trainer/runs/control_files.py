"""Reads and writes `run_<id>/control/` for the trainer: runs, their configurations, refusals and evictions.

A directory is not trusted: its name must be an id, neither it nor its `control` may be a link, and its files are read by
`transport/files/untrusted.py`. Nothing here needs torch, so the command line evicts a run by the same function as the trainer.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from counterpoint.run.config import RunConfig
from counterpoint.run.trained import TrainedRun
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_text, read_toml
from counterpoint.transport.process.permanent_errors import is_passing

EVICTED = "evicted.txt"
_REFUSED = "config_validation_error.txt"

MAX_CONFIG_BYTES = 2**20
"""The size of `orch.toml`; a larger file is not read."""

MAX_REASON_BYTES = 2**14
"""The size of `evicted.txt`; a larger file is not read. The files that the trainer writes to `control/` have the same limit."""

NO_ID = (
    "this is no run: after run_, the name of its directory needs 1 to 64 letters of the alphabet, digits, '_', '.' and '-', the "
    "first a letter or a digit; rename the directory, and run_id in its orch.toml"
)
"""Why a directory with a configuration, none of which is a link, is no run."""

FileIdentity = tuple[int, int, int]
"""Time of change in nanoseconds, size in bytes, and inode; another one after a file was replaced."""


class InvalidConfig(ValueError):
    """A configuration that cannot be trained; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run's directory with a `control/orch.toml`, valid or not."""

    run_id: str
    directory: int
    """Its inode; another inode is another run of the same name."""
    config: FileIdentity
    evicted: bool

    @property
    def since(self) -> int:
        """The time at which its configuration was written, in nanoseconds."""
        return self.config[0]


def run_directory(output_dir: Path, run_id: str) -> Path:
    """Returns `<output_dir>/run_<id>`."""
    return output_dir / f"run_{run_id}"


def scan(
    output_dir: Path, expected: Iterable[str] = (), unusable: dict[str, str] | None = None
) -> dict[str, RunDirectory]:
    """Returns the runs in a job's directory by id.

    A run that appears or is deleted meanwhile may be missing or not; a run that may not be read is missing. The `expected` ones
    are opened by their names, since on a network file system the list of a directory may be a minute old. Why a directory with
    a configuration is no run is put into `unusable`, by its name.
    """
    seen: dict[str, RunDirectory] = {}
    unusable = {} if unusable is None else unusable
    with os.scandir(output_dir) as entries:
        listed = {entry.name.removeprefix("run_") for entry in entries if entry.name.startswith("run_")}
    for run_id in sorted(listed.union(each for each in expected if re.fullmatch(IDENTIFIER_PATTERN, each))):
        try:
            seen[run_id] = _run_in(f"{output_dir}/run_{run_id}", run_id)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            unusable[f"run_{run_id}"] = f"it cannot be read: {error.strerror}"
        except InvalidConfig as error:
            unusable[f"run_{run_id}"] = str(error)
    return seen


def _run_in(directory: str, run_id: str) -> RunDirectory:
    """Returns the run in `directory`. Raises `InvalidConfig`, and `OSError` if there is none.

    There may be thousands of old ones, so it makes few system calls.
    """
    control = f"{directory}/control"
    config = f"{control}/orch.toml"
    found, own = os.stat(config), os.lstat(directory)
    if stat.S_ISLNK(own.st_mode) or os.path.islink(control) or os.path.islink(config):
        # A link may lead to another run's directory, and a refusal would then be written to that run.
        raise InvalidConfig(
            "it, its control/ or its orch.toml is a link, which a run has none of; put the directory itself there"
        )
    if not re.fullmatch(IDENTIFIER_PATTERN, run_id):
        raise InvalidConfig(NO_ID)
    changed = (found.st_mtime_ns, found.st_size, found.st_ino)
    return RunDirectory(run_id, own.st_ino, changed, evicted=os.path.exists(f"{control}/{EVICTED}"))


def read_config(output_dir: Path, run_id: str) -> TrainedRun | None:
    """Reads a run's configuration; None if the file is gone, or cannot be reached now. Raises `InvalidConfig`.

    It is a `RunConfig`, unless the file has `[training]` and no key besides those of a `TrainedRun`.
    """
    path = run_directory(output_dir, run_id) / "control" / "orch.toml"
    try:
        given = {"run_id": run_id, **read_toml(path, MAX_CONFIG_BYTES)}
        is_whole = "training" in given and given.keys() <= TrainedRun.model_fields.keys()
        config = (TrainedRun if is_whole else RunConfig).model_validate(given)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedFileError as error:
        raise InvalidConfig(str(error)) from error
    except (OSError, ValidationError) as error:
        if is_passing(error):  # such as a file system whose server does not answer
            return None
        raise InvalidConfig(f"{path}: {error}") from error
    if config.run_id != run_id:
        raise InvalidConfig(f"{path}: run_id = {config.run_id!r}, but this is the directory of run {run_id!r}")
    return config


def refuse_config(output_dir: Path, run_id: str, message: str) -> None:
    """Writes `control/config_validation_error.txt`, which the orchestrator shows. Raises `OSError`."""
    _write(output_dir, run_id, _REFUSED, message)


def accept_config(output_dir: Path, run_id: str) -> None:
    """Removes the file that `refuse_config` wrote for an earlier configuration. Raises `OSError`."""
    (run_directory(output_dir, run_id) / "control" / _REFUSED).unlink(missing_ok=True)


def evict(output_dir: Path, run_id: str, reason: str) -> None:
    """Writes `control/evicted.txt`: the trainer accepts nothing from this run until an operator removes the file.

    Raises `OSError`, also if there is no such run.
    """
    _write(output_dir, run_id, EVICTED, reason)


def eviction(output_dir: Path, run_id: str) -> str | None:
    """Returns why the run was evicted; None if it was not."""
    path = run_directory(output_dir, run_id) / "control" / EVICTED
    try:
        return read_text(path, MAX_REASON_BYTES).strip() or "no reason given"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UntrustedFileError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def _write(output_dir: Path, run_id: str, name: str, text: str) -> None:
    # The end may be half a character, which is left out.
    content = str(text).encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore").encode()
    write_atomically(run_directory(output_dir, run_id) / "control" / name, content)
