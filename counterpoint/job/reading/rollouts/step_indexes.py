"""The indexes of a job's steps, as many as memory allows, and what is read by them: lists, one line, an example's attempts."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from counterpoint.job.directory import is_directory
from counterpoint.job.reading.rollouts.line_index import (
    IndexedLine,
    StepIndex,
    identity_of,
    record_in,
)
from counterpoint.job.reading.rollouts.rollout_records import UNSTEPPED, RolloutRecord, records_file
from counterpoint.job.reading.rollouts.selection import Placed, RowFilter, Selection, Sort, select
from counterpoint.transport.config import Config
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular

MOST_ROWS = 1_000_000
"""Rows that are kept of all steps of a job, some 70 MB."""


class IndexProgress(Config):
    """How much of the steps is indexed. A list of what is not all indexed is not all of it: ask again."""

    is_complete: bool
    """Whether all steps are indexed."""
    steps: int
    """Steps to be indexed."""
    indexed: int
    """How many of these are done."""
    read_bytes: int
    """Bytes that are indexed."""
    bytes: int
    """Bytes of the files that were begun."""
    problems: list[str]
    """Files that cannot be listed in full, and why."""


class StepIndexes:
    """The indexes of one job. Not for several threads at once (`Jobs.reading`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._indexes: OrderedDict[tuple[str, int], StepIndex] = OrderedDict()
        self._rows = 0

    def index(self, run: str, steps: Sequence[int], until: float) -> IndexProgress:
        """Indexes the files of these steps, in their order, until the moment `until` of `time.monotonic`.

        Those for which `MOST_ROWS` leaves no room are left out, and are a problem.
        """
        indexed, read, size, problems, has_read = 0, 0, 0, [], False
        own: set[tuple[str, int]] = set()
        rows, left_out = 0, []
        for step in steps:
            key = (run, step)
            if rows >= MOST_ROWS:
                left_out.append(step)
                self._forget(key, len(self._indexes.get(key, ())))
                indexed += 1
                continue
            known, path = self._indexes.get(key), records_file(self._directory, run, step)
            found = known if known is not None and known.path == path else StepIndex(path)
            before = len(known) if known is not None else 0
            try:
                if (not found.is_complete or _has_changed(found)) and (time.monotonic() < until or not has_read):
                    self._advance(found, until)
                    has_read = True
            except (OSError, UntrustedFileError) as error:
                problems.append(f"step {step}: {_reason(error)}")
                self._forget(key, before)
                indexed += 1
                continue
            if len(found) or found.is_complete:
                own.add(key)
                rows += len(found)
                self._keep(key, found, len(found) - before, own)
            problems += _problems(step, found)
            indexed, read, size = indexed + found.is_complete, read + found.read_bytes, size + found.size
        if left_out:
            problems.insert(
                0,
                f"steps {min(left_out)} to {max(left_out)} are left out: the others have {rows:,} rollouts, "
                f"and at most {MOST_ROWS:,} are looked through",
            )
        return IndexProgress(
            is_complete=indexed == len(steps),
            steps=len(steps),
            indexed=indexed,
            read_bytes=read,
            bytes=size,
            problems=problems[:20],
        )

    def rows(self, run: str, steps: Sequence[int]) -> Iterator[Placed]:
        """Yields the rows that are indexed of these steps, in order."""
        for step in steps:
            if (found := self._indexes.get((run, step))) is not None:
                yield from ((step, row) for row in found.rows())

    def select(
        self, run: str, steps: Sequence[int], wanted: RowFilter, sort: Sort, offset: int, limit: int
    ) -> Selection:
        """Returns a part of the list of the rows that are indexed of these steps (`selection.py`)."""
        indexes = [(step, found) for step in steps if (found := self._indexes.get((run, step))) is not None]
        return select(indexes, wanted, sort, offset, limit)

    def attempts(self, run: str, steps: Sequence[int], environment: str, example_index: int) -> Iterator[Placed]:
        """Yields the indexed rows of one example."""
        for step in steps:
            if (found := self._indexes.get((run, step))) is not None:
                yield from ((step, row) for row in found.rows_of(environment, example_index))

    def line(self, run: str, step: int, number: int, until: float) -> tuple[IndexedLine, bytes] | None:
        """Returns a row and its line; None if there is none (yet), or its file has changed since. Raises as `StepIndex`."""
        self.index(run, [step], until)
        found = self._indexes.get((run, step))
        row = found.row(number) if found is not None else None
        if found is None or row is None:
            return None
        with open_regular(found.path) as file:
            if identity_of(file) != found.identity:
                return None
            return row, os.pread(file.fileno(), row.length, row.offset)

    def records(self, run: str, placed: Sequence[Placed], most_bytes: int) -> list[RolloutRecord | None]:
        """Returns the records of rows; None for those longer than `most_bytes`, and those that are no records any more."""
        return [
            None if row.length > most_bytes or (line := self._line_of(run, step, row)) is None else record_in(line)
            for step, row in placed
        ]

    def _line_of(self, run: str, step: int, row: IndexedLine) -> bytes | None:
        try:
            with open_regular(records_file(self._directory, run, step)) as file:
                return os.pread(file.fileno(), row.length, row.offset)
        except (OSError, UntrustedFileError):
            return None

    def _advance(self, index: StepIndex, until: float) -> None:
        if not is_directory(index.path.parent):
            raise UntrustedFileError(f"{index.path.parent.name} is no directory")
        index.advance(until)

    def _keep(self, key: tuple[str, int], index: StepIndex, added: int, own: set[tuple[str, int]]) -> None:
        """Keeps an index, and as many others as there is room for, but all of `own`, those of the same request."""
        self._indexes[key] = index
        self._indexes.move_to_end(key)
        self._rows += added
        while self._rows > MOST_ROWS and (oldest := next(iter(self._indexes))) not in own:
            self._forget(oldest, len(self._indexes[oldest]))

    def _forget(self, key: tuple[str, int], rows: int) -> None:
        if self._indexes.pop(key, None) is not None:
            self._rows -= rows


def recorded_steps(directory: Path, run: str) -> list[int]:
    """Returns the steps of a job's run whose rollouts are kept, ascending; none where a link leads away."""
    rollouts = directory / f"run_{run}" / "rollouts"
    return published_steps(rollouts) if is_directory(rollouts) else []


def listed_steps(directory: Path, run: str) -> list[int]:
    """Returns the same, with step 0 before them where there is something that was dropped and no step has recorded yet."""
    is_dropped = is_directory(directory / f"run_{run}") and records_file(directory, run, UNSTEPPED).is_file()
    return [UNSTEPPED] * is_dropped + recorded_steps(directory, run)


def _has_changed(index: StepIndex) -> bool:
    """Whether the file at the path is another one than was read."""
    with open_regular(index.path) as file:
        return identity_of(file) != index.identity


def _problems(step: int, index: StepIndex) -> list[str]:
    found = []
    if index.is_cut:
        found.append(f"step {step}: only the first {len(index)} rollouts are listed")
    if index.torn_bytes:
        found.append(f"step {step}: the file ends within a line, after {index.read_bytes} bytes")
    return found


def _reason(error: OSError | UntrustedFileError) -> str:
    """Says what is wrong without the path, which is the machine's."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "rollouts.jsonl is no regular file"


def moment(seconds: float) -> float:
    """Returns the moment of `time.monotonic` in so many seconds."""
    return time.monotonic() + seconds
