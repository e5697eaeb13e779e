"""Finds the line of a key in a TOML file for an error message: `tomllib` returns values without positions.

The text is split into statements, each the fewest lines that parse together, and `tomllib` parses each by itself. So `tomllib`
handles strings, comments and quoting, and a key is searched only in the lines that set it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LONGEST_STATEMENT = 1000
"""Lines. Time grows with their square; what follows a longer statement, such as a text of many lines, has no place."""

LONGEST_QUOTED = 400
"""Characters of a line in a message."""

Location = tuple[str | int, ...]
"""Keys and positions in lists, from the top."""


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A place in a file."""

    number: int
    """The line's number, from 1."""
    column: int
    """The column in the line, from 1."""
    text: str
    """The text of the whole line."""


def quoted(number: int, text: str) -> str:
    """Returns a line as a message quotes it, cut if it is long."""
    return f"{number} | {text if len(text) <= LONGEST_QUOTED else text[:LONGEST_QUOTED] + '...'}"


def lines_of(text: str) -> list[str]:
    """Splits a text into the lines that TOML counts. `str.splitlines` would also split at U+2028 and the like."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


class Lines:
    """The lines of a valid TOML text; an empty text has no key."""

    def __init__(self, text: str) -> None:
        """Splits the text. It is parsed at the first search."""
        self._lines = lines_of(text)

    def of(self, location: Sequence[str | int]) -> FilePlace | None:
        """Finds the line that sets the value at `location`, or else the line where its table begins; None if neither exists."""
        place = tuple(location)
        while place:
            if place in self._places:
                return self._places[place]
            place = place[:-1]
        return None

    @cached_property
    def _places(self) -> dict[Location, FilePlace]:
        places: dict[Location, FilePlace] = {}
        table: Location = ()
        tables: dict[Location, int] = {}
        """The lists of tables: for each `[[list of tables]]`, the number of its tables so far."""
        for first, statement, content in self._statements():
            header = statement.lstrip().startswith("[")
            if header:
                table = _opened(_path_of_header(content), statement.lstrip().startswith("[["), tables)
                places.setdefault(table, self._line(first, first, table))
                continue
            last = first + statement.count("\n")
            for inner in _paths(content):
                places.setdefault(table + inner, self._line(first, last, inner))
        return places

    def _statements(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yields, for each statement, the position of its first line, its text and its content."""
        first = 0
        while first < len(self._lines):
            statement, content = self._statement(first)
            if statement.count("\n") == LONGEST_STATEMENT:
                return
            if content:
                yield first, statement, content
            first += statement.count("\n") + 1

    def _statement(self, first: int) -> tuple[str, dict[str, Any]]:
        for end in range(first + 1, len(self._lines) + 1):
            statement = "\n".join(self._lines[first:end])
            try:
                return statement, tomllib.loads(statement)
            except tomllib.TOMLDecodeError:
                if end - first > LONGEST_STATEMENT:
                    return statement, {}
        return self._lines[first], {}

    def _line(self, first: int, last: int, path: Location) -> FilePlace:
        """The first line from `first` to `last` that sets the last name of `path`; `first` if none is found."""
        name = next((part for part in reversed(path) if isinstance(part, str)), "")
        sets = re.compile(rf"""(?<![\w-])["']?{re.escape(name)}["']?\s*[=.\]]""")
        for position in range(first, last + 1):
            if found := sets.search(self._lines[position]):
                return FilePlace(position + 1, found.start() + 1, self._lines[position])
        return FilePlace(first + 1, 1, self._lines[first])


def _path_of_header(content: Any) -> list[str]:
    path: list[str] = []
    while content:
        content = content[0] if isinstance(content, list) else content
        if not content:
            break
        ((name, content),) = content.items()
        path.append(name)
    return path


def _opened(path: list[str], is_entry: bool, tables: dict[Location, int]) -> Location:
    """The table that a header opens: a further entry of a list, or one in the newest entries of the lists above it."""
    place: Location = ()
    for position, name in enumerate(path):
        place = (*place, name)
        if is_entry and position == len(path) - 1:
            tables[place] = tables.get(place, 0) + 1
        if place in tables:
            place = (*place, tables[place] - 1)
    return place


def _paths(content: Any, above: Location = ()) -> Iterator[Location]:
    """Every key that a statement sets, and what holds it."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in entries:
        yield (*above, name)
        yield from _paths(value, (*above, name))
