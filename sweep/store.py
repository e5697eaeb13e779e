"""What a sweep asks of storage: to read an object, and to write one on condition that it is unchanged. Nothing else.

Each backend is one small module of `sweep/stores/`; `sweep/open_store.py` finds that of a root.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


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
    """A flat set of small objects.

    A write that is confirmed is seen by every later read, everywhere; a reader never sees half of one. Safe to be called
    from several threads. `StoreError` may come from every method.
    """

    root: str
    """For messages."""
    readers: int
    """How many reads at once are worth it."""
    write_interval: float
    """Least time in seconds between two writes of one object."""

    def read(self, key: str) -> Stored | None:
        """The object, or None."""

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """Replaces the object if it is still the one of `version`; with None, creates it if there is none.

        Returns the new version. Raises `Conflict`.
        """

    def keys(self) -> list[str]:
        """All of them, in no order."""

    def discard(self, key: str) -> None:
        """Deletes without a condition. Only for what `prove` made: a record is never deleted, so its token never falls."""
