"""Reads files of a run's directory, in which anything may lie: regular files only, no link on the way, bounded in size."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

MOST_LINE_BYTES = 256 * 2**20
"""Most bytes of a line that is read."""

MOST_JSON_BYTES = 16 * 2**20

_STEP = re.compile(r"step_([1-9][0-9]{0,14}|0)")
_FLOCK = struct.Struct("hhqqi0q")
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class Unreadable(ValueError):
    """A file is none that is read. The message says why, without its name."""


class Directory:
    """A run's directory. Names are relative to it, such as `rollouts/step_3/batch.bin`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str) -> BinaryIO:
        """Opens a file. Raises `Unreadable` for a link on the way or what is no file, `FileNotFoundError` without one."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        *parents, last = name.split("/")
        place = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for parent in parents:
                inner = os.open(parent, flags | os.O_DIRECTORY, dir_fd=place)
                os.close(place)
                place = inner
            descriptor = os.open(last, flags, dir_fd=place)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unreadable(f"is a link, or cannot be read: {error.strerror}") from None
        finally:
            os.close(place)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Unreadable("is no regular file")
        return os.fdopen(descriptor, "rb")

    def has(self, name: str) -> bool:
        """Whether something lies there."""
        return os.path.lexists(self.path / name)

    def steps(self, name: str) -> list[int]:
        """Returns the published steps in a directory, in order."""
        try:
            names = os.listdir(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [int(match[1]) for each in names if (match := _STEP.fullmatch(each))]
        return sorted(step for step in found if self.has(f"{name}/step_{step}/STABLE"))

    def lines(self, name: str) -> Iterator[bytes]:
        """Yields a file's lines, newlines included. Raises `Unreadable` for a line that is too long, as `open` else."""
        with self.open(name) as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                if len(line) > MOST_LINE_BYTES:
                    raise Unreadable(f"has a line of more than {MOST_LINE_BYTES} bytes")
                yield line

    def json(self, name: str) -> dict[str, Any]:
        """Returns a file's JSON object. Raises as `open`, and `Unreadable` for anything else."""
        with self.open(name) as file:
            data = file.read(MOST_JSON_BYTES + 1)
        if len(data) > MOST_JSON_BYTES:
            raise Unreadable(f"has more than {MOST_JSON_BYTES} bytes")
        return object_of(data)

    def is_being_written(self) -> bool:
        """Whether a process holds the lock of the run's orchestrator. Takes nothing."""
        try:
            with self.open("orchestrator.lock") as file:
                return bool(_FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0] != fcntl.F_UNLCK)
        except (FileNotFoundError, Unreadable):
            return False


def object_of(data: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises `Unreadable` for anything else."""
    try:
        value = orjson.loads(data)
    except (orjson.JSONDecodeError, RecursionError):
        raise Unreadable("is not JSON") from None
    if not isinstance(value, dict):
        raise Unreadable("is no JSON object")
    return value
