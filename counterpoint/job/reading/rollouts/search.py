"""Searches the texts of rollouts, step by step, within a time: what was found so far, and where to go on.

Lines are read one at a time. Most are passed over by their bytes; the others are parsed, and the text is looked for in their
prompts, completions and errors, in any letter case.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from counterpoint.job.reading.rollouts.line_index import MAX_LINE_BYTES, record_in
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord, records_file
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.printable import printable

CONTEXT = 80
"""Characters that are shown on both sides of what was found."""

_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """The line of a step at which a search goes on."""

    step: int
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class Hit:
    """The first place of a rollout where the text is."""

    step: int
    number: int
    record: RolloutRecord
    turn: int | None
    """None for the error."""
    part: str
    """`prompt`, `completion`, `opponent` or `error`."""
    before: str
    found: str
    after: str


@dataclass(slots=True)
class Searched:
    """The outcome of one search."""

    hits: list[Hit]
    rollouts: int = 0
    """Lines that were looked at."""
    read_bytes: int = 0
    place: Place | None = None
    """The place where to go on; None at the end."""
    problems: int = 0
    """Lines and files that could not be searched."""


def search(
    directory: Path,
    run: str,
    steps: Sequence[int],
    text: str,
    takes: Callable[[RolloutRecord], bool],
    most: int,
    until: float,
    begin: Place | None = None,
) -> Searched:
    """Looks for `text` in the rollouts of `steps`, in their order, that `takes` accepts.

    Ends after `most` hits, or at the moment `until` of `time.monotonic`, at least one line later than it began. `begin` is the
    place where an earlier search ended.
    """
    pattern, needle = re.compile(re.escape(text), re.IGNORECASE), _bytes_of(text)
    searched = Searched([])
    steps = [*steps[steps.index(begin.step) :]] if begin is not None and begin.step in steps else list(steps)
    for step in steps:
        from_here = begin if begin is not None and begin.step == step else Place(step, 0, 0)
        try:
            with open_regular(records_file(directory, run, step)) as file:
                file.seek(from_here.offset)
                for place, line, after in _lines(file, from_here):
                    searched.rollouts += 1
                    searched.read_bytes += after.offset - place.offset
                    hit = _look(place, line, needle, pattern, takes, searched)
                    if hit is not None:
                        searched.hits.append(hit)
                    if len(searched.hits) >= most or time.monotonic() >= until:
                        searched.place = after
                        return searched
        except (OSError, UntrustedFileError):
            searched.problems += 1
    return searched


def _lines(file: BinaryIO, place: Place) -> Iterator[tuple[Place, bytes | None, Place]]:
    """Yields each line's place, its bytes (None for one that is too long), and the place of the next."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        length, shown = len(line), line if len(line) <= MAX_LINE_BYTES else None
        while shown is None and not line.endswith(b"\n") and (line := file.readline(_PIECE_BYTES)):
            length += len(line)
        after = Place(place.step, place.number + 1, place.offset + length)
        yield place, shown, after
        place = after


def _bytes_of(text: str) -> bytes | None:
    """Returns what a line that has the text contains, in small letters; None if that depends on how letters are written."""
    return orjson.dumps(text)[1:-1].lower() if text.isascii() else None


def _look(
    place: Place,
    line: bytes | None,
    needle: bytes | None,
    pattern: re.Pattern[str],
    takes: Callable[[RolloutRecord], bool],
    searched: Searched,
) -> Hit | None:
    if line is not None and needle is not None and needle not in line.lower():
        return None
    record = record_in(line) if line is not None else None
    if record is None:
        searched.problems += 1
        return None
    if not takes(record):
        return None
    for turn, part, text in _texts(record):
        if (match := pattern.search(text)) is not None:
            start, stop = match.span()
            around = (text[max(0, start - CONTEXT) : start], text[start:stop], text[stop : stop + CONTEXT])
            return Hit(place.step, place.number, record, turn, part, *map(printable, around))
    return None


def _texts(record: RolloutRecord) -> Iterator[tuple[int | None, str, str]]:
    if record.error is not None:
        yield None, "error", record.error
    for index, turn in enumerate(record.turns):
        for part in ("prompt", "completion"):
            if isinstance(text := turn.get(part), str):
                yield index, part, text
    for turn in record.opponent_turns:
        if isinstance(text := turn.get("completion"), str):
            yield None, "opponent", text
