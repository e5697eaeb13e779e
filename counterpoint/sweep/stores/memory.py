"""Objects in this process's memory, by name: for threads and tasks of one process, and for tests."""

from __future__ import annotations

import itertools
import threading

from counterpoint.sweep.store import Conflict, Stored

_objects: dict[str, dict[str, Stored]] = {}
_lock = threading.Lock()
_versions = itertools.count(1)


class MemoryStore:
    """All stores of one name are the same."""

    readers = 1
    write_interval = 0.0

    def __init__(self, name: str) -> None:
        self.root = f"memory://{name}"
        with _lock:
            self._objects = _objects.setdefault(name, {})

    def read(self, key: str) -> Stored | None:
        """See `Store`."""
        return self._objects.get(key)

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """See `Store`."""
        with _lock:
            current = self._objects.get(key)
            if (current and current.version) != version:
                raise Conflict(f"{self.root}: {key}")
            written = Stored(bytes(data), str(next(_versions)))
            self._objects[key] = written
            return written.version

    def keys(self) -> list[str]:
        """See `Store`."""
        with _lock:
            return list(self._objects)

    def discard(self, key: str) -> None:
        """See `Store`."""
        with _lock:
            self._objects.pop(key, None)
