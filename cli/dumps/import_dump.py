"""`counterpoint import-dump FILE.pkl OUT`: writes the reference system's pickled rollouts as a dump."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cli.display.dump_line import describe_dump
from cli.display.progress_bar import progress_bar
from job.replay.dump_directory import check_absent
from job.replay.import_dump import ImportedRollouts
from job.replay.restricted_pickle import PickleError
from orchestrator.rollouts.dump import DumpError, write_dump
from transport.errors import UserError

SHOWN = 5
"""Number of unreadable rollouts whose reasons are printed."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a file that cannot be imported."""
    given = _parser().parse_args(arguments)
    if not given.file.is_file():
        raise UserError(f"{given.file} is not a file")
    check_absent(given.out)
    started = time.monotonic()
    megabytes = given.file.stat().st_size / 1e6
    print(f"reading {given.file}, {megabytes:,.3f} MB", file=sys.stderr, flush=True)
    try:
        imported = ImportedRollouts(given.file)
        rollouts = progress_bar(imported.rollouts(), imported.header.shipped, "rollouts")
        header = write_dump(given.out, imported.header, rollouts)
    except (PickleError, DumpError) as error:
        raise UserError(str(error)) from None
    print(describe_dump(given.out, header, time.monotonic() - started))
    for what, count in sorted(imported.left_out.items()):
        print(f"left out: {what} ({count} times)")
    if imported.unreadable:
        print(f"imported as failed, since they could not be read: {len(imported.unreadable)} rollouts")
    for position, reason in imported.unreadable[:SHOWN]:
        print(f"  rollout {position}: {reason}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint import-dump",
        description="Writes the rollouts of a pickled list[RolloutOutput] (prime-rl, verifiers) as a dump. The pickle may hold "
        "containers, numbers, strings, bytes and numpy arrays; anything else is refused by its name, and nothing of it runs.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE.pkl", help="the pickle")
    parser.add_argument("out", type=Path, metavar="OUT", help="the dump's directory, which must not exist")
    return parser
