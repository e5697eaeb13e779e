"""A directory of one process's own, for files that mean nothing without it: it goes with the process, however that ends.

At an orderly end the process removes it. After a kill, the next process that makes one in the same place does: its lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


class OwnDirectory:
    """A new directory `<parent>/<prefix>XXXXXXXX` of mode 0700."""

    def __init__(self, parent: Path, prefix: str) -> None:
        """Makes it, and removes those that killed processes of this user left. Raises `OSError`."""
        remove_left(parent, prefix)
        self.path, lock = _make(parent, prefix)
        self._remove = weakref.finalize(self, _give_up, self.path, lock)

    def remove(self) -> None:
        """Removes it, as the end of the process does."""
        self._remove()


def remove_left(parent: Path, prefix: str) -> None:
    """Removes the directories of processes that were killed. Those of others, and of live processes, stay."""
    for left in parent.glob(f"{prefix}*"):
        _remove_if_left(left)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """Returns a new directory, and the lock on it, which is held while this process lives.

    The lock is an `flock`: the lock of `transport.files.lock` needs a file opened for writing, which a directory cannot be.
    """
    while True:
        root = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Until it is locked, another process that starts now may remove it as abandoned.
        try:
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.exists():
            return root, lock
        os.close(lock)


def _give_up(root: Path, lock: int) -> None:
    try:
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_if_left(directory: Path) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # It was just removed, or is not ours.
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        return  # Its process lives.
    finally:
        os.close(descriptor)
