"""A lock on a file, held by at most one process, and released by the kernel however that process ends.

It is an open file description lock (fcntl(2)), whose state can be read without taking it: a reader never blocks a process
that takes it. The file names the holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular

_FLOCK = struct.Struct("hhqqi0q")
"""`struct flock`: type, whence, start, length (0: all), pid."""

_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

_LOOK_SECONDS = 0.02

LONGEST_PID = 7
"""Digits of a process id: the kernel's own limit is 4,194,304."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds a lock."""

    pid: int
    """0 until the holder has written its own."""
    host: str


def take_lock(lock_path: Path, taken: str, seconds: float = 0.0) -> int:
    """Takes the lock and returns its descriptor, which holds it until closed.

    Raises `OSError` (`EADDRINUSE`), with the message `taken`, when another process holds it for all these `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # other users may read it
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            if _is_at(lock_path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise OSError(errno.EADDRINUSE, taken) from None
            time.sleep(_LOOK_SECONDS)
            continue
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # moved or removed before it was locked: whoever comes next finds another


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def holder_of(lock_path: Path) -> LockHolder | None:
    """Returns the holder of the lock; None when nobody holds it, or there is no such regular file."""
    try:
        with open_regular(lock_path) as file:
            kind = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0]
            words = file.read(512).decode(errors="replace").split()
    except (FileNotFoundError, UntrustedFileError):
        return None
    if kind == fcntl.F_UNLCK:
        return None
    is_named = len(words) == 2 and words[0].isdecimal() and len(words[0]) <= LONGEST_PID
    return LockHolder(int(words[0]), words[1]) if is_named else LockHolder(0, "")


def take_listener_lock(lock_path: Path, place: str) -> int:
    """`take_lock` for a trainer that listens at `place`."""
    return take_lock(lock_path, f"cannot listen at {place}: another trainer does; stop it or choose another output_dir")
