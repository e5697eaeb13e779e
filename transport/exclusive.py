"""At most one process at one place: a lock that dies with its holder, however it dies, and so tells stale from taken."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


def lock_place(lock_path: Path, taken: str) -> int:
    """Takes the lock and returns its descriptor, which holds it until closed. Raises `OSError` (`EADDRINUSE`) that says
    `taken` when another process has it."""
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(errno.EADDRINUSE, taken) from None
    return descriptor


def lock_listener(lock_path: Path, place: str) -> int:
    """`lock_place` for a trainer that listens at `place`."""
    return lock_place(
        lock_path, f"cannot listen at {place}: another trainer does; stop it or choose another output_dir"
    )
