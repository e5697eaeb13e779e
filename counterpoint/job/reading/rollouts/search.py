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
from typing import BinaryIO, Literal

import orjson

from counterpoint.job.reading.rollouts.line_index import MAX_LINE_BYTES, IndexedLine, record_in
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord, records_file
from counterpoint.job.reading.rollouts.view import RolloutEntry, entry_of
from counterpoint.transport.config import Config
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.printable import printable

CONTEXT = 80
"""Characters that are shown on both sides of what was found."""

_PIECE_BYTES = 2**20

Part = Literal["prompt", "completion", "opponent", "error"]


@dataclass(frozen=True, slots=True)
class SearchPlace:
    """The line of a step at which a search goes on."""

    step: int
    number: int
    offset: int


class SearchHit(Config):
    """A rollout with the text."""

    rollout: RolloutEntry
    """The rollout, as in a list."""
    turn: int | None
    """The first turn with it, from 0; None if it is elsewhere."""
    part: Part
    """The part of the rollout that has the text."""
    before: str
    """The text before it."""
    found: str
    """The text as it is there."""
    after: str
    """The text after it."""


class SearchAnswer(Config):
    """What one search found, within its time."""

    hits: list[SearchHit]
    """The newest step's first."""
    searched: int
    """Rollouts that were looked at."""
    read_bytes: int
    """Bytes that were looked at."""
    problems: int
    """Lines and files that could not be searched."""
    go_on: str | None
    """What to give to go on from here; None if everything is searched."""


def search(
    directory: Path,
    run: str,
    steps: Sequence[int],
    text: str,
    takes: Callable[[RolloutRecord], bool],
    most: int,
    until: float,
    go_on: str | None = None,
) -> SearchAnswer:
    """Looks for `text` in the rollouts of `steps`, in their order, that `takes` accepts.

    Ends after `most` hits, or at the moment `until` of `time.monotonic`, at least one line later than it began. `go_on` is that
    of an earlier answer; its step may have been removed since.
    """
    begin = SearchPlace(*map(int, go_on.split("-"))) if go_on is not None else SearchPlace(2**53, 0, 0)
    pattern, needle = re.compile(re.escape(text), re.IGNORECASE), _bytes_of(text)
    searched = SearchAnswer(hits=[], searched=0, read_bytes=0, problems=0, go_on=None)
    for step in (step for step in steps if step <= begin.step):
        from_here = begin if begin.step == step else SearchPlace(step, 0, 0)
        try:
            with open_regular(records_file(directory, run, step)) as file:
                file.seek(from_here.offset)
                for place, line, after in _lines(file, from_here):
                    searched.searched += 1
                    searched.read_bytes += after.offset - place.offset
                    hit = _look(place, line, needle, pattern, takes, searched)
                    if hit is not None:
                        searched.hits.append(hit)
                    if len(searched.hits) >= most or time.monotonic() >= until:
                        searched.go_on = f"{after.step}-{after.number}-{after.offset}"
                        return searched
        except (OSError, UntrustedFileError):
            searched.problems += 1
    return searched


def _lines(file: BinaryIO, place: SearchPlace) -> Iterator[tuple[SearchPlace, bytes | None, SearchPlace]]:
    """Yields each line's place, its bytes (None for one that is too long), and the place of the next."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        length, shown = len(line), line if len(line) <= MAX_LINE_BYTES else None
        while shown is None and not line.endswith(b"\n") and (line := file.readline(_PIECE_BYTES)):
            length += len(line)
        after = SearchPlace(place.step, place.number + 1, place.offset + length)
        yield place, shown, after
        place = after


def _bytes_of(text: str) -> bytes | None:
    """Returns what a line that has the text contains, in small letters; None if that depends on how letters are written."""
    return orjson.dumps(text)[1:-1].lower() if text.isascii() else None


def _look(
    place: SearchPlace,
    line: bytes | None,
    needle: bytes | None,
    pattern: re.Pattern[str],
    takes: Callable[[RolloutRecord], bool],
    searched: SearchAnswer,
) -> SearchHit | None:
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
            entry = entry_of((place.step, IndexedLine.of_record(place.number, record)), record)
            before, found, after = map(printable, around)
            return SearchHit(rollout=entry, turn=turn, part=part, before=before, found=found, after=after)
    return None


def _texts(record: RolloutRecord) -> Iterator[tuple[int | None, Part, str]]:
    if record.error is not None:
        yield None, "error", record.error
    for index, turn in enumerate(record.turns):
        parts: tuple[Part, ...] = ("prompt", "completion")
        for part in parts:
            if isinstance(text := turn.get(part), str):
                yield index, part, text
    for turn in record.opponent_turns:
        if isinstance(text := turn.get("completion"), str):
            yield None, "opponent", text
