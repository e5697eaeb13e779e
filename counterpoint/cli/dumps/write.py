"""The commands that write a dump: `counterpoint synthesize` of any size, `counterpoint import-dump` of pickled rollouts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from counterpoint.job.replay.dump_directory import check_absent
from counterpoint.job.replay.import_dump import ImportedRollouts
from counterpoint.job.replay.restricted_pickle import PickleError
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.orchestrator.rollouts.dump import DumpError, DumpHeader, write_dump
from counterpoint.transport.errors import UserError

SHOWN = 5
"""Number of unreadable rollouts whose reasons are printed."""

LINE_SECONDS = 10.0
"""Seconds between two plain lines."""

Item = TypeVar("Item")


def synthesize(arguments: list[str]) -> int:
    """`counterpoint synthesize OUT`: makes up a dump, for `replay` and `attribute`.

    Raises `UserError` for an impossible shape.
    """
    given = vars(_synthesize_parser().parse_args(arguments))
    out: Path = given.pop("out")
    try:
        shape = Shape(**given)
    except ValueError as error:
        raise UserError(f"synthesize: {error}") from None
    check_absent(out)
    started = time.monotonic()
    rollouts = progress_bar(synthetic_rollouts(shape), shape.rollouts, "rollouts")
    header = write_dump(out, header_of(shape), rollouts)
    print(describe_dump(out, header, time.monotonic() - started), flush=True)
    return 0


def _synthesize_parser() -> argparse.ArgumentParser:
    default = Shape()
    parser = argparse.ArgumentParser(
        prog="counterpoint synthesize",
        description="Makes up a step's rollouts and writes them as a dump: turns and lengths with a long tail, rewritten "
        "contexts, several agents in one rollout, failures, partial groups. The same arguments give the same dump.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for name, meaning in (
        ("rollouts", "how many"),
        ("turns", "of the longest rollout"),
        ("tokens", "of the longest rollout"),
        ("layers", "of routed experts"),
        ("top-k", "experts a token and layer"),
        ("experts", "of each layer; uint8 up to 256, uint16 above"),
        ("group-size", "rollouts of one example"),
        ("seed", "of everything that is random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name.replace("-", "_")), help=meaning)
    parser.add_argument("--even", action="store_true", help="all rollouts alike, as benchmarks want them")
    parser.add_argument("out", type=Path, metavar="OUT", help="the dump's directory, which must not exist")
    return parser


def import_dump(arguments: list[str]) -> int:
    """`counterpoint import-dump FILE.pkl OUT`: writes pickled rollouts of the reference system as a dump.

    Raises `UserError` for a file that cannot be imported.
    """
    given = _import_parser().parse_args(arguments)
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


def _import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint import-dump",
        description="Writes the rollouts of a pickled list[RolloutOutput] (prime-rl, verifiers) as a dump. The pickle may hold "
        "containers, numbers, strings, bytes and numpy arrays; anything else is refused by its name, and nothing of it runs.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE.pkl", help="the pickle")
    parser.add_argument("out", type=Path, metavar="OUT", help="the dump's directory, which must not exist")
    return parser


def describe_dump(directory: Path, header: DumpHeader, seconds: float) -> str:
    """Describes a dump that was written in `seconds`."""
    nbytes = sum(header.files.values())
    return f"{directory}: {header.rollouts} rollouts, {header.turns} turns, {nbytes / 1e9:.3g} GB in {seconds:.1f} s"


def progress_bar(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    """Yields `items`, of which there are `total`, and shows how many were yielded."""
    console = Console(stderr=True)
    return _with_bar(items, total, unit, console) if console.is_terminal else _with_lines(items, total, unit, console)


def _with_bar(items: Iterable[Item], total: int, unit: str, console: Console) -> Iterator[Item]:
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, total=total)


def _with_lines(items: Iterable[Item], total: int, unit: str, console: Console) -> Iterator[Item]:
    last = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            console.print(f"{count}/{total} {unit}", highlight=False, soft_wrap=True)
