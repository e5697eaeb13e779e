"""The interface of a sweep's storage: read an object, and write one on condition that it is unchanged. Nothing else.

Each backend is one small module of `counterpoint/sweep/stores/`; `counterpoint/sweep/open_store.py` finds that of a root.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

LARGEST_OBJECT_BYTES = 4 * 2**20
"""No more of an object is read than this, and a byte by which its reader sees that it is too large."""


class StoreError(OSError):
    """The store did not answer, or reported an error. The request may have been carried out all the same."""


class StoreUnavailable(StoreError):
    """The store did not answer in time, or with an error that passes, such as HTTP 503."""


class StoreBusy(StoreError):
    """The store refused a request because of its rate limit: nothing was written."""


class Conflict(Exception):
    """The condition did not hold: this request wrote nothing.

    A library may have sent it twice: read the object back.
    """


class UnsafeStoreError(ValueError):
    """The store cannot do, or does not keep, a conditional write. Two workers could both win there."""


class Stored(NamedTuple):
    """An object as read, and the version to name when it is to be replaced only if it is unchanged."""

    data: bytes
    version: str


class Store(Protocol):
    """A flat set of small objects, safe to use from several threads.

    A write that is confirmed is seen by every later read, everywhere; a reader never sees half of one. Every method may
    raise `StoreError`.
    """

    root: str
    """The storage's name in messages."""
    readers: int
    """How many reads at once are useful."""
    write_interval: float
    """Least time in seconds between two writes of one object."""

    def read(self, key: str) -> Stored | None:
        """Returns the object, or None."""

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """Replaces the object if it is still the one of `version`; with None, creates it if there is none.

        Returns the new version. Raises `Conflict`.
        """

    def keys(self) -> list[str]:
        """Returns all keys, in no order."""

    def discard(self, key: str) -> None:
        """Deletes without a condition.

        Only for the objects of `prove`: a record is never deleted, so its token never falls.
        """


TRIES = 5
FIRST_PAUSE_SECONDS = 0.5
"""Seconds between the first two tries; each further pause is twice as long."""

Answer = TypeVar("Answer")


def patiently(request: Callable[[], Answer]) -> Answer:
    """Returns what `request` returns, tried again after `StoreUnavailable`.

    Raises the last `StoreUnavailable`, and any other error. It is for requests outside the protocol, which repeats its own: it
    knows how long a lease has left.
    """
    pause = FIRST_PAUSE_SECONDS
    for _ in range(TRIES - 1):
        try:
            return request()
        except StoreUnavailable:
            time.sleep(pause)
            pause *= 2
    return request()
