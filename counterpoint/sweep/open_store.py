"""Opens the store at a sweep's root: finds its backend, and tests once a process that it keeps its conditions.

Some stores accept the condition of a conditional write and ignore it.
"""

from __future__ import annotations

import functools
import os
import re
import time
import uuid
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from counterpoint.sweep.store import Conflict, Store, StoreBusy, Stored, UnsafeStoreError, patiently

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/(.*)", re.DOTALL)

SCHEMES = "a local path, file://, memory://, s3:// and gs://"

BUSY_TRIES = 5
"""How often `prove` tries a request while the store answers `StoreBusy`; each pause is twice as long as the one before."""


def open_store(root: str | os.PathLike[str]) -> Store:
    """Returns the store at a root, opened once a process: an object store's client is slow to make and may not cross a fork.

    Raises `ValueError` for an invalid root, `UnsafeStoreError` for a kind of storage without conditional writes,
    `ImportError` naming the extra to install, `StoreError` when there are no credentials.
    """
    return _open(os.fspath(root), os.getpid())


@functools.lru_cache(maxsize=64)
def _open(root: str, process: int) -> Store:
    scheme, separator, rest = root.partition("://")
    if not separator:
        if (slashed := _ONE_SLASH.match(root)) is not None:
            raise ValueError(
                f"{root!r} is a URL that has lost a slash, as in a pathlib.Path: give the text {slashed[1]}//{slashed[2]}; "
                f"a directory of that name is ./{root}"
            )
        return _local(root)
    place, slash, path = rest.partition("/")  # no more: a "#" or "?" is part of a name like any other character
    match scheme:
        case "file" | "local":
            if place not in ("", "localhost") or not slash:
                raise ValueError(f"{root!r} does not name a file of this machine: write file:///absolute/path")
            return _local(unquote(f"/{path}"))
        case "memory":
            from counterpoint.sweep.stores.memory import MemoryStore

            return MemoryStore(rest)
        case "s3" | "s3a":
            from counterpoint.sweep.stores.s3 import S3Store

            return S3Store(place, path.strip("/"))
        case "gs" | "gcs":
            from counterpoint.sweep.stores.gs import GoogleStore

            return GoogleStore(place, path.strip("/"))
    raise UnsafeStoreError(
        f"{root!r}: a sweep needs storage that writes on a condition, and none is known for {scheme}://; there are {SCHEMES}"
    )


def _local(path: str) -> Store:
    from counterpoint.sweep.stores.local import LocalStore

    if not path:
        raise ValueError(f"the sweep's root is empty; give {SCHEMES}")
    return LocalStore(Path(path).expanduser().absolute())


def open_proven(root: str | os.PathLike[str]) -> Store:
    """Opens the store as `open_store` does, after `prove` has accepted the root in this process."""
    return _proven(os.fspath(root), os.getpid())


@functools.lru_cache(maxsize=64)
def _proven(root: str, process: int) -> Store:
    store = open_store(root)
    prove(store)
    return store


def prove(store: Store) -> None:
    """Tests, on an object of its own, that the store does the writes it must do and refuses those it must refuse.

    It takes six requests, and begins anew while the store is unavailable. Raises `UnsafeStoreError` naming the promise that is
    broken, `StoreError` when the store cannot be reached or may not be written.
    """
    patiently(partial(_prove, store))


def _prove(store: Store) -> None:
    key = f".probe-{uuid.uuid4().hex}"  # no valid id: one that a killed worker leaves is not taken for a target
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
        except StoreBusy:
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
