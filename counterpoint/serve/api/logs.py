"""`/jobs/{job}/logs` and `/jobs/{job}/logs/{name}`: which logs a job has, and the end of one."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field

from counterpoint.job.reading.log_files import log_files_in
from counterpoint.job.reading.redaction import redact_line
from counterpoint.job.reading.rollouts.view import name_of as shown
from counterpoint.serve.endpoint import Endpoint, NotFound, reads
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.printable import shortened

MAX_BYTES = 256 * 1024
"""What is read of a log: its end."""


class LogsParameters(Config):
    """Which job."""

    job: str
    """The job's id."""


class LogParameters(LogsParameters):
    """Which log, and how much of it."""

    name: str
    """The name of the role or run."""
    lines: int = Field(default=200, ge=1, le=2000)
    """How many of the last lines."""


class LogsAnswer(Config):
    """The logs of a job."""

    names: list[str]
    """Roles, workers and runs that have one."""


class LogAnswer(Config):
    """The end of a log."""

    lines: list[str]
    """The last lines, the newest last. What looks like a key is left out."""
    size: int
    """Bytes of the whole file."""
    cut: bool
    """Whether there are lines before these."""


@reads("/jobs/{job}/logs", "Lists the logs of a job.")
def list_logs(jobs: Jobs, given: LogsParameters) -> LogsAnswer:
    """Answers the names."""
    return LogsAnswer(names=sorted(shown(name) for name in log_files_in(jobs.get(given.job).directory)))


@reads("/jobs/{job}/logs/{name}", "Shows the end of a log.")
def show_log(jobs: Jobs, given: LogParameters) -> LogAnswer:
    """Answers the end of one log, of at most `MAX_BYTES`."""
    files = {shown(name): path for name, path in log_files_in(jobs.get(given.job).directory).items()}
    if given.name not in files:
        raise NotFound(
            "there is no such log",
            where="name",
            value=given.name,
            expected="one of: " + shortened(", ".join(sorted(files)), 500),
        )
    try:
        with open_regular(files[given.name]) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - MAX_BYTES)
            file.seek(begin)
            text = file.read(MAX_BYTES)
    except (OSError, UntrustedFileError) as error:
        raise NotFound(f"the log cannot be read: {error}", where="name", value=given.name) from None
    lines = text.decode(errors="replace").splitlines()
    whole = lines[1:] if begin > 0 else lines
    last = whole[-given.lines :]
    return LogAnswer(lines=[redact_line(line) for line in last], size=size, cut=begin > 0 or len(last) < len(whole))


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (list_logs, show_log)
