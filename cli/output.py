"""A job's output directory: who may use it, what becomes of what it holds, and the files that describe the job.

Nothing is written before everything that can be checked has been; then one process at a time owns the directory, by a lock that
the kernel lets go of however that process ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from cli.errors import UserError
from cli.job import JobConfig
from cli.load import to_toml
from inference.config import InferenceConfig
from orchestrator.checkpoint import CheckpointError, check_resumable
from orchestrator.run_directory import ConfigurationError
from transport.atomic import write_atomically

LOCK = "job.lock"
JOB_FILE = "job.json"
ROLES = "roles"


def check_port(config: InferenceConfig) -> None:
    """Raises `UserError` when the server could not listen on its address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise UserError(
                f"inference.port = {config.port}: cannot listen on {config.host}:{config.port}: {error.strerror}; "
                "stop what uses it, or choose another with --inference.port"
            ) from None


def check_output(config: JobConfig, fresh: bool) -> None:
    """Raises `UserError` unless the job may use its output directory. Writes nothing."""
    directory = config.output_dir
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"output_dir = {str(directory)!r}: {existing} is not a directory that may be written to")
    if not _is_occupied(directory):
        return
    if not (directory / JOB_FILE).exists():
        raise UserError(
            f"output_dir = {str(directory)!r} holds something, but no job ({JOB_FILE} is missing); "
            "choose another with --output_dir"
        )
    if not config.resume and not fresh:
        raise UserError(
            f"output_dir = {str(directory)!r} holds a job already. --resume goes on where it stopped; "
            f"--fresh moves it to {_aside(directory)} and starts anew"
        )
    if config.resume:
        _check_same_job(config)


def _check_same_job(config: JobConfig) -> None:
    """A job goes on with the model and the run that it began with, and a run with its seed and its environments."""
    path = config.output_dir / JOB_FILE
    try:
        before = orjson.loads(path.read_bytes())
        begun = {"model": before["model"], "orchestrator.run_id": before["orchestrator"]["run_id"]}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read, so the job cannot be resumed: {error!r}; --fresh starts anew"
        ) from None
    for key, now in (("model", config.model), ("orchestrator.run_id", config.orchestrator.run_id)):
        if begun[key] != now:
            raise UserError(
                f"--resume: the job in {config.output_dir} began with {key} = {begun[key]!r}, and now it is {now!r}; "
                "put it back, or start anew with --fresh"
            )
    try:
        check_resumable(config.orchestrator)
    except (ConfigurationError, CheckpointError) as error:
        raise UserError(f"--resume: {error}; or start anew with --fresh") from None


def _is_occupied(directory: Path) -> bool:
    """Whether there is anything of value: the lock, and what was being written when someone was killed, are not."""
    if not directory.exists():
        return False
    return any(entry.name != LOCK and not entry.name.endswith(".partial") for entry in directory.iterdir())


def _aside(directory: Path) -> Path:
    """Where `--fresh` moves it: the first free of `NAME.1`, `NAME.2`, ..."""
    number = 1
    while (candidate := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return candidate


@contextmanager
def claim(directory: Path, fresh: bool) -> Iterator[Path | None]:
    """Owns the directory while the block lasts; yields where its former content went, if `fresh` moved any.

    Raises `UserError` when another process owns it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory)
        moved = None
        if fresh and _is_occupied(directory):
            moved = _aside(directory)
            directory.rename(moved)
            directory.mkdir()
            os.close(lock)
            lock = _lock(directory)
    except OSError as error:
        raise UserError(f"output_dir = {str(directory)!r}: {error.strerror}: {error.filename}") from None
    try:
        yield moved
    finally:
        os.close(lock)


def _lock(directory: Path) -> int:
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"output_dir = {str(directory)!r}: another `counterpoint run` is using it") from None
    return descriptor


def is_locked(directory: Path) -> bool:
    """Whether a job is running in the directory."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_job(config: JobConfig, given: bytes) -> dict[str, Path]:
    """Writes the job as given and as resolved, and a file for each role; returns the roles' files.

    What makes the directory a job's comes first: cut short anywhere, it can be resumed or moved aside.
    """
    directory = config.output_dir
    write_atomically(directory / JOB_FILE, json.dumps(config.model_dump(mode="json"), indent=2).encode())
    write_atomically(directory / "job.toml", given)
    (directory / ROLES).mkdir(exist_ok=True)
    (directory / "trainer").mkdir(exist_ok=True)
    files: dict[str, Path] = {}
    for name, section in (
        ("inference", config.inference),
        ("trainer", config.trainer),
        ("orchestrator", config.orchestrator),
    ):
        files[name] = directory / ROLES / f"{name}.toml"
        write_atomically(files[name], to_toml(section).encode())
    return files
