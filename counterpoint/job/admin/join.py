"""Starts a guest of a live job from a TOML text, as `counterpoint orchestrator FILE --join DIRECTORY` does.

A job's workers are fixed when it starts, so its keepers cannot host a guest. The guest becomes a process of its own: in its own
session, with its output in `guests/<run id>.log`, so that it outlives whoever started it. The job knows it by its lock, stays for
it, and `stop`, `evict` and the others reach it like any run. Nobody restarts it: join again with `resume`.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from pathlib import Path

from counterpoint.job.admin.ask import NotAnswered, Refused, alone, require_job
from counterpoint.job.check import SAFE_PATH, check_imports
from counterpoint.job.configuration.layers import without_configuration
from counterpoint.job.configuration.load import load
from counterpoint.job.configuration.named_files import check_run_files
from counterpoint.job.directory import orchestrator_of
from counterpoint.job.file_kind import other_kind
from counterpoint.job.join import allowed_imports, check_goes_on, check_joins, values_of_job
from counterpoint.orchestrator.run_directory import holds_run
from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import MAX_CONFIG_BYTES
from counterpoint.transport.config import Config
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.process.child import Child

GUESTS = "guests"
"""Folder in the job's directory: the files and the output of the runs that joined here."""

START_SECONDS = 60.0
"""How long the orchestrator may take to take its directory over: it imports its libraries first."""

POLL_SECONDS = 0.1


class Joined(Config, frozen=True):
    """A guest that has begun."""

    run_id: str
    """The id of the run that joins."""
    pid: int
    """The process id of its orchestrator."""
    file: Path
    """The file that describes the run."""
    log: Path
    """The file with the output of its orchestrator."""


def join_run(
    job: Path, text: str, *, name: str = "the run's file", resume: bool = False, timeout: float = START_SECONDS
) -> Joined:
    """Starts a run from the text of its file, and returns once its orchestrator has taken its directory over.

    Errors call the file `name`. What it names by import path, if the job allows it, is run by that process, with the rights of
    this one.

    Raises `UserError` for a file that is wrong or does not fit the job, `Refused` if there is such a run already or it is being
    joined, and `NotAnswered`, with the end of its output, if it does not begin.
    """
    require_job(job)
    if len(text.encode(errors="replace")) > MAX_CONFIG_BYTES:
        raise UserError(f"the run's file has more than {MAX_CONFIG_BYTES} bytes")
    guests = (job / GUESTS).absolute()
    guests.mkdir(exist_ok=True)
    given = guests / f".{secrets.token_hex(8)}.toml"
    write_atomically(given, text.encode())
    try:
        config = _load(job, given, name, resume)
        check_joins(config, job)
        check_imports([config], allowed=allowed_imports(job))
        check_run_files(config)
        check_goes_on(config)
        # The run's file is kept from others until its orchestrator has read it.
        with alone(guests / f"{config.run_id}.lock", f"run {config.run_id} is being joined to {job} already"):
            _check_free(job, config)
            file = guests / f"{config.run_id}.toml"
            given.replace(file)
            return _start(job, config, file, timeout)
    finally:
        given.unlink(missing_ok=True)


def _load(job: Path, given: Path, name: str, resume: bool) -> RunConfig:
    """Loads the run's file, which nobody but us knows by this name. Raises `UserError`."""
    try:
        return load(RunConfig, given, ["--resume=true"] if resume else [], values_of_job(str(job)))
    except UserError as error:
        if (other := other_kind(given, RunConfig)) is not None:
            kind, taker = other
            raise UserError(f"{name}: this is a {kind} file, of `counterpoint {taker}`; expected a run's") from None
        raise UserError(str(error).replace(str(given), name)) from None


def _check_free(job: Path, config: RunConfig) -> None:
    """Raises `Refused` if the run's directory is not free."""
    if orchestrator_of(job, config.run_id) is not None:
        raise Refused(f"run {config.run_id} runs in {job} already")
    if holds_run(config.run_dir) and not config.resume:
        raise Refused(f"{config.run_dir} holds a run already; resume it, or choose another run_id")


def _start(job: Path, config: RunConfig, file: Path, timeout: float) -> Joined:
    log = file.with_suffix(".log")
    name = f"the orchestrator of run {config.run_id}"
    try:
        guest = Child(name, command_of(job, config, file), environment=_environment(), log=log, guarded=False)
    except OSError as error:
        raise NotAnswered(f"{name} cannot be started: {error}") from None
    threading.Thread(target=guest.wait, name=name, daemon=True).start()  # no zombie is left when it ends
    deadline = time.monotonic() + timeout
    while (holder := orchestrator_of(job, config.run_id)) is None or holder.pid != guest.pid:
        if guest.code is not None or time.monotonic() > deadline:
            state = "has not begun" if guest.code is None else "has ended"
            raise NotAnswered(f"{name} {state}; the end of {log}:\n" + "\n".join(guest.last_lines(20)))
        time.sleep(POLL_SECONDS)
    return Joined(run_id=config.run_id, pid=guest.pid, file=file, log=log)


def command_of(job: Path, config: RunConfig, file: Path) -> list[str]:
    """Returns the command of a guest's orchestrator."""
    command = [sys.executable, "-m", "counterpoint.cli.main", "orchestrator", str(file), "--join", str(job.absolute())]
    return command + ["--resume"] * config.resume


def _environment() -> dict[str, str]:
    """This process's, without what belongs to it alone: its configuration, and its place below systemd or a job."""
    own = without_configuration(os.environ)
    return {name: value for name, value in own.items() if not name.startswith("CLUSTER_")} | SAFE_PATH
