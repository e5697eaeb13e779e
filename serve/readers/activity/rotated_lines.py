"""Follows a bounded log, `name.jsonl` and its former part `name.jsonl.1` (`transport/files/rotated_lines.py`): each line once.

Anybody may have written the files, and their writer goes on while we read. A line counts once its newline is there. A file is
known by its first line (`transport/files/place.py`), so that it is the same one after it has become the former part. Of a file
that is far larger than its writer makes it, only the end is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transport.files.place import BEGINNING, Place
from transport.files.rotated_lines import FORMER
from transport.files.untrusted import UntrustedFileError, open_regular

BLOCK_BYTES = 256 * 2**10
"""Bytes of whole lines that are given at once, at most; a longer line is passed over."""

NEWEST_BYTES = 32 * 2**20
"""What is read of a file: its end."""

_FIRST_BYTES = 200
"""The part of the first line by which a file is known: spans and decisions begin with a time."""

Identity = Place
"""The place behind the first line, or behind the beginning of a long one: a file is known by it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one file."""

    file: Identity
    offset: int
    data: bytes


class RotatedLinesFollower:
    """Follows one log. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        """The files need not exist yet."""
        self._paths = (path.with_name(path.name + FORMER), path)
        self._places: dict[Identity, Place] = {}
        """How far each file was read."""
        self._skips: set[Identity] = set()

    @property
    def files(self) -> frozenset[Identity]:
        """The files that there were at the last `new_blocks`; what was read of others is gone."""
        return frozenset(self._places)

    def new_blocks(self) -> Iterator[Block]:
        """Yields what was written since the last call, the former part first. Files that cannot be read are left out."""
        present: set[Identity] = set()
        for path in self._paths:
            try:
                with open_regular(path) as file:
                    if (identity := _identity_of(file)) is not None:
                        present.add(identity)
                        yield from self._blocks(file, identity)
            except (OSError, UntrustedFileError):
                continue
        self._places = {identity: place for identity, place in self._places.items() if identity in present}

    def read(self, wanted: Identity, offset: int, size: int) -> bytes:
        """Returns bytes that were given before; none if the file is gone."""
        for path in self._paths:
            try:
                with open_regular(path) as file:
                    if wanted.is_in(file.fileno()):
                        return os.pread(file.fileno(), size, offset)
            except (OSError, UntrustedFileError):
                continue
        return b""

    def _blocks(self, file: BinaryIO, identity: Identity) -> Iterator[Block]:
        place = self._places.get(identity)
        if place is None or not place.is_in(file.fileno()):
            size = os.fstat(file.fileno()).st_size
            place = self._places[identity] = Place.at(file.fileno(), max(0, size - NEWEST_BYTES))
            self._skips.discard(identity)
            if place.offset:
                self._skips.add(identity)  # it is within a line
        while data := os.pread(file.fileno(), BLOCK_BYTES, place.offset):
            end = data.rfind(b"\n") + 1
            if not end:
                if len(data) < BLOCK_BYTES:
                    return
                self._skips.add(identity)
                end = len(data)
            elif identity in self._skips:
                self._skips.discard(identity)
                begin = data.find(b"\n") + 1
                if begin < end:
                    yield Block(identity, place.offset + begin, data[begin:end])
            else:
                yield Block(identity, place.offset, data[:end])
            place = self._places[identity] = place.plus(data[:end])


def _identity_of(file: BinaryIO) -> Identity | None:
    """None until the file has a first line, or enough of it."""
    first, newline, _ = os.pread(file.fileno(), _FIRST_BYTES, 0).partition(b"\n")
    if not newline and len(first) < _FIRST_BYTES:
        return None
    return BEGINNING.plus(first + newline)
