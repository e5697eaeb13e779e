"""`counterpoint stop RUN`: ends one run of a job in order, whoever started its orchestrator; the others do not notice."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path

from cluster.events import ENDED
from cluster.lifecycle import LONGEST_BACKOFF_SECONDS
from job.directory import (
    JOB_FILE,
    PROCESSES_FILE,
    is_running,
    lock_file_of,
    orchestrator_of,
    own_runs,
    read_json,
    run_ids_in,
    steps_of,
    written_config,
)
from job.errors import UserError
from job.history import History
from job.summary import duration
from run.config import RunConfig
from trainer.runs.control_files import evict
from transport.config import IDENTIFIER_PATTERN
from transport.files.lock import Holder

USAGE = """usage: counterpoint stop RUN [--job DIRECTORY] [--evict REASON]

Ends the run in order: its orchestrator drains, commits, and exits with 143. It can be gone on with.
  --job DIRECTORY   the job's output directory; the current one unless given
  --evict REASON    ends it with that reason and exit code 3, and lets it come back only once its
                    control/evicted.txt is removed"""

GRACE_SECONDS = 30.0
"""On top of the run's `shutdown_timeout_seconds`, within which its orchestrator ends whatever happens."""

DEFAULT_SHUTDOWN_SECONDS = RunConfig.model_fields["shutdown_timeout_seconds"].default

LONGEST_SHUTDOWN_SECONDS = 86400.0
"""What a run may say at most that it takes to end."""

START_SECONDS = LONGEST_BACKOFF_SECONDS + GRACE_SECONDS
"""How long a run that is to start, or to be started again after it died, is waited for."""

POLL_SECONDS = 0.1


def main(arguments: list[str]) -> int:
    """The command: 0 once the run does not run any more, 1 when it would not end."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0 if arguments else 2
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run")
    parser.add_argument("--job", type=Path, default=Path())
    parser.add_argument("--evict")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"stop: {error}\n{USAGE}") from None
    if unknown:
        raise UserError(f"stop: {unknown[0]}: unexpected\n{USAGE}")
    _check_run(given.job, given.run)
    if given.evict is not None:
        evict(given.job, given.run, given.evict.strip() or "by its operator, without a reason")
    return _stop(given.job, given.run, evicted=given.evict is not None)


def _check_run(directory: Path, run_id: str) -> None:
    known = run_ids_in(directory)
    if not re.fullmatch(IDENTIFIER_PATTERN, run_id) or run_id not in known:
        there = f"its runs are {', '.join(known)}" if known else "it has none; --job names the job's directory"
        raise UserError(f"there is no run {run_id!r} in {directory.absolute()}: {there}")


def _stop(directory: Path, run_id: str, evicted: bool) -> int:
    holder = orchestrator_of(directory, run_id) if evicted else _await_start(directory, run_id)
    if holder is None:
        print(f"run {run_id} {'is evicted; it ' if evicted else ''}does not run; step {_progress(directory, run_id)}")
        return 0
    timeout = _shutdown_timeout(directory, run_id) + GRACE_SECONDS
    print(f"run {run_id} (process {holder.pid}) is to end, within {duration(timeout)}", flush=True)
    if not evicted:  # its orchestrator sees by itself that it was evicted
        _terminate(directory, run_id, holder)
    began = time.monotonic()
    while orchestrator_of(directory, run_id) == holder:
        if time.monotonic() - began > timeout:
            print(f"run {run_id} (process {holder.pid}) still runs after {duration(timeout)}; its log says why")
            return 1
        time.sleep(POLL_SECONDS)
    how = "was evicted" if evicted else "has stopped"
    print(f"run {run_id} {how} after {duration(time.monotonic() - began)}; step {_progress(directory, run_id)}")
    return 0


def _await_start(directory: Path, run_id: str) -> Holder | None:
    """The run's orchestrator, of one that has died the next; None when there is none and will be none. Raises `UserError`."""
    began = time.monotonic()
    while not _is_known(holder := orchestrator_of(directory, run_id)) and (holder or _is_to_start(directory, run_id)):
        if time.monotonic() - began > START_SECONDS:
            raise UserError(
                f"run {run_id} is to be started and was not within {duration(START_SECONDS)}; try again, or keep it out with "
                "--evict REASON"
            )
        time.sleep(POLL_SECONDS)
    return holder


def _is_known(holder: Holder | None) -> bool:
    """Whether there is one that has said who it is, which it does a moment after it took the run's lock."""
    return holder is not None and holder.pid != 0


def _is_to_start(directory: Path, run_id: str) -> bool:
    """Whether the job has the run among its workers and has not given it up: without an orchestrator it will get one."""
    if not is_running(directory) or not (directory / PROCESSES_FILE).exists():
        return False
    job = read_json(directory / JOB_FILE)
    if run_id not in (run["run_id"] for run in own_runs(job)):
        return False
    name = f"orchestrator_{run_id}" if job["runs"] else "orchestrator"
    workers = read_json(directory / PROCESSES_FILE)["workers"]
    return any(worker["name"] == name and worker["state"] not in ENDED for worker in workers)


def _terminate(directory: Path, run_id: str, holder: Holder) -> None:
    if holder.host != socket.gethostname():
        raise UserError(
            f"run {run_id} runs on {holder.host or 'another machine'} (process {holder.pid}); stop it there"
        )
    try:
        process = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return
    try:
        if orchestrator_of(directory, run_id) == holder:  # still: so it is that process, and none that got its number
            if not _has_open(holder.pid, lock_file_of(directory, run_id)):
                raise UserError(
                    f"the lock of run {run_id} names process {holder.pid}, which does not hold it: it was not stopped"
                )
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise UserError(f"run {run_id} (process {holder.pid}) belongs to another user; stop it as that one") from None
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(process)


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process has the file open. A lock's file may name any: it may be a guest's. Raises `PermissionError`."""
    found = path.stat()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            if os.path.samestat(descriptor.stat(), found):
                return True
    return False


def _shutdown_timeout(directory: Path, run_id: str) -> float:
    """Of the run, as its orchestrator wrote; the default before it has."""
    written = written_config(directory, run_id).get("shutdown_timeout_seconds")
    if isinstance(written, int | float) and 0 < written < LONGEST_SHUTDOWN_SECONDS:
        return float(written)
    return float(DEFAULT_SHUTDOWN_SECONDS)


def _progress(directory: Path, run_id: str) -> str:
    history = History.of(directory, run_id, steps_of(directory, run_id))
    history.refresh()
    return history.so_far
