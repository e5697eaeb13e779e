"""Ends one run of a job in order: finds its orchestrator, sends it SIGTERM, and waits for its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from counterpoint.cluster.manager.ending import LONGEST_BACKOFF_SECONDS
from counterpoint.job.directory import is_running, lock_file_of, orchestrator_of, own_steps, written_config
from counterpoint.job.number_format import duration
from counterpoint.job.processes_file import read_workers
from counterpoint.job.reading.run_state import is_to_start
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import LockHolder

GRACE_SECONDS = 30.0
"""Added to the run's `shutdown_timeout_seconds`, after which its orchestrator has ended."""

DEFAULT_SHUTDOWN_SECONDS = RunConfig.model_fields["shutdown_timeout_seconds"].default

LONGEST_SHUTDOWN_SECONDS = 86400.0
"""Largest `shutdown_timeout_seconds` that is believed: a guest may write any number."""

START_SECONDS = LONGEST_BACKOFF_SECONDS + GRACE_SECONDS
"""How long to wait for the orchestrator of a run that is starting, or restarting after a death."""

POLL_SECONDS = 0.1


def await_orchestrator(directory: Path, run_id: str) -> LockHolder | None:
    """Returns the run's orchestrator, after a restart if it has died; None if there is none and the job will not start one.

    Raises `UserError` if it does not start within `START_SECONDS`.
    """
    began = time.monotonic()
    while not _is_known(holder := orchestrator_of(directory, run_id)) and (holder or _will_start(directory, run_id)):
        if time.monotonic() - began > START_SECONDS:
            raise UserError(
                f"run {run_id} is to be started and was not within {duration(START_SECONDS)}; try again, or keep it out with "
                "--evict REASON"
            )
        time.sleep(POLL_SECONDS)
    return holder


def await_end(directory: Path, run_id: str, holder: LockHolder, timeout: float) -> bool:
    """Waits until this orchestrator has ended, at most `timeout` seconds; returns whether it has."""
    began = time.monotonic()
    while orchestrator_of(directory, run_id) == holder:
        if time.monotonic() - began > timeout:
            return False
        time.sleep(POLL_SECONDS)
    return True


def stop_timeout(directory: Path, run_id: str) -> float:
    """Returns the seconds within which the run's orchestrator ends, from the configuration that it wrote, or the default."""
    written = written_config(directory, run_id).get("shutdown_timeout_seconds")
    if isinstance(written, int | float) and 0 < written < LONGEST_SHUTDOWN_SECONDS:
        return float(written) + GRACE_SECONDS
    return float(DEFAULT_SHUTDOWN_SECONDS) + GRACE_SECONDS


def terminate(directory: Path, run_id: str, holder: LockHolder) -> None:
    """Sends SIGTERM to the run's orchestrator if it is alive.

    Raises `UserError` if it runs on another machine or belongs to another user, or if the process that the lock names does not
    hold the lock.
    """
    if holder.host != socket.gethostname():
        raise UserError(
            f"run {run_id} runs on {holder.host or 'another machine'} (process {holder.pid}); stop it there"
        )
    try:
        process = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return
    try:
        if orchestrator_of(directory, run_id) == holder:  # so the descriptor is not of a later process with the same id
            if not _has_open(holder.pid, lock_file_of(directory, run_id)):
                raise UserError(
                    f"the lock of run {run_id} names process {holder.pid}, which does not hold it: it was not stopped"
                )
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise UserError(f"run {run_id} (process {holder.pid}) belongs to another user; stop it as that user") from None
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(process)


def _is_known(holder: LockHolder | None) -> bool:
    """Whether the lock names its holder. An orchestrator writes its name a moment after it took the lock."""
    return holder is not None and holder.pid != 0


def _will_start(directory: Path, run_id: str) -> bool:
    """Whether the job's supervisor will start an orchestrator for the run: it is the job's own and has not failed for good."""
    if not is_running(directory):
        return False
    workers = read_workers(directory)
    return bool(workers) and run_id in (own_steps(directory) or {}) and is_to_start(run_id, workers)


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process has the file open. A guest may write the id of any process into its lock. Raises `PermissionError`."""
    found = path.stat()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            if os.path.samestat(descriptor.stat(), found):
                return True
    return False
