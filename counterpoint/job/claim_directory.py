"""Claims a job's output directory: checks that the job may use it, locks it, and moves its former content aside on request.

One process at a time holds the lock. The kernel releases it however that process ends. `counterpoint/job/directory.py` reads the
directory, `counterpoint/job/write_job.py` writes the job's files into it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterpoint.cluster.attended.attended_job import end_earlier
from counterpoint.cluster.attended.left_running import has_workers
from counterpoint.cluster.errors import ClusterError
from counterpoint.job.config import JobConfig
from counterpoint.job.directory import JOB_FILE, JOB_LOCK, control_directory, living_runs, own_steps, read_json
from counterpoint.job.fine_tuning import check_resumed
from counterpoint.job.reading.run_state import committed_steps, eviction_of, evictions_of_all_left, is_finished
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.step.checkpoint import check_resumable
from counterpoint.sweep.store import StoreError
from counterpoint.transport.errors import CheckpointError, Obstructed, UserError
from counterpoint.transport.files.lock import holder_of, take_lock
from counterpoint.transport.files.mounts import unmounted
from counterpoint.transport.process.permanent_errors import is_permanent


class NothingLeft(UserError):
    """All runs that a resume would go on with are evicted."""

    code = 3


def check_directory(config: JobConfig, fresh: bool) -> None:
    """Raises `UserError` unless the job may use its output directory and a resume has a run to go on with. Writes nothing."""
    directory = config.output_dir
    check_writable(f"output_dir = {str(directory)!r}", directory)
    if not _is_occupied(directory):
        return
    if not (directory / JOB_FILE).exists():
        raise UserError(
            f"output_dir = {str(directory)!r} holds something, but no job ({JOB_FILE} is missing); "
            "choose another with --output_dir"
        )
    if running := _who_runs(directory):
        raise Obstructed(f"output_dir = {str(directory)!r}: {running}")
    if not config.resume and not fresh:
        raise UserError(
            f"output_dir = {str(directory)!r} holds a job already. --resume goes on where it stopped; "
            f"--fresh moves it to {_aside(directory)} and starts anew"
        )
    if fresh and not has_workers(
        control_directory(directory)
    ):  # else `claim_directory` ends what a killed command left
        _check_no_run_lives(directory)
    if config.resume:
        check_resumed(config, any(map(committed_steps, config.every_run)))
        _check_same_job(config)
        _check_not_evicted(config)
        _check_steps(config)


def _who_runs(directory: Path) -> str:
    """Says which other process is at work in the directory, since when, and what to do about it; empty if none is."""
    holder = holder_of(directory / JOB_LOCK)
    if holder is None or (holder.pid, holder.host) == (os.getpid(), socket.gethostname()):
        return ""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((directory / JOB_LOCK).stat().st_mtime))
    who = f"process {holder.pid} on {holder.host}" if holder.pid else "another process"
    return (
        f"a job runs in it: {who}, since {began}. See `counterpoint status {directory}`, end it with `counterpoint stop --job "
        f"{directory}`, or choose another directory with --output_dir"
    )


def check_writable(given: str, directory: Path) -> None:
    """Raises `UserError`, which begins with `given`, unless the directory or what exists of its parents may be written to."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        error = Obstructed if unmounted(directory) else UserError
        raise error(f"{given}: {existing} is not a directory that may be written to")


def _check_no_run_lives(directory: Path) -> None:
    """Raises `Obstructed` if there is a run with an orchestrator, which would go on in the directory that --fresh moves."""
    if alive := living_runs(directory):
        raise Obstructed(
            f"output_dir = {str(directory)!r}: run {alive[0]!r} still runs in it; end it with "
            f"`counterpoint stop {alive[0]} --job {directory}`, and then --fresh moves it"
        )


def _end_earlier(directory: Path) -> None:
    """Ends in order what a killed command left, so that its roles do not go on beside those of another job.

    Raises `UserError` if that fails, and `SystemExit` if a signal asks this process to end meanwhile.
    """
    try:
        stopped = asyncio.run(end_earlier(control_directory(directory)))
    except (ClusterError, StoreError) as error:
        raise UserError(f"output_dir = {str(directory)!r}: {error}") from error
    if stopped is not None:
        raise SystemExit(stopped.code)


def _check_same_job(config: JobConfig) -> None:
    """Raises `UserError` unless a resume finds its own job.

    The model, and each run's seed and environments, must be the same, and at least one run must be known. Runs may be added and
    left out.
    """
    path = config.output_dir / JOB_FILE
    known, model = [*(own_steps(config.output_dir) or {})], read_json(path).get("model")
    if model is None:
        raise UserError(f"{path} lacks model, so the job cannot be resumed; --fresh starts anew")
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


def _check_not_evicted(config: JobConfig) -> None:
    """Raises `NothingLeft` if the trainer takes none of the runs that have work left. A job that stays may get others."""
    if not config.stay and (evictions := evictions_of_all_left(config.every_run)):
        raise NothingLeft(f"--resume: {'; '.join(evictions)}")


def _check_steps(config: JobConfig) -> None:
    """Raises `UserError` for a run that is in the middle of its work, and has more steps than it is now to have.

    Whether its last evaluation needs servers, for example, is then not known. An evicted run does not go on.
    """
    for run in config.every_run:
        goes_on = not is_finished(run) and eviction_of(run) is None
        if (committed := committed_steps(run)) > run.steps and goes_on:
            raise UserError(
                f"--resume: run {run.run_id!r} has {committed} steps already, and steps = {run.steps} asks for fewer; set "
                f"{'its steps' if config.runs else 'orchestrator.steps'} to {committed} or more, or start anew with --fresh"
            )


def _is_occupied(directory: Path) -> bool:
    """Whether the directory holds more than the lock and the remains of interrupted writes."""
    if not directory.exists():
        return False
    return any(entry.name != JOB_LOCK and not entry.name.endswith(".partial") for entry in directory.iterdir())


def _aside(directory: Path) -> Path:
    """The path to which `--fresh` moves the directory: the first free one of `NAME.1`, `NAME.2`, ..."""
    number = 1
    while (candidate := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return candidate


@contextmanager
def claim_directory(directory: Path, fresh: bool) -> Iterator[Path | None]:
    """Holds the directory's lock during the block. With `fresh`, moves the former content aside; yields its new path, or None.

    What a killed command left running in what is moved is stopped first.

    Raises `UserError` if the directory cannot be made, and its subclass `Obstructed` if another process holds the lock.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory)
        moved = None
        if fresh and _is_occupied(directory):
            _end_earlier(directory)
            _check_no_run_lives(directory)
            moved = _aside(directory)
            directory.rename(moved)
            directory.mkdir(exist_ok=True)  # another command may have made it again already
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
    return take_lock(
        directory / JOB_LOCK, _who_runs(directory) or "another `counterpoint run` or `counterpoint sft` uses it"
    )
