"""What a sweep asks of storage: to read an object, and to write one on condition that it is unchanged. Nothing else.

`open_store` finds the backend of a root; each is one small module of `sweep/stores/`. `prove` has the store show that it
keeps its conditions, since some take them and ignore them, and refuses it otherwise.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote

SCHEMES = "a local path, file://, memory://, s3:// and gs://"
BUSY_TRIES = 5
"""How often `prove` tries a request while the store answers `Busy`; each pause is twice as long as the one before."""


class StoreError(OSError):
    """The store did not answer, or said that it could not. What was asked for may have been done all the same."""


class Busy(StoreError):
    """The store refused a request because of its rate limit: nothing was written."""


class Conflict(Exception):
    """The condition did not hold: nothing was written by this request. (A library may have sent it twice: read back.)"""


class UnsafeStoreError(ValueError):
    """A store that cannot do, or does not keep, a conditional write. Two workers could both win there."""


class Stored(NamedTuple):
    """An object as read, and what to name when it is to be replaced only if it is still this one."""

    data: bytes
    version: str


class Store(Protocol):
    """A flat set of small objects. A write that is confirmed is seen by every later read, everywhere; a reader never sees half
    of one. Safe to be called from several threads. `StoreError` may come from every method."""

    root: str
    """For messages."""
    readers: int
    """How many reads at once are worth it."""
    write_interval: float
    """Least time in seconds between two writes of one object."""

    def read(self, key: str) -> Stored | None:
        """The object, or None."""

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """Replaces the object if it is still the one of `version`; with None, creates it if there is none. Returns the new
        version. Raises `Conflict`."""

    def keys(self) -> list[str]:
        """All of them, in no order."""

    def discard(self, key: str) -> None:
        """Deletes without a condition. Only for what `prove` made: a record is never deleted, so its token never falls."""


def open_store(root: str | os.PathLike[str]) -> Store:
    """The store at a root. Opened once a process: clients of object stores are slow to make and may not cross a fork.

    Raises `ValueError` for a root that is none, `UnsafeStoreError` for a kind of storage without conditional writes,
    `ImportError` naming the extra to install, `StoreError` for credentials that cannot be had.
    """
    return _open(os.fspath(root), os.getpid())


@functools.lru_cache(maxsize=64)
def _open(root: str, process: int) -> Store:
    scheme, separator, rest = root.partition("://")
    if not separator:
        return _local(root)
    place, slash, path = rest.partition("/")  # no more: a "#" or "?" is part of a name like any other character
    match scheme:
        case "file":
            if place not in ("", "localhost") or not slash:
                raise ValueError(f"{root!r} does not name a file of this machine: write file:///absolute/path")
            return _local(unquote(f"/{path}"))
        case "memory":
            from sweep.stores.memory import MemoryStore

            return MemoryStore(rest)
        case "s3":
            from sweep.stores.s3 import S3Store

            return S3Store(place, path.strip("/"))
        case "gs":
            from sweep.stores.gs import GoogleStore

            return GoogleStore(place, path.strip("/"))
    raise UnsafeStoreError(
        f"{root!r}: a sweep needs storage that writes on a condition, and none is known for {scheme}://; there are {SCHEMES}"
    )


def _local(path: str) -> Store:
    from sweep.stores.local import LocalStore

    if not path:
        raise ValueError(f"the sweep's root is empty; give {SCHEMES}")
    return LocalStore(Path(path).expanduser().absolute())


def open_proven(root: str | os.PathLike[str]) -> Store:
    """`open_store`, of a root that `prove` has accepted in this process."""
    return _proven(os.fspath(root), os.getpid())


@functools.lru_cache(maxsize=64)
def _proven(root: str, process: int) -> Store:
    store = open_store(root)
    prove(store)
    return store


def prove(store: Store) -> None:
    """Tests on an object of our own that the store does the writes it must do and refuses those it must refuse. Six requests.

    Raises `UnsafeStoreError` saying which promise it broke, `StoreError` when it cannot be reached or may not be written.
    """
    key = f".probe-{uuid.uuid4().hex}"  # no id of a target: one that a killed worker leaves is not taken for one
    created = _write(store, key, b"1", None)
    try:
        _must_refuse(store, key, None, "to create an object only if there is none")
        replaced = _write(store, key, b"2", created)
        _must_refuse(store, key, created, "to replace an object only if it is unchanged")
        if store.read(key) != Stored(b"2", replaced):
            raise UnsafeStoreError(f"{store.root}: what was written is not what is read after it")
    except Conflict:
        raise UnsafeStoreError(f"{store.root}: it refused to replace an object that was unchanged") from None
    finally:
        store.discard(key)


def _write(store: Store, key: str, data: bytes, version: str | None) -> str:
    """Writes no faster than the store allows, and tries again if it is busy. Raises as `Store.write` does."""
    pause = store.write_interval
    for _ in range(BUSY_TRIES - 1):
        time.sleep(pause)
        try:
            return store.write(key, data, version)
        except Busy:
            pause *= 2
    time.sleep(pause)
    return store.write(key, data, version)


def _must_refuse(store: Store, key: str, version: str | None, condition: str) -> None:
    try:
        _write(store, key, b"must not be written", version)
    except Conflict:
        return
    raise UnsafeStoreError(
        f"{store.root}: asked {condition}, it wrote all the same; on such storage two workers would win one target. "
        "Use a store with conditional writes"
    )
