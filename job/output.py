"""A job's output directory: who may use it, what becomes of what it holds, and the files that describe the job.

Nothing is written before everything that can be checked has been; then one process at a time owns the directory, by a lock that
the kernel lets go of however that process ends.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from job.config import JobConfig
from job.configuration.load import to_toml
from job.directory import JOB_FILE, JOB_LOCK, living_runs, own_runs, read_json
from job.errors import Obstructed, UserError
from job.sections import ServersConfig
from job.workers import sections_of
from orchestrator.run_directory import ConfigurationError
from orchestrator.step.checkpoint import CheckpointError, check_resumable
from transport.files.atomic import write_atomically
from transport.files.lock import lock_place
from transport.process.permanent_errors import is_permanent

ROLES = "roles"


def check_ports(config: ServersConfig) -> None:
    """Raises `UserError` when a server could not listen on its address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for port in range(config.port, config.port + config.replicas):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as error:
                raise (UserError if is_permanent(error) else Obstructed)(
                    f"inference.port = {config.port}: cannot listen on {config.host}:{port}: {error.strerror}; "
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
    if fresh and (alive := living_runs(directory)):
        raise Obstructed(
            f"output_dir = {str(directory)!r}: run {alive[0]!r} still runs in it; end it with "
            f"`counterpoint stop {alive[0]} --job {directory}`, and then --fresh moves it"
        )
    if config.resume:
        _check_same_job(config)


def _check_same_job(config: JobConfig) -> None:
    """A job goes on with the model that it began with, and a run with its seed and its environments. Runs may be added and left
    out; but where none is known, it is most likely another job's directory."""
    path = config.output_dir / JOB_FILE
    before = read_json(path)
    try:
        model, known = before["model"], [run["run_id"] for run in own_runs(before)]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} lacks {error}, so the job cannot be resumed; --fresh starts anew") from None
    now = [run.run_id for run in config.every_run]
    for key, begun, wanted, same in (
        ("model", repr(model), repr(config.model), model == config.model),
        ("run_id", ", ".join(map(repr, known)), ", ".join(map(repr, now)), bool({*known} & {*now}) or known == now),
    ):
        if not same:
            raise UserError(
                f"--resume: the job in {config.output_dir} began with {key} = {begun}, and now it is {wanted}; "
                "put it back, or start anew with --fresh"
            )
    for run in config.every_run:
        try:
            check_resumable(run)
        except (ConfigurationError, CheckpointError) as error:
            raise UserError(f"--resume: run {run.run_id!r}: {error}; or start anew with --fresh") from None


def _is_occupied(directory: Path) -> bool:
    """Whether there is anything of value: the lock, and what was being written when someone was killed, are not."""
    if not directory.exists():
        return False
    return any(entry.name != JOB_LOCK and not entry.name.endswith(".partial") for entry in directory.iterdir())


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
        reason = error.strerror if error.errno == errno.EADDRINUSE else f"{error.strerror}: {error.filename}"
        raise (UserError if is_permanent(error) else Obstructed)(f"output_dir = {str(directory)!r}: {reason}") from None
    try:
        yield moved
    finally:
        os.close(lock)


def _lock(directory: Path) -> int:
    return lock_place(directory / JOB_LOCK, "another `counterpoint run` is using it")


def write_job(config: JobConfig, given: bytes) -> dict[str, Path]:
    """Writes the job as given and as resolved, and a file for each worker; returns the latter by the workers' names.

    What makes the directory a job's comes first: cut short anywhere, it can be resumed or moved aside.
    """
    directory = config.output_dir
    write_atomically(directory / JOB_FILE, json.dumps(config.model_dump(mode="json"), indent=2).encode())
    write_atomically(directory / "job.toml", given)
    (directory / ROLES).mkdir(exist_ok=True)
    (directory / "trainer").mkdir(exist_ok=True)
    files: dict[str, Path] = {}
    for name, section in sections_of(config).items():
        files[name] = directory / ROLES / f"{name}.toml"
        write_atomically(files[name], to_toml(section).encode())
    return files
