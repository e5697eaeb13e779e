"""`counterpoint logs NAME`: the end of a run's or role's log, and, with `--follow`, new lines as they are written."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from job.directory import JOB_FILE, read_json, run_ids_in
from job.errors import UserError
from transport.files.untrusted import UntrustedFileError, open_regular

POLL_SECONDS = 0.2
CHUNK_BYTES = 64 * 1024


def main(arguments: list[str]) -> int:
    """The command."""
    given = _parser().parse_args(arguments)
    found = logs_in(given.job)
    if given.name is None or given.name not in found:
        if not found:
            raise UserError(f"{given.job.absolute()} holds no log; --job names the job's directory")
        there = ", ".join(found)
        if given.name is None:
            print(f"logs in {given.job.absolute()}: {there}")
            return 0
        raise UserError(f"there is no log of {given.name!r} in {given.job.absolute()}; there are: {there}")
    log_file = found[given.name]
    try:
        position = log_file.stat().st_size
        sys.stdout.buffer.write(_tail(log_file, given.lines, position))
    except (FileNotFoundError, UntrustedFileError) as error:
        raise UserError(f"{log_file} cannot be read: {error}") from None
    sys.stdout.flush()
    if given.follow:
        follow(log_file, position)
    return 0


def logs_in(directory: Path) -> dict[str, Path]:
    """Every log of a job, by the name of its role or run. A run's log is the output of its process, which includes tracebacks,
    or, if the job did not start the run, the run's own log."""
    files = {path.stem: path for path in sorted(directory.glob("*.log"))}
    if (trainer := directory / "trainer" / "trainer.log").exists():
        files["trainer"] = trainer
    job = read_json(directory / JOB_FILE) if (directory / JOB_FILE).exists() else {}
    alone = job["orchestrator"]["run_id"] if job and not job.get("runs") else None
    for run_id in run_ids_in(directory):
        output = files.get("orchestrator" if run_id == alone else f"orchestrator_{run_id}")
        own = directory / f"run_{run_id}" / "orchestrator.log"
        if log_file := output or (own if own.exists() else None):
            files[run_id] = log_file
    return files


def _tail(log_file: Path, count: int, end: int) -> bytes:
    """The last lines before the position `end`. Raises `UntrustedFileError` for anything but a regular file."""
    size = CHUNK_BYTES
    with open_regular(log_file) as file:
        while True:
            begin = max(0, end - size)
            file.seek(begin)
            text = file.read(end - begin)
            ends = count + text.endswith(b"\n")  # the newline at the end of the text ends no further line
            parts = text.rsplit(b"\n", ends)
            if len(parts) > ends:
                return b"\n".join(parts[1:])
            if begin == 0:
                return text
            size *= 4


def follow(log_file: Path, position: int) -> None:
    """Prints what is appended to the file, until Ctrl-C. A file that is replaced or truncated, as by log rotation, is read from
    the beginning."""
    try:
        for chunk in growth(log_file, position):
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            if not chunk:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return


def growth(log_file: Path, position: int) -> Iterator[bytes]:
    """What was appended to the file since the last call, in pieces; empty when there is nothing new."""
    inode = None
    while True:
        try:
            with open_regular(log_file) as file:
                stat = os.fstat(file.fileno())
                if stat.st_size < position or inode not in (None, stat.st_ino):
                    position = 0
                inode = stat.st_ino
                file.seek(position)
                chunk = file.read(CHUNK_BYTES)
        except (FileNotFoundError, UntrustedFileError):  # between the old file and the new one
            chunk = b""
        position += len(chunk)
        yield chunk


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint logs",
        description="Prints the end of the log of one run or role of a job. Without NAME, lists the logs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a run's id, or trainer, inference_0, orchestrator, ..."
    )
    parser.add_argument(
        "--job",
        type=Path,
        default=Path(),
        metavar="DIRECTORY",
        help="the job's output directory (default: the current one)",
    )
    parser.add_argument(
        "--lines",
        type=_line_count,
        default=50,
        metavar="N",
        help="number of last lines to print (default: %(default)s)",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="print new lines as they are written, until Ctrl-C")
    return parser


def _line_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 0")
    return int(text)
