"""The index of one step's `rollouts.jsonl`: where each line begins, and what lists are sorted and filtered by.

A file may have hundreds of megabytes, so the index is built in portions, each until a given moment, and holds some 70 bytes a
line. Whoever wrote the lines is not trusted: a line that is no record becomes a row that says so.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord
from counterpoint.transport.files.untrusted import object_in, open_regular
from counterpoint.transport.printable import printable

Outcome = Literal["completed", "filtered", "stale", "dropped", "failed", "inference_failed", "damaged"]
"""`damaged`: the line is no record. `stale`: its group was too old to be trained; `dropped`: its group was for another reason. A
completed one was trained."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

MAX_LINE_BYTES = 16 * 2**20
"""Longer lines are listed and not parsed: an object that is parsed may take twenty times its bytes."""

MAX_ROWS = 100_000
"""Lines of one file that are listed."""

MAX_NAME = 200
"""Characters of an environment's or a player's name."""

UNKNOWN = -(2**63)
"""Instead of an example's or a group's number that the record does not have."""

_PIECE_BYTES = 2**20
"""Read at once while the rest of a long line is passed over."""

_LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class IndexedLine:
    """One line of the file."""

    number: int
    """The number of the line, from 0."""
    offset: int
    length: int
    """Its length in bytes, the newline included."""
    environment: str
    example_index: int | None
    group_id: int | None
    reward: float | None
    advantage: float | None
    outcome: Outcome
    turns: int
    completion_tokens: int
    players: tuple[str, ...]

    @classmethod
    def of_record(cls, number: int, record: RolloutRecord) -> IndexedLine:
        """Returns the row of a record whose place in its file does not matter."""
        example, group = (None if value == UNKNOWN else value for value in _whole(record, "example_index", "group_id"))
        return cls(
            number=number,
            offset=0,
            length=0,
            environment=shown_name(record.environment),
            example_index=example,
            group_id=group,
            reward=record.reward,
            advantage=record.advantage,
            outcome=outcome_of(record),
            turns=len(record.turns),
            completion_tokens=_tokens(record),
            players=players_of(record),
        )


@dataclass(frozen=True, slots=True)
class LineColumns:
    """What lists are filtered and sorted by, of each row `[R]` of a file."""

    rewards_R: NDArray[np.float64]
    """NaN where there is none."""
    completion_tokens_R: NDArray[np.int64]
    outcomes_R: NDArray[np.uint8]
    """The outcome of each rollout, as a position in `OUTCOMES`."""
    environments_R: NDArray[np.uint32]
    """Positions in `names`; so are `players_R`."""
    players_R: NDArray[np.uint32]
    names: Sequence[object]
    """The names of environments, and tuples of the names of players."""

    def codes(self, is_meant: Callable[[object], bool]) -> list[int]:
        """Returns the positions of the names that are meant."""
        return [code for code, name in enumerate(self.names) if is_meant(name)]


class StepIndex:
    """The lines of one file. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        """The file need not exist yet."""
        self.path = path
        self._begin(None)

    def _begin(self, identity: tuple[int, ...] | None) -> None:
        self.identity = identity
        self.read_bytes = 0
        """Bytes that are indexed."""
        self.size = identity[-1] if identity is not None else 0
        self.is_complete = False
        self.is_cut = False
        """Whether the file has more than `MAX_ROWS` lines."""
        self.torn_bytes = 0
        """Bytes after the last newline: the file was cut."""
        self._skips = False
        self._codes_by_name: dict[object, int] = {}
        self._names: list[object] = []
        """What each code stands for: names of environments, and tuples of the names of players."""
        self._integers: tuple[array[int], ...] = tuple(array("q") for _ in range(6))
        self._numbers: tuple[array[float], ...] = (array("d"), array("d"))
        self._codes: tuple[array[int], ...] = (array("B"), array("I"), array("I"))

    def __len__(self) -> int:
        return len(self._codes[0])

    def advance(self, until: float) -> None:
        """Reads on until the end of the file, or until the moment `until` of `time.monotonic`; one line is read in any case.

        Begins anew if the file is another one than before. Raises `OSError` and `UntrustedFileError`.
        """
        with open_regular(self.path) as file:
            identity = identity_of(file)
            if identity != self.identity:
                self._begin(identity)
            file.seek(self.read_bytes)
            while not self.is_complete:
                self._read_line(file)
                if time.monotonic() >= until:
                    return

    def _read_line(self, file: BinaryIO) -> None:
        line = file.readline(_PIECE_BYTES if self._skips else MAX_LINE_BYTES + 1)
        has_ended = line.endswith(b"\n")
        if self._skips:
            self.read_bytes += len(line)
            self._integers[1][-1] += len(line)
            self._skips = bool(line) and not has_ended
        elif has_ended and len(line) <= MAX_LINE_BYTES:
            self._add(len(line), record_in(line))
        elif len(line) > MAX_LINE_BYTES:
            self._add(len(line), None)
            self._skips = not has_ended
        else:
            self.torn_bytes = len(line)
        self.is_cut = len(self) >= MAX_ROWS and self.read_bytes < self.size
        self.is_complete = self.is_cut or self.read_bytes + self.torn_bytes >= self.size or not line

    def _add(self, length: int, record: RolloutRecord | None) -> None:
        fields = record if record is not None else RolloutRecord({})
        integers = (self.read_bytes, length, *_whole(fields, "example_index", "group_id"))
        for column, value in zip(self._integers, (*integers, len(fields.turns), _tokens(fields)), strict=True):
            column.append(value)
        for numbers, number in zip(self._numbers, (fields.reward, fields.advantage), strict=True):
            numbers.append(math.nan if number is None else number)
        names = (shown_name(fields.environment), players_of(fields))
        codes = (OUTCOMES.index(outcome_of(record)), *map(self._code, names))
        for codes_of, code in zip(self._codes, codes, strict=True):
            codes_of.append(code)
        self.read_bytes += length

    def _code(self, name: object) -> int:
        code = self._codes_by_name.setdefault(name, len(self._names))
        if code == len(self._names):
            self._names.append(name)
        return code

    def columns(self) -> LineColumns:
        """Returns copies of the columns that lists are made by."""
        tokens, rewards = self._integers[5], self._numbers[0]
        outcomes, environments, players = self._codes
        return LineColumns(
            np.array(rewards, np.float64),
            np.array(tokens, np.int64),
            np.array(outcomes, np.uint8),
            np.array(environments, np.uint32),
            np.array(players, np.uint32),
            list(self._names),
        )

    def rows(self) -> list[IndexedLine]:
        """Returns all rows in the order of the file."""
        columns: list[Sequence[float]] = [*self._integers, *self._numbers, *self._codes]
        return [_row(number, values, self._names) for number, values in enumerate(zip(*columns, strict=True))]

    def rows_of(self, environment: str, example_index: int) -> list[IndexedLine]:
        """Returns the rows of one example, without looking at each in Python."""
        code = self._codes_by_name.get(environment)
        if code is None or abs(example_index) > _LARGEST:
            return []
        of_example = np.frombuffer(self._integers[2], np.int64) == example_index
        of_environment = np.frombuffer(self._codes[1], np.uint32) == code
        return [row for number in np.flatnonzero(of_example & of_environment).tolist() if (row := self.row(number))]

    def row(self, number: int) -> IndexedLine | None:
        """Returns the row of that number; None if it is not indexed."""
        if not 0 <= number < len(self):
            return None
        columns: list[Sequence[float]] = [*self._integers, *self._numbers, *self._codes]
        return _row(number, [column[number] for column in columns], self._names)


def _row(number: int, values: Sequence[float], names: Sequence[object]) -> IndexedLine:
    offset, length, example, group, turns, tokens = map(int, values[:6])
    players = names[int(values[10])]
    return IndexedLine(
        number=number,
        offset=offset,
        length=length,
        environment=str(names[int(values[9])]),
        example_index=None if example == UNKNOWN else example,
        group_id=None if group == UNKNOWN else group,
        reward=None if math.isnan(values[6]) else values[6],
        advantage=None if math.isnan(values[7]) else values[7],
        outcome=OUTCOMES[int(values[8])],
        turns=turns,
        completion_tokens=tokens,
        players=players if isinstance(players, tuple) else (),
    )


def identity_of(file: BinaryIO) -> tuple[int, ...]:
    """Returns what tells an open file from another one, or from itself once it was written to; its size comes last."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def record_in(line: bytes) -> RolloutRecord | None:
    """Returns the record of a line; None if it is none."""
    return None if (found := object_in(line)) is None else RolloutRecord(found)


def outcome_of(record: RolloutRecord | None) -> Outcome:
    """Returns what became of a rollout; `damaged` without a record."""
    if record is None:
        return "damaged"
    if record.error is not None:
        return "inference_failed" if record.fields.get("outcome") == "inference_failed" else "failed"
    if record.filtered_by is not None:
        return "filtered"
    if record.dropped is not None:
        return "stale" if record.dropped == "stale" else "dropped"
    return "completed"


def shown_name(name: str) -> str:
    """Returns the name of an environment or a player as it is shown, and as it is compared."""
    return printable(name[:MAX_NAME])


def players_of(record: RolloutRecord) -> tuple[str, ...]:
    """Returns the names of a rollout's players, as they are shown."""
    return tuple(sorted(map(shown_name, record.players))[:64])


def _tokens(record: RolloutRecord) -> int:
    return max(-_LARGEST, min(record.completion_tokens, _LARGEST))


def _whole(record: RolloutRecord, *names: str) -> list[int]:
    values = [record.fields.get(name) for name in names]
    return [value if type(value) is int and abs(value) <= _LARGEST else UNKNOWN for value in values]
