"""Private copies of adapters' files, from which the engine may read an adapter at any time, even after the trainer removed it.

`adapters` gives the reason. A directory that a killed server left is removed by the next one: its lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

WEIGHTS = "adapter_model.safetensors"

FILES = ("adapter_config.json", WEIGHTS)

PREFIX = "counterpoint-adapters-"


class AdapterFiles:
    """A directory of this process's own, removed when it ends; after a kill, when the next server starts.

    `<number>.<load>/` are copies, and `<number>` links to the newest of an adapter.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_if_left(left)
        self._root, lock = _own_directory()
        weakref.finalize(self, _give_up, self._root, lock)

    def copy(self, directory: Path, number: int, load: int) -> Path:
        """Copies the adapter in `directory`. Raises `OSError`, and then leaves no copy."""
        copy = self._root / f"{number}.{load}"
        copy.mkdir()
        try:
            for name in FILES:
                shutil.copyfile(directory / name, copy / name)
        except OSError:
            shutil.rmtree(copy)
            raise
        return copy

    def adopt(self, copy: Path, number: int) -> Path:
        """Makes `copy` the newest of adapter `number`, removes the older ones, and returns the path of its link."""
        path, link = self._root / str(number), self._root / f"{number}.link"
        link.symlink_to(copy.name)
        link.replace(path)
        for old in self._root.glob(f"{number}.*"):
            if old != copy:
                shutil.rmtree(old)
        return path

    def discard(self, copy: Path) -> None:
        """Removes a copy that was not adopted."""
        shutil.rmtree(copy)

    def remove(self, number: int) -> None:
        """Removes all copies of adapter `number`."""
        (self._root / str(number)).unlink(missing_ok=True)
        for copy in self._root.glob(f"{number}.*"):
            shutil.rmtree(copy)


def _own_directory() -> tuple[Path, int]:
    """Returns a new directory, and the lock on it, which is held while this process lives.

    The lock is an `flock`: the lock of `transport.files.lock` needs a file opened for writing, which a directory cannot be.
    """
    while True:
        root = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.exists():  # Another server that starts now may have removed it as abandoned.
            return root, lock
        os.close(lock)


def _give_up(root: Path, lock: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    os.close(lock)


def _remove_if_left(directory: Path) -> None:
    """Removes the copies of a server that was killed, unless they are another user's."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # It was just removed, or is not ours.
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        return  # Its server lives.
    finally:
        os.close(descriptor)
