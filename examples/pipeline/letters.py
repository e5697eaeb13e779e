"""What the pipeline computes, as pure functions: ids of letters, pairs of neighbours, and a table of how often they occur.

Each depends on its arguments alone, also `draw`, whose chance is seeded by the record's name. So whoever repeats a step after a
death makes the same record again.
"""

from __future__ import annotations

import string
import zlib

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 1 + len(string.ascii_lowercase)
"""The letters from 1 on; 0 stands for everything else."""

Ids = NDArray[np.uint8]
Table = NDArray[np.int64]

_IDS = np.zeros(256, dtype=np.uint8)
_IDS[np.frombuffer(string.ascii_lowercase.encode(), dtype=np.uint8)] = np.arange(1, VOCABULARY)


def tokenize(line: str) -> Ids:
    """Returns an id for each byte of a line."""
    return _IDS[np.frombuffer(line.lower().encode(), dtype=np.uint8)]


def draw(ids: Ids, origin: str, position: int, draws: int) -> Ids | None:
    """Draws pairs of neighbours `[draws, 2]` from a record, with repetition; None from one that has no pair."""
    if len(ids) < 2:
        return None
    places = np.random.default_rng([zlib.crc32(origin.encode()), position]).integers(len(ids) - 1, size=draws)
    return np.stack([ids[places], ids[places + 1]], axis=1)


def empty_table() -> Table:
    """Returns the table before any pair: `[VOCABULARY, VOCABULARY]`, by first and second id."""
    return np.zeros((VOCABULARY, VOCABULARY), dtype=np.int64)


def count(table: Table, pairs: Ids) -> None:
    """Adds pairs to a table. Whole numbers: the order of the records does not matter."""
    np.add.at(table, (pairs[:, 0], pairs[:, 1]), 1)


def bits(table: Table) -> float:
    """Returns how many bits a letter takes for whoever knows the one before it and the table; NaN for an empty one."""
    total = table.sum()
    if not total:
        return float("nan")
    first, second = np.nonzero(table)
    seen = table[first, second]
    return float((seen * np.log2(table.sum(axis=1)[first] / seen)).sum() / total)
