"""The files of a job's directory: what a submitter writes for the master, and what the master writes for everybody."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import Field, ValidationError

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.spec import JobSpec
from counterpoint.transport.config import Config
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.files.wrong_types import first_wrong
from counterpoint.transport.wires.endpoint import socket_path

JOB_FILE = "cluster_job.json"
OUTCOME_FILE = "outcome.json"
MASTER_FILE = "master.json"
MASTER_LOG = "master.log"
STATE_FILE = "state.json"
LOCK_FILE = "master.lock"
"""Held by the process that is the master."""

MAX_BYTES = 64 * 2**20
"""The size of any of these files."""

Content = TypeVar("Content", bound=Config)


class JobFile(Config):
    """What a submitter writes: the whole job."""

    spec: JobSpec
    """The specification of the job."""
    backend: str = "local"
    """`local`, `ray`, or the import path of a class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the backend."""
    journal: str | None = None
    """Where the job's state lies: a directory, or a root as of `sweep`. Unset: in the job's directory."""
    standby: bool = True
    """Whether a second process waits to take over should the master be killed."""
    path: tuple[str, ...] = ()
    """Directories that are searched for the workers' classes before all others."""


class MasterFile(Config):
    """The process that is the master, as it says."""

    epoch: int
    """The epoch in which it acts."""
    pid: int
    """The id of its process."""
    machine: str
    """Which boot of which machine, and which space of process ids."""


class OutcomeFile(Config):
    """How the job ended."""

    code: int
    """0 only if its work is complete."""
    reason: str
    """The reason, for a person."""
    failed_worker: str | None = None
    """The worker whose output explains the reason."""
    status: dict[str, Any] = Field(default_factory=dict)
    """The last status, as the control socket would give it."""


def holds_job(directory: Path) -> bool:
    """Whether a directory is that of a submitted job."""
    return (directory / JOB_FILE).exists()


def read_job(directory: Path) -> JobFile:
    """Returns the job in a directory. Raises `ClusterError` if there is none, or it cannot be read."""
    try:
        return _read(JobFile, directory / JOB_FILE)
    except FileNotFoundError:
        raise ClusterError(f"{directory} has no job: there is no {JOB_FILE}; `submit` writes it") from None


def read_master(directory: Path) -> MasterFile | None:
    """Returns who was the last master; None if there was none, or the file cannot be read."""
    try:
        return MasterFile.model_validate(read_json(directory / MASTER_FILE, MAX_BYTES))
    except (OSError, UntrustedFileError, ValidationError):
        return None


def read_outcome(directory: Path) -> OutcomeFile | None:
    """Returns how the job ended; None while it has not. Raises `ClusterError` if that cannot be read."""
    try:
        return _read(OutcomeFile, directory / OUTCOME_FILE)
    except FileNotFoundError:
        return None


def _read(model: type[Content], path: Path) -> Content:
    """Raises `FileNotFoundError`, and `ClusterError` for a file that cannot be read for another reason."""
    try:
        return model.model_validate(read_json(path, MAX_BYTES))
    except FileNotFoundError:
        raise
    except ValidationError as error:
        raise ClusterError(f"{path} cannot be read: {first_wrong(error)}") from error
    except (OSError, UntrustedFileError) as error:
        raise ClusterError(f"{path} cannot be read: {error}") from error


def write_privately(path: Path, content: Config, *, new: bool = False) -> None:
    """Writes a file whole and durably, readable by this user alone: a spec's environment may hold secrets.

    A `new` one replaces none: raises `FileExistsError` if there is one, even if it was written at the same time.
    """
    data = orjson.dumps(content.model_dump(mode="json"), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    write_atomically(path, data, mode=0o600, new=new)


def machine() -> str:
    """Returns which boot of which machine this is, and which space of process ids; empty if that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def control_path(directory: Path) -> Path:
    """Returns where the master listens for clients on its machine."""
    return socket_path(directory.resolve(), "control.sock")
