"""The arguments that `replay` and `attribute` have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from job.replay.replay import Settings
from transport.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to `parser`."""
    parser.add_argument(
        "--synthetic-traffic",
        type=int,
        default=0,
        metavar="N",
        help="tasks that keep the loop busy meanwhile, as rollouts in flight do (default: none)",
    )
    parser.add_argument(
        "--gather-chunk-size",
        type=int,
        metavar="N",
        help="rollouts merged in one thread call (default: the dump's own)",
    )
    parser.add_argument("--process-pool", action="store_true", help="merge in a process instead of a thread")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import and call the advantage function that the dump names, if it is not built in",
    )
    parser.add_argument("--dump", dest="named", type=Path, metavar="DUMP", help="the same, by name")
    parser.add_argument(
        "dump", type=Path, nargs="?", metavar="DUMP", help="a dump's directory, such as raw_rollouts/step_7"
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments, with the one dump as `dump`, however it was given. Exits as a parser does."""
    given = parser.parse_args(arguments)
    dumps = [dump for dump in (given.dump, given.named) if dump is not None]
    if len(dumps) != 1:
        parser.error(f"expected one DUMP, found {len(dumps)}")
    (given.dump,) = dumps
    return given


def settings_of(given: argparse.Namespace, **settings: float) -> Settings:
    """Returns the settings of a replay. Raises `UserError` for a number that is too small."""
    for name in ("synthetic_traffic", "gather_chunk_size"):
        value = getattr(given, name)
        least = 0 if name == "synthetic_traffic" else 1
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} = {value}; expected at least {least}")
    return Settings(given.synthetic_traffic, given.gather_chunk_size, given.process_pool, **settings)  # type: ignore[arg-type]
