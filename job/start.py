"""Starts a job from Python: `counterpoint run` as a process of its own, and what a notebook asks of it.

    job = counterpoint.start("math.toml", fresh=True, orchestrator={"steps": 20})
    job.wait()
    counterpoint.read(job.directory).steps()

The job does not end with the Python process that started it, as it does not end with a shell.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.directory import JOB_FILE, JOB_LOCK
from counterpoint.job.inspection.status import JobStatus, StatusReader
from counterpoint.transport import exact_json
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import holder_of

_started: weakref.WeakSet[StartedJob] = weakref.WeakSet()


class StartedJob:
    """A job that this process started."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], output: int) -> None:
        self.directory = directory
        """The job's directory."""
        self._process = process
        self._output = output
        """Descriptor of the file, in memory, that has what the command prints."""
        weakref.finalize(self, os.close, output)
        self._status = StatusReader(directory)
        _started.add(self)

    @property
    def code(self) -> int | None:
        """The exit code of the job's command (`docs/commands.md`); None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def output(self) -> str:
        """What the command has printed so far: a job that cannot start says here why."""
        return os.pread(self._output, os.fstat(self._output).st_size, 0).decode(errors="replace")

    @property
    def is_beginning(self) -> bool:
        """Whether the command has yet to take the directory: what is there, if anything, is of an earlier job."""
        holder = holder_of(self.directory / JOB_LOCK)
        return self.code is None and (holder is None or holder.pid != self._process.pid)

    def status(self) -> JobStatus:
        """Returns the job's present status, without runs until they have begun. Raises `UserError` if it could not begin."""
        if self.code is None and (self.is_beginning or not (self.directory / JOB_FILE).exists()):
            return JobStatus(self.directory, None, {}, [], running=True)
        return self._status.read()

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Waits until the job has ended, and returns its exit code: 0 if it is done.

        Raises `TimeoutError` if it still runs after so many seconds.
        """
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job in {self.directory} still runs after {timeout_seconds:g} s") from None
        return 128 - code if code < 0 else code

    def stop(self, timeout_seconds: float | None = None) -> int:
        """Ends the job in order, so that it can be resumed, and returns its exit code: 143 unless it was done. As `wait`."""
        self._process.terminate()
        return self.wait(timeout_seconds)


def start(file: Path | str, *, resume: bool = False, fresh: bool = False, **overrides: Any) -> StartedJob:
    """Starts the job that `file` describes, and returns at once.

    Args:
        file: The job's TOML file.
        resume: As `--resume`.
        fresh: As `--fresh`.
        overrides: Values that replace those of the file, by section: `orchestrator={"steps": 20}`.

    Raises:
        UserError: The file or an override is wrong. What only the command finds out, such as a port that is taken, is in the
            job's `output`.
    """
    flags = [f"--{key}={value}" for key, value in _flags(overrides)]
    config = load(JobConfig, Path(file), flags)
    words = [*(["--resume"] if resume else []), *(["--fresh"] if fresh else []), *flags]
    command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "run", str(file), *words]
    output = os.memfd_create("output of a job")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    return StartedJob(config.output_dir, process, output)


def is_beginning(directory: Path) -> bool:
    """Whether a job that this process started has yet to take the directory."""
    return any(job.directory.absolute() == directory.absolute() and job.is_beginning for job in [*_started])


def _flags(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields each value with its key, as a command line has them."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flags(value, f"{above}{name}.")
        elif isinstance(value, str | Path):
            yield above + name, str(value)
        else:
            try:
                yield above + name, exact_json.dumps(value).decode()
            except TypeError as error:
                raise UserError(f"{above}{name}: {error}") from None
