"""The journal for the loop: the same appends, in a thread, repeated while the storage fails and the mastership holds.

Nothing is executed meanwhile, and the workers go on. `trouble` says what is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from counterpoint.cluster.manager.events import Event
from counterpoint.cluster.master.event_codec import encode
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.master.journal import History, Journal
from counterpoint.cluster.master.journal_format import MAX_ENTRY_BYTES, EntryTooLarge, Snapshot
from counterpoint.sweep.lease import monotonic
from counterpoint.sweep.protocol import Exchange, perform
from counterpoint.sweep.store import Store, StoreError
from counterpoint.transport.process.permanent_errors import disk_full, is_disk_full

logger = logging.getLogger(__name__)

TRY_SECONDS = 1.0
"""How long one append is tried before the status says so; it is then tried again."""

ENTRY_BYTES = MAX_ENTRY_BYTES - 2048
"""The events or handles of one entry; more are spread over several entries."""

T = TypeVar("T")


class MastershipLost(Exception):
    """This master must not act any more: another one may."""


class Durable:
    """Writes one master's journal. One append at a time; a snapshot may be written beside it."""

    def __init__(
        self,
        store: Store,
        epoch: int,
        check_lost: Callable[[], None],
        faults: Faults,
        report: Callable[[str], None],
        *,
        writes: bool = True,
    ) -> None:
        """`check_lost` raises `MastershipLost` once this master may write no more. Without `writes` it only reads.

        `report` is called with each `trouble`, and with "" when it is over.
        """
        self.trouble = ""
        """Why the master does not act, for a person; empty while it does."""
        self._store = store
        self._journal = Journal(store.root, epoch)
        self._check_lost = check_lost
        self._faults = faults
        self._report = report
        self._writes = writes
        self._snapshot: asyncio.Task[None] | None = None

    @property
    def last(self) -> int:
        """The number of the last entry."""
        return self._journal.last

    async def open(self, events: Callable[[History], Sequence[Event]]) -> History:
        """Reads the journal and opens it for this master. Raises as `Journal.open`, `StoreError` only if nothing is written."""

        def encoded(read: History) -> Sequence[Mapping[str, Any]]:
            return [encode(event) for event in events(read)]

        if not self._writes:
            reading = self._journal.read(encoded, monotonic() + TRY_SECONDS)
            return await asyncio.to_thread(lambda: perform(self._store, reading))
        return await self._until_known(lambda: self._journal.open(encoded, monotonic() + TRY_SECONDS))

    async def append(self, events: Sequence[Event], handles: Mapping[str, Any]) -> None:
        """Makes events and changed handles durable. Raises `MastershipLost`, `StaleMasterError`."""
        if not self._writes:
            return
        known = self._journal.handles
        changed = {name: handle for name, handle in handles.items() if known.get(name) != handle}
        changed |= dict.fromkeys(known.keys() - handles.keys())
        for some_events, some_handles in _entries([encode(event) for event in events], changed):
            self._check_lost()
            self._faults.reach("before_append")
            await self._append(some_events, some_handles)
            self._faults.reach("after_append")

    async def _append(self, events: Sequence[Mapping[str, Any]], handles: Mapping[str, Any]) -> None:
        def exchange() -> Exchange[Any]:
            give_up = monotonic() + TRY_SECONDS
            if self._journal.has_pending:
                return self._journal.retry(give_up)
            return self._journal.append(events, handles, give_up)

        await self._until_known(exchange)

    async def _until_known(self, exchange: Callable[[], Exchange[T]]) -> T:
        while True:
            self._check_lost()
            try:
                result = await asyncio.to_thread(lambda: perform(self._store, exchange()))
            except StoreError as error:
                if not self.trouble:
                    since = time.strftime("%H:%M:%S")
                    unknown = f"nothing is started or stopped: the journal cannot be written since {since}: {error}"
                    self.trouble = disk_full(self._store.root) if is_disk_full(error) else unknown
                    self._report(self.trouble)
            else:
                if self.trouble:
                    self.trouble = ""
                    self._report("")
                return result

    def consider_snapshot(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Begins to write a snapshot if one is due. `state` returns the fold of all that was appended."""
        if self._journal.snapshot_is_due and (self._snapshot is None or self._snapshot.done()):
            snapshot = self._journal.take_snapshot(state())
            self._snapshot = asyncio.create_task(self._write(snapshot), name="snapshot of the journal")

    async def _write(self, snapshot: Snapshot) -> None:
        try:
            await asyncio.to_thread(lambda: perform(self._store, self._journal.write_snapshot(snapshot)))
        except (StoreError, EntryTooLarge) as error:
            logger.warning("the journal stays longer, without a snapshot at entry %d: %s", snapshot.number, error)

    async def close(self) -> None:
        """Waits for what is being written."""
        if self._snapshot is not None:
            await asyncio.gather(self._snapshot, return_exceptions=True)


def _entries(
    events: list[dict[str, Any]], handles: dict[str, Any]
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Spreads events, in order, and handles over as few entries as hold them."""
    entries: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    room = 0

    def entry_for(item: object) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        nonlocal room
        size = len(orjson.dumps(item)) + 8
        if size > room:
            entries.append(([], {}))
            room = ENTRY_BYTES
        room -= size
        return entries[-1]

    for event in events:
        entry_for(event)[0].append(event)
    for name, handle in handles.items():
        entry_for((name, handle))[1][name] = handle
    return entries
