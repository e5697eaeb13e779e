"""The interface of data: a sequence of rows that knows where each row is from and what all of them are.

`json_lines.py`, `parquet.py` and `hub.py` implement it; `load.py` chooses. A row is read when it is asked for, in some ten
microseconds, so that an environment may do so on the event loop.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import orjson

from counterpoint.transport.exact_json import dumps

Row = Mapping[str, Any]
Float64Array = npt.NDArray[np.float64]


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the line, what was found and what was expected."""


class Rows(ABC, Sequence[Row]):
    """Rows in a fixed order."""

    weights: Float64Array | None = None
    """How often each row is drawn, relative to the others; None: all alike."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the content: the same rows have the same one, on every machine."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """Returns the row at `index`, from 0 to the length - 1. Raises `DataError`."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Returns where the row at `index` is from, for a person: `FILE:LINE`, or the like."""

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        """Returns one row, or a view of some. Raises `IndexError`, and `DataError` for a row that cannot be read."""
        if isinstance(index, slice):
            return Chosen(self, range(len(self))[index], {})
        return self.row(range(len(self))[index])

    def __iter__(self) -> Iterator[Row]:
        """Iterates over all rows, each read when it is reached."""
        return (self.row(index) for index in range(len(self)))


class Listed(Rows):
    """Rows of a configuration."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """See `Rows`."""
        return digest(dumps(list(self._rows), option=orjson.OPT_SORT_KEYS, default=str))

    def row(self, index: int) -> Row:
        """See `Rows`."""
        return self._rows[index]

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"rows[{index}]"


class JoinedRows(Rows):
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._length = sum(map(len, parts))

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """See `Rows`."""
        return digest("".join(part.fingerprint for part in self._parts).encode())

    def row(self, index: int) -> Row:
        """See `Rows`."""
        part, within = self._placed(index)
        return part.row(within)

    def where(self, index: int) -> str:
        """See `Rows`."""
        part, within = self._placed(index)
        return part.where(within)

    def _placed(self, index: int) -> tuple[Rows, int]:
        for part in self._parts:
            if index < len(part):
                return part, index
            index -= len(part)
        raise IndexError(index)


class Chosen(Rows):
    """Some rows of others, with some of their columns under new names."""

    def __init__(self, rows: Rows, indices: range, columns: Mapping[str, str]) -> None:
        """`columns` maps new names to those in `rows`; empty, a row is as it is."""
        self._rows = rows
        self._indices = indices
        self._columns = columns

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def fingerprint(self) -> str:
        """See `Rows`."""
        chosen = f"{self._indices.start}:{self._indices.step}:{len(self)} {sorted(self._columns.items())}"
        return digest(f"{self._rows.fingerprint} {chosen}".encode())

    def row(self, index: int) -> Row:
        """See `Rows`. Raises `DataError`, too, for a row that lacks a column."""
        whole = self._rows.row(self._indices[index])
        try:
            return {name: whole[column] for name, column in self._columns.items()} if self._columns else whole
        except KeyError as error:
            raise DataError(f"{self.where(index)}: {lacks(error.args[0], list(whole))}") from None

    def where(self, index: int) -> str:
        """See `Rows`."""
        return self._rows.where(self._indices[index])


def unwritable(value: Any) -> str:
    """Returns the kind of what is in a value, at any depth, and is not what JSON has; empty if all of it is."""
    if type(value) in (list, dict):
        return next(filter(None, map(unwritable, value.values() if isinstance(value, dict) else value)), "")
    if isinstance(value, float):
        return "" if math.isfinite(value) else "NaN" if math.isnan(value) else "infinity"
    return "" if value is None or isinstance(value, str | int) else type(value).__name__


def lacks(column: str, present: Sequence[str]) -> str:
    """Says that a column is missing, and which are there."""
    nearest = difflib.get_close_matches(column, present, n=1)
    advice = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"there is no column {column!r}{advice} It has {', '.join(map(repr, present[:20])) or 'none'}"


def digest(content: bytes) -> str:
    """Returns a short digest of content, in hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
