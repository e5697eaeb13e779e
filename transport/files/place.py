"""A place in a file that grows, by which the same file is known again: the one rule of all that follow files.

A file is still the one that was read if the bytes before the place are those that were read there. That holds for a file that
was rotated or copied, and not for one that was cut or written anew, also if it has grown past the place since. Lines with times
in them are never the same twice. A place can be saved, and outlive the process that read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

COMPARED_BYTES = 256
"""Bytes before a place that are compared: they hold the newest line's times, which no other line has."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file. The beginning is in every file."""

    offset: int = 0
    before: bytes = b""
    """The bytes before it, at most `COMPARED_BYTES`."""

    @classmethod
    def at(cls, descriptor: int, offset: int) -> Place:
        """Returns the place at an offset of an open file, or at its end if that is before."""
        begin = max(0, offset - COMPARED_BYTES)
        before = os.pread(descriptor, offset - begin, begin)
        return cls(begin + len(before), before)

    def plus(self, data: bytes) -> Place:
        """Returns the place after `data`, which was read from here on."""
        before = data[-COMPARED_BYTES:] if len(data) >= COMPARED_BYTES else (self.before + data)[-COMPARED_BYTES:]
        return Place(self.offset + len(data), before)

    def is_in(self, descriptor: int) -> bool:
        """Whether an open file is the one that this is a place in."""
        return os.pread(descriptor, len(self.before), self.offset - len(self.before)) == self.before

    def saved(self) -> list[int | str]:
        """Returns its form for JSON; `restored` reads it."""
        return [self.offset, self.before.decode("latin-1")]

    @classmethod
    def restored(cls, saved: object) -> Place:
        """Reads the form of `saved`. Anything else, such as what older versions saved, is the beginning."""
        match saved:
            case [int(offset), str(before)] if len(before) == min(offset, COMPARED_BYTES):
                try:
                    return cls(offset, before.encode("latin-1"))
                except UnicodeEncodeError:
                    return cls()
        return cls()


BEGINNING = Place()
"""The beginning of any file."""
