"""Reads files of a run's directory, in which anything may lie: regular files only, no link on the way, bounded in size."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

MOST_BYTES = 2**32
"""Most bytes of a file that is read whole."""

MOST_LINE_BYTES = 256 * 2**20

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WHOLE_FILE = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class Unreadable(ValueError):
    """A file is none that is read, or has not the format that is documented. The message says why, without its name."""


class Directory:
    """A run's directory. Names are relative to it, such as `rollouts/step_3/batch.bin`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str) -> BufferedReader:
        """Opens a file. Raises `Unreadable` for a link on the way or what is no file, `FileNotFoundError` without one."""
        *parents, last = name.split("/")
        place = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for parent in parents:
                outer, place = place, os.open(parent, _FLAGS | os.O_DIRECTORY, dir_fd=place)
                os.close(outer)
            file = os.fdopen(os.open(last, _FLAGS, dir_fd=place), "rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unreadable(f"it is a link or a directory, or cannot be read: {error.strerror}") from None
        finally:
            os.close(place)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise Unreadable("it is no regular file")
        return file

    def has(self, name: str) -> bool:
        """Whether something lies there."""
        return os.path.lexists(self.path / name)

    def numbers(self, name: str, before: str) -> list[int]:
        """Returns the numbers in the names of a directory that have `before` before a number, in order; none without it."""
        with suppress(FileNotFoundError, NotADirectoryError):
            names = [each.removeprefix(before) for each in os.listdir(self.path / name) if each.startswith(before)]
            return sorted(int(each) for each in names if re.fullmatch(r"[1-9][0-9]{0,14}|0", each))
        return []

    def steps(self, name: str) -> list[int]:
        """Returns the published steps in a directory, in order."""
        return [step for step in self.numbers(name, "step_") if self.has(f"{name}/step_{step}/STABLE")]

    def read(self, name: str) -> bytes:
        """Returns a file's bytes. Raises `Unreadable` for one that is too large, as `open` else."""
        with self.open(name) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise Unreadable(f"it has more than {MOST_BYTES} bytes")
            return file.read(MOST_BYTES)

    def lines(self, name: str) -> Iterator[bytes]:
        """Yields a file's lines without their newlines, except a last one that a kill cut short. Raises as `read`."""
        with self.open(name) as file:
            while (line := file.readline(MOST_LINE_BYTES + 1)).endswith(b"\n"):
                yield line[:-1]
            if len(line) > MOST_LINE_BYTES:
                raise Unreadable(f"it has a line of more than {MOST_LINE_BYTES} bytes")

    def is_being_written(self) -> bool:
        """Whether a process holds the lock of the run's orchestrator. Takes nothing."""
        with suppress(FileNotFoundError, Unreadable), self.open("orchestrator.lock") as file:
            return bool(struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0] != fcntl.F_UNLCK)
        return False
