"""The logs of a job: their paths, their last lines, and what is appended to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import holds_job
from counterpoint.cluster.job_handle import worker_logs
from counterpoint.job.directory import own_steps, run_ids_in
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.place import BEGINNING, Place
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular

CHUNK_BYTES = 64 * 1024


def log_files_in(directory: Path) -> dict[str, Path]:
    """Returns the path of every log of a job by the name of its role or run.

    A run's log is the output of its process, which includes tracebacks, or, for a run that the job did not start, the run's own
    log. A submitted job has one for its master and one for each worker. Raises `UserError` for a damaged `job.json` or
    `cluster_job.json`.
    """
    files = {path.stem: path for path in sorted(directory.glob("*.log"))}
    if holds_job(directory):
        try:
            return files | worker_logs(directory)
        except ClusterError as error:
            raise UserError(str(error)) from None
    files |= trainer_logs(directory)
    own_ids = [*(own_steps(directory) or {})]
    for run_id in run_ids_in(directory):
        of_only = files.get("orchestrator") if own_ids == [run_id] else None
        output = of_only or files.get(f"orchestrator_{run_id}")
        own = directory / f"run_{run_id}" / "orchestrator.log"
        if log_file := output or (own if own.exists() else None):
            files[run_id] = log_file
    return files


def trainer_logs(directory: Path) -> dict[str, Path]:
    """Returns the path of each log of the trainer's workers by the worker's name; the first node has that of a lone trainer."""
    files = {path.stem: path for path in sorted((directory / "trainer").glob("trainer*.log"))}
    first = {name: files["trainer"] for name in ("trainer-0",) if "trainer" in files and "trainer-1" in files}
    return files | first


def last_bytes(log_file: Path, count: int, end: int) -> bytes:
    """Returns the last `count` lines before the position `end`.

    Raises `FileNotFoundError`, and `UntrustedFileError` for anything but a regular file.
    """
    size = CHUNK_BYTES
    with open_regular(log_file) as file:
        while True:
            begin = max(0, end - size)
            file.seek(begin)
            text = file.read(end - begin)
            ends = count + text.endswith(b"\n")  # a newline at the end of the text ends no further line
            parts = text.rsplit(b"\n", min(ends, sys.maxsize))
            if len(parts) > ends:
                return b"\n".join(parts[1:])
            if begin == 0:
                return text
            size *= 4


def appended(log_file: Path, position: int) -> Iterator[bytes]:
    """Yields, without end, the next chunk appended to the file after `position`; empty if there is none yet.

    A file that was replaced or cut, as by log rotation, is read from its beginning.
    """
    place: Place | None = None
    while True:
        try:
            with open_regular(log_file) as file:
                place = place or Place.at(file.fileno(), position)
                if place.offset < position or not place.is_in(file.fileno()):
                    place, position = BEGINNING, 0
                file.seek(place.offset)
                chunk = file.read(CHUNK_BYTES)
        except (FileNotFoundError, UntrustedFileError):  # between the old file and the new one
            chunk = b""
        place = place and place.plus(chunk)
        yield chunk
