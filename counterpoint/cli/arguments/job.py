"""Which job a command is about: `--job DIRECTORY`, or else the only one at or below the working directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable

MARKS = ("job.json", "cluster_job.json", "run_*/control", "trainer/metrics.jsonl")
"""What a job's directory holds one of: a job's file, that of a submitted job, a run whose roles were started one by one, or what
supervised fine-tuning leaves."""

MOST_NAMED = 10
"""Jobs that an error lists."""


def add_job(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Adds `--job`. With `positional`, the directory may stand alone, too, as in `counterpoint status outputs/demo`."""
    parser.add_argument(
        "--job",
        type=Path,
        metavar="DIRECTORY",
        help="the job's output directory (default: the only job at or below the working directory)",
    )
    if positional:
        parser.add_argument("directory", nargs="?", type=Path, metavar="DIRECTORY", help="the same as --job DIRECTORY")


def job_of(given: argparse.Namespace) -> Path:
    """Returns the directory that was named; without one, the only job's.

    Where there is no job at all, that is the working directory, which the command then refuses in its own words. Raises
    `UserError` if two directories were named, or none and there are several jobs.
    """
    named: Path | None = given.job
    alone: Path | None = getattr(given, "directory", None)
    if named is not None and alone is not None and named != alone:
        raise UserError(f"two jobs are named, {alone} and --job {named}; name one")
    return named or alone or _only_job()


def _only_job() -> Path:
    here = Path()
    if _holds_job(here):
        return here
    by_place: dict[Path, Path] = {}  # a link to a job is no other job
    for path in sorted(each for pattern in ("*/", "*/*/") for each in here.glob(pattern)):
        if _holds_job(path):
            by_place.setdefault(path.resolve(), path)
    by_place = {place: path for place, path in by_place.items() if place.parent not in by_place}  # a job's own sft/
    found = [*by_place.values()]
    if len(found) > 1:
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise UserError(
            f"there are {len(found)} jobs below {here.absolute()}: {', '.join(map(str, found[:MOST_NAMED]))}{more}; "
            "name one with --job DIRECTORY"
        )
    if not found:
        return here
    # Others may lie deeper: whoever steers a job reads which one it is.
    print(f"--job {printable(str(found[0]))}", file=sys.stderr)
    return found[0]


def _holds_job(directory: Path) -> bool:
    try:
        return any(any(directory.glob(mark)) for mark in MARKS)
    except PermissionError:  # somebody else's
        return False
