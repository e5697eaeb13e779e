"""Tests that a store keeps the condition of a conditional write: some stores accept the condition and ignore it."""

from __future__ import annotations

import time
import uuid
from functools import partial

from sweep.patience import patiently
from sweep.store import Busy, Conflict, Store, Stored, UnsafeStoreError

BUSY_TRIES = 5
"""How often `prove` tries a request while the store answers `Busy`; each pause is twice as long as the one before."""


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
