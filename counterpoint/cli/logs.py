"""`counterpoint logs NAME`: prints the end of a run's or role's log, and, with `--follow`, new lines as they are written."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.job.reading.log_files import appended, last_bytes, log_files_in
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError

POLL_SECONDS = 0.2


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` if there is no such log."""
    given = _parser().parse_args(arguments)
    job = job_of(given)
    logs = log_files_in(job)
    directory, names = job.absolute(), ", ".join(logs)
    if not logs:
        raise UserError(f"{directory} holds no log; --job names the job's directory")
    if given.name is None:
        print(f"logs in {directory}: {names}")
        return 0
    if given.name not in logs:
        raise UserError(f"there is no log of {given.name!r} in {directory}; there are: {names}")
    position = _print_end(logs[given.name], given.lines)
    if given.follow:
        _follow(logs[given.name], position)
    return 0


def _print_end(log_file: Path, lines: int) -> int:
    """Prints the last lines; returns the position after them."""
    try:
        position = log_file.stat().st_size
        sys.stdout.buffer.write(last_bytes(log_file, lines, position))
    except (FileNotFoundError, UntrustedFileError) as error:
        raise UserError(f"{log_file} cannot be read: {error}") from None
    sys.stdout.flush()
    return position


def _follow(log_file: Path, position: int) -> None:
    """Prints what is appended to the file, until Ctrl-C."""
    try:
        for chunk in appended(log_file, position):
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            if not chunk:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint logs",
        description="Prints the end of the log of one run or role of a job. Without NAME, lists the logs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a run's id, or trainer, inference_0, orchestrator, ..."
    )
    add_job(parser)
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
