"""How far the ranks of elastic training are: each counts what it has done and how long it was idle, and its worker adds it up.

A script that wants to be scaled by its progress makes one `ProgressFile` in each rank. Totals are of one round, since every
round has new ranks. A rank's file is replaced as a whole, so that it is never read half.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

logger = logging.getLogger(__name__)

VARIABLE = "CLUSTER_PROGRESS"
"""The environment variable that names the directory of a round's files on this node."""

MAX_BYTES = 4096
"""The longest file of one rank."""

MOST_RANKS = 1024
"""Most ranks on one node; further files are not read."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What ranks have done since their round began."""

    done: float = 0.0
    """Units of work, such as samples."""
    idle_seconds: float = 0.0
    """Seconds in which they waited, of all ranks together."""
    ranks: int = 0
    """The number of ranks that have said anything."""

    def __add__(self, other: Totals) -> Totals:
        """Returns the totals of both."""
        return Totals(self.done + other.done, self.idle_seconds + other.idle_seconds, self.ranks + other.ranks)


NOTHING = Totals()


class ProgressFile:
    """A rank's count. Outside an elastic job, which nobody scales, it only counts."""

    def __init__(self) -> None:
        """Begins with nothing counted."""
        directory = os.environ.get(VARIABLE)
        rank = int(os.environ.get("RANK", "0"))
        self._path = None if directory is None else Path(directory) / f"progress-{rank}.json"
        self.totals = Totals(ranks=1)

    def add(self, done: float, idle_seconds: float = 0.0) -> None:
        """Counts so many units of work, such as samples, and seconds in which the rank waited.

        Raises `ValueError` for a number that is negative or not finite, `OSError` if the file cannot be written.
        """
        if not all(math.isfinite(number) and number >= 0 for number in (done, idle_seconds)):
            raise ValueError(f"done = {done}, idle_seconds = {idle_seconds}: expected numbers from 0 on")
        self.totals += Totals(done, idle_seconds)
        if self._path is not None:
            values = {"done": self.totals.done, "idle_seconds": self.totals.idle_seconds}
            write_atomically(self._path, json.dumps(values).encode(), durable=False)


def read_totals(directory: Path) -> Totals:
    """Returns the totals of all ranks whose files are in a round's directory; a file that is none of ours counts for nothing."""
    totals = Totals()
    for path in sorted(directory.glob("progress-*.json"))[:MOST_RANKS]:
        try:
            values = read_json(path, MAX_BYTES)
            done, idle = float(values["done"]), float(values["idle_seconds"])
            if not all(math.isfinite(number) and number >= 0 for number in (done, idle)):
                raise ValueError(f"done = {done}, idle_seconds = {idle}: expected numbers from 0 on")
        except FileNotFoundError:
            continue  # the round has ended
        except (UntrustedFileError, OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            _warn_once(f"the progress in {path} is ignored: {error}")
        else:
            totals += Totals(done, idle, ranks=1)
    return totals


@lru_cache(64)
def _warn_once(message: str) -> None:
    """The files are read again and again."""
    logger.warning("%s", message)
