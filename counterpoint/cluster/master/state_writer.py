"""Writes the state of a job for its master, each time before anything that follows from it is done.

A write is refused unless the state is still the one that this master has read or written: a master that was frozen while another
took over finds that out here, and stops at once. While the storage fails, a write is tried again and nothing is executed; the
workers go on. `trouble` says what is waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.cluster.errors import ClusterError, StaleMasterError
from counterpoint.cluster.job_files import MAX_BYTES, STATE_FILE
from counterpoint.cluster.manager.state import JobState
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.state_file import MasterState, StateChange, StateError, of_bytes, to_bytes
from counterpoint.sweep.lease import monotonic
from counterpoint.sweep.open_store import open_proven
from counterpoint.sweep.protocol import Superseded, Write, perform, write_until_known
from counterpoint.sweep.store import LARGEST_OBJECT_BYTES, Conflict, Store, Stored, StoreError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes
from counterpoint.transport.process.permanent_errors import disk_full, is_disk_full

KEY = STATE_FILE.removesuffix(".json")
"""The name of the state's object in a store."""

TRY_SECONDS = 1.0
"""How long one write is tried before the status says so; it is then tried again."""


class NotWritten(Exception):
    """The state cannot be written, and is not to be waited for."""


class StateFile:
    """The one object of a `Store`, as a file of a directory. The caller's lock keeps every other writer away."""

    write_interval, readers = 0.0, 1

    def __init__(self, directory: Path) -> None:
        """Makes the directory. Raises `OSError`."""
        self.root = str(directory)
        self._path = directory / STATE_FILE
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def read(self, key: str) -> Stored | None:
        """See `Store`."""
        try:
            data = read_bytes(self._path, MAX_BYTES)
        except FileNotFoundError:
            return None
        except UntrustedFileError as error:
            raise StateError(f"{self._path} cannot be read: {error}") from None
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error}") from error
        return Stored(data, hashlib.sha256(data).hexdigest())

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """See `Store`."""
        found = self.read(key)
        if (found and found.version) != version:
            raise Conflict(str(self._path))
        try:
            write_atomically(self._path, data, mode=0o600)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        return hashlib.sha256(data).hexdigest()

    def keys(self) -> list[str]:
        """See `Store`."""
        return [KEY] if self._path.exists() else []

    def discard(self, key: str) -> None:
        """See `Store`."""
        self._path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes what masters that were killed had not written whole."""
        for partial in self._path.parent.glob(f".{STATE_FILE}.*.partial"):
            partial.unlink(missing_ok=True)


def open_state(directory: Path, root: str | None) -> Store:
    """Returns where the state of the job in a directory lies: there, or at a root as of `sweep`.

    Raises `OSError` and what `open_proven` raises.
    """
    if root is not None and "://" in root:
        return open_proven(root)
    return StateFile(directory if root is None else Path(root).expanduser().absolute())


class StateWriter:
    """The state as one master process reads and writes it."""

    def __init__(self, store: Store, faults: Faults | None = None) -> None:
        self.trouble = ""
        """Why the master does not act, for a person; empty while it does."""
        self.writes = True
        """False for the end of a job whose storage fails: nothing is written any more."""
        self.gives_up = False
        """Whether a write that fails raises `NotWritten`."""
        self.report: Callable[[str], None] = lambda _: None
        """Called with each `trouble`, and with "" when it is over."""
        self.epoch = self.number = 0
        """Those of the state as it was last read or written; 0 before the first."""
        self.handles: Mapping[str, Any] = {}
        """The handles in that state."""
        self._store = store
        self._faults = faults or Faults("")
        self._known: Stored | None = None

    def read(self) -> MasterState | None:
        """Reads the state as its last master left it; None before the first. Blocks. Raises `StateError`, `StoreError`."""
        if isinstance(self._store, StateFile):
            self._store.clear()
        self._known = self._store.read(KEY)
        if (saved := self.saved) is not None:
            self.epoch, self.number, self.handles = saved.epoch, saved.number, saved.handles
        return saved

    @property
    def saved(self) -> MasterState | None:
        """The state as it was last read or written; None before the first."""
        return None if self._known is None else of_bytes(self._known.data, f"{self._store.root}/{STATE_FILE}")

    def is_replaced(self) -> bool:
        """Whether another master has surely written the state since. Blocks."""
        try:
            found = self._store.read(KEY)
        except (StateError, StoreError):
            return False
        return (found and found.version) != (self._known and self._known.version)

    async def write(
        self, epoch: int, at: float, job: JobState, handles: Mapping[str, Any], changes: Sequence[StateChange]
    ) -> None:
        """Makes the state durable. Raises `StaleMasterError` if another master has written it, `NotWritten`."""
        if not self.writes:
            return
        saved = MasterState(epoch, self.number + 1, at, job, dict(handles), changes)
        data = to_bytes(saved)
        limit = MAX_BYTES if isinstance(self._store, StateFile) else LARGEST_OBJECT_BYTES
        if len(data) > limit:
            raise ClusterError(
                f"{self._store.root}: the job's state has {len(data)} bytes; at most {limit} can be kept there"
            )
        self._faults.reach("before_write")
        version = await self._until_known(Write(KEY, data, self._known and self._known.version), epoch)
        self._faults.reach("after_write")
        self._known = Stored(data, version)
        self.epoch, self.number, self.handles = epoch, saved.number, saved.handles

    async def _until_known(self, write: Write, epoch: int) -> str:
        while True:
            exchange = write_until_known(write, monotonic, monotonic() + TRY_SECONDS, f"{self._store.root}: ")
            writing = asyncio.create_task(asyncio.to_thread(perform, self._store, exchange), name="writing the state")
            try:
                version = await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # the lock is given back after this
                raise
            except Superseded as other:
                raise self._replaced_by(other.stored, epoch) from None
            except StoreError as error:
                self._note(error)
                if self.gives_up:
                    raise NotWritten(str(error)) from error
            else:
                if self.trouble:
                    self.trouble = ""
                    self.report("")
                return version

    def _note(self, error: StoreError) -> None:
        if not self.trouble:
            since = time.strftime("%H:%M:%S")
            unknown = f"nothing is started or stopped: the job's state cannot be written since {since}: {error}"
            self.trouble = disk_full(self._store.root) if is_disk_full(error) else unknown
            self.report(self.trouble)

    def _replaced_by(self, stored: Stored | None, epoch: int) -> StaleMasterError:
        place = f"{self._store.root}/{STATE_FILE}"
        if stored is None:
            return StaleMasterError(f"{place} was removed by another; this master has epoch {epoch}")
        other = of_bytes(stored.data, place)
        return StaleMasterError(f"{place}: a master of epoch {other.epoch} has written it; this one has epoch {epoch}")
