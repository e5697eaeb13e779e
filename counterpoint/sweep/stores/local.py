"""Objects as files of one directory, `<root>/<key>.json`, created by `link` and replaced whole under a file lock.

The lock is an `flock` on a guard, a file that is never unlinked. To unlink a lock's file lets two processes hold the lock,
one by the old file and one by the new. So guards stay: a fixed number, shared by the keys. Under a guard, files are only
compared and renamed; waiting for the disk comes before and after. A process that is stopped between the two, for
microseconds, keeps its guard until it continues or ends, and the others get `StoreError` meanwhile.

A client of NFS may look a name up in its cache, for up to a minute: a file that it reads may be gone, or incomplete. So no
decision rests on a lookup. An object is created by `link`, which the server refuses if the name exists. And an object is
replaced only if the guard does not list it as replaced: the content of a locked file is the server's own (nfs(5), "Using
file locks with NFS"; Linux drops its cache of a file when it locks it, and writes all back before it unlocks).

`flock` works between machines only where the network file system carries it (NFS since Linux 2.6.12 does, unless mounted
with `nolock` or `local_lock`); `prove` cannot test that from one machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from counterpoint.sweep.store import (
    LARGEST_OBJECT_BYTES,
    Conflict,
    Stored,
    StoreError,
    StoreUnavailable,
    UnsafeStoreError,
)

SUFFIX = ".json"
GUARDS = 64
GUARD_SECONDS = 5.0
"""Longest wait for a guard."""
MARK_BYTES = 16
MARKS = 1024
"""How many recently replaced objects a guard lists, newest first. They cover minutes; a cache keeps a lookup for one at most."""
PASSING = (errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN)
"""Errors of a network file system whose server does not answer for a moment, or has just started again."""
ABANDONED_SECONDS = 3600.0
"""How old the partial file of a process that was killed is when it is removed."""


class LocalStore:
    """A directory, created by the first write."""

    readers = 1
    write_interval = 0.0

    def __init__(self, directory: Path) -> None:
        self.root = str(directory)
        self._directory = directory
        self._guards = directory / ".guards"
        self._partials = directory / ".partial"

    def read(self, key: str) -> Stored | None:
        """See `Store`."""
        try:
            # Whoever put a FIFO there holds nobody up: it is read as an empty file.
            with open(self._path(key), "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                data = file.read(LARGEST_OBJECT_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed(f"{self._path(key)} cannot be read", error) from error
        return Stored(data, _version(data))

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """See `Store`."""
        try:
            partial = self._write_partial(key, data)
            try:
                if version is None:
                    self._create(key, partial)
                else:
                    self._replace(key, partial, version)
            finally:
                partial.unlink(missing_ok=True)
            _sync(self._directory)
        except StoreError:
            raise
        except OSError as error:
            raise _failed(f"{self._path(key)} cannot be written", error) from error
        return _version(data)

    def _create(self, key: str, partial: Path) -> None:
        try:
            os.link(partial, self._path(key))
        except FileExistsError:
            raise Conflict(str(self._path(key))) from None
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise UnsafeStoreError(
                    f"{self.root}: its file system has no hard links, and without them two workers could both create an object"
                ) from None
            raise

    def _replace(self, key: str, partial: Path, version: str) -> None:
        mark = hashlib.sha256(f"{key} {version}".encode()).digest()[:MARK_BYTES]
        with self._guard(key) as guard:
            current, replaced = self.read(key), os.pread(guard, MARKS * MARK_BYTES, 0)
            marks = [replaced[start : start + MARK_BYTES] for start in range(0, len(replaced), MARK_BYTES)]
            if (current and current.version) != version or mark in marks:
                raise Conflict(str(self._path(key)))
            partial.replace(self._path(key))
            # Last: a process killed before it leaves an object that can still be replaced.
            os.pwrite(guard, b"".join([mark, *marks[: MARKS - 1]]), 0)

    def keys(self) -> list[str]:
        """See `Store`."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(f"{self._directory} cannot be read", error) from error
        return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]

    def discard(self, key: str) -> None:
        """See `Store`. Also removes partial files that killed processes left."""
        try:
            self._path(key).unlink(missing_ok=True)
            for partial in self._partials.iterdir():
                if time.time() - partial.stat().st_mtime > ABANDONED_SECONDS:
                    partial.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # Another process was quicker.
        except OSError as error:
            raise _failed(f"{self._directory} cannot be cleared", error) from error

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{SUFFIX}"

    def _write_partial(self, key: str, data: bytes) -> Path:
        self._partials.mkdir(parents=True, exist_ok=True)
        partial = self._partials / f"{key}.{uuid.uuid4().hex}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                written = os.write(descriptor, data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, f"took {written} of {len(data)} bytes: is the disk full?", str(partial))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return partial

    @contextlib.contextmanager
    def _guard(self, key: str) -> Iterator[int]:
        """Yields the guard's descriptor."""
        self._guards.mkdir(exist_ok=True)
        guard = self._guards / f"{zlib.crc32(key.encode()) % GUARDS:02d}"
        # A descriptor of its own for each holder: flock excludes threads as it does processes.
        descriptor = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, guard)
            yield descriptor
            # Closing is not enough: a process forked meanwhile, by a body for example, keeps the descriptor open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, guard: Path) -> None:
    give_up, pause = time.monotonic() + GUARD_SECONDS, 0.0005
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise StoreUnavailable(
                    f"{guard} has been locked for {GUARD_SECONDS:g} s: is a process stopped in the middle of a write?"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _failed(what: str, error: OSError) -> StoreError:
    return (StoreUnavailable if error.errno in PASSING else StoreError)(f"{what}: {error}")


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
