"""Opens the store at a sweep's root: finds its backend, and tests once a process that it keeps its conditions."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from urllib.parse import unquote

from sweep.proof import prove
from sweep.store import Store, UnsafeStoreError

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/(.*)", re.DOTALL)

SCHEMES = "a local path, file://, memory://, s3:// and gs://"


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
            from sweep.stores.memory import MemoryStore

            return MemoryStore(rest)
        case "s3" | "s3a":
            from sweep.stores.s3 import S3Store

            return S3Store(place, path.strip("/"))
        case "gs" | "gcs":
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
    """Opens the store as `open_store` does, after `prove` has accepted the root in this process."""
    return _proven(os.fspath(root), os.getpid())


@functools.lru_cache(maxsize=64)
def _proven(root: str, process: int) -> Store:
    store = open_store(root)
    prove(store)
    return store
