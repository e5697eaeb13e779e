"""The journal of a job: every accepted event is durable here before anything follows from it. Its fold is the job's state.

Entries are objects of a `sweep` store, numbered without gaps, each created only if there is none of its number: two masters
cannot both append at one place. A master's first entry, its opening, keeps every earlier master out, as follows. A master
creates entry n + 1 only after n is confirmed, and tries nothing else until then. So whoever has read up to n has at most one
entry of an earlier master still to come, at n + 1; either that one or the opening is created there, and the loser sees it. As
openings are never discarded, the earlier master meets one, at whatever time it goes on, and has then appended nothing after
it. A master that reads for so long that others append and discard meanwhile finds their snapshot after its opening, and
begins anew.

Snapshots bound the length: entries up to a snapshot are discarded once it is durable. The exchanges are generators of
requests, as those of `counterpoint/sweep/protocol.py`, so that tests carry out the requests of several masters in every order and
with every fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from counterpoint.cluster.errors import StaleMasterError
from counterpoint.cluster.master import journal_format as layout
from counterpoint.cluster.master.journal_format import JournalError
from counterpoint.sweep.lease import monotonic
from counterpoint.sweep.protocol import Discard, Exchange, ListKeys, Read, Superseded, Write, pauses, write_until_known
from counterpoint.sweep.store import Conflict, Stored, StoreError

ENTRIES_BEFORE_SNAPSHOT = 128
"""Fewest entries between two snapshots; more while the entries are smaller together than the last snapshot."""


@dataclass(slots=True)
class History:
    """A journal as read: the newest snapshot, if any, and every entry after it."""

    snapshot: layout.Snapshot | None = None
    entries: list[layout.Entry] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The number of the last entry."""
        return self.entries[-1].number if self.entries else self.snapshot.number if self.snapshot else 0

    @property
    def epoch(self) -> int:
        """The epoch of the last entry; 0 without one."""
        return self.entries[-1].epoch if self.entries else self.snapshot.epoch if self.snapshot else 0

    @property
    def openings(self) -> list[int]:
        """The numbers of the opening entries."""
        earlier = list(self.snapshot.openings) if self.snapshot else []
        return earlier + [entry.number for entry in self.entries if entry.opening]

    @property
    def handles(self) -> dict[str, Any]:
        """The backend's handles after the last entry."""
        handles = dict(self.snapshot.handles) if self.snapshot else {}
        for entry in self.entries:
            merge_handles(handles, entry.handles)
        return handles


def merge_handles(handles: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Applies changed handles, in place; None removes one."""
    for name, handle in changes.items():
        if handle is None:
            handles.pop(name, None)
        else:
            handles[name] = handle


class Journal:
    """One master's view of the journal. Its exchanges follow one another; snapshots may be taken beside them."""

    def __init__(self, place: str, epoch: int, now: Callable[[], float] = monotonic) -> None:
        """Takes the store's root, for messages, and the master's epoch, which no other master has."""
        self.epoch = epoch
        self.last = 0
        """The number of the last entry that is known to be durable."""
        self.handles: dict[str, Any] = {}
        self.openings: list[int] = []
        self._place = place
        self._now = now
        self._pending: layout.Entry | None = None
        self._since_snapshot = 0
        self._bytes_since = 0
        self._snapshot_bytes = 0

    # --- opening ---

    def open(
        self, events: Callable[[History], Sequence[Mapping[str, Any]]], give_up: float = math.inf
    ) -> Exchange[History]:
        """Reads the journal, and appends the opening entry with the `events` made of what was read.

        Returns the history, the opening included. Raises `StaleMasterError` if a later master has opened it,
        `JournalError` if it is damaged, `StoreError` once `give_up` has passed.
        """
        while True:
            history = yield from self._read(give_up)
            if history.entries and history.entries[-1].epoch == self.epoch:
                break  # An earlier try, of which it was not known whether it is written.
            if (yield from self._create_opening(history, events, give_up)):
                break
        self.last, self.handles, self.openings = history.last, history.handles, history.openings
        self._since_snapshot = len(history.entries)
        return history

    def read(
        self, events: Callable[[History], Sequence[Mapping[str, Any]]], give_up: float = math.inf
    ) -> Exchange[History]:
        """Does as `open` without appending the opening entry: the journal stays that of the last master."""
        history = yield from self._read(give_up)
        history.entries.append(layout.Entry(history.last + 1, self.epoch, True, events(history)))
        self.last, self.handles, self.openings = history.last, history.handles, history.openings
        return history

    def _create_opening(
        self, history: History, events: Callable[[History], Sequence[Mapping[str, Any]]], give_up: float
    ) -> Exchange[bool]:
        """Appends the opening; returns False if others have appended and discarded so much that reading must begin anew."""
        while True:
            opening = layout.Entry(history.last + 1, self.epoch, True, events(history))
            other = yield from self._create(layout.entry_key(opening.number), layout.to_bytes(opening), give_up)
            history.entries.append(opening if other is None else self._entry(other, opening.number))
            if other is None:
                break
        keys: list[str] = yield from self._patiently(ListKeys(), give_up)
        newer = [n for key in keys if (n := layout.number_of(key, layout.SNAPSHOT)) is not None and n >= opening.number]
        return not newer

    def _read(self, give_up: float) -> Exchange[History]:
        while True:
            keys: list[str] = yield from self._patiently(ListKeys(), give_up)
            snapshots = sorted(n for key in keys if (n := layout.number_of(key, layout.SNAPSHOT)) is not None)
            history = History()
            if snapshots:
                stored: Stored | None = yield from self._patiently(Read(layout.snapshot_key(snapshots[-1])), give_up)
                if stored is None:
                    continue  # A later snapshot has replaced it since.
                history.snapshot = layout.snapshot_of_bytes(stored.data, snapshots[-1], self._place)
                self._check_epoch(history.snapshot.epoch, snapshots[-1])
            while (
                stored := (yield from self._patiently(Read(layout.entry_key(history.last + 1)), give_up))
            ) is not None:
                history.entries.append(self._entry(stored, history.last + 1))
            keys = yield from self._patiently(ListKeys(), give_up)
            if any((layout.number_of(key, layout.SNAPSHOT) or 0) > history.last for key in keys):
                continue  # Another master has appended and discarded meanwhile.
            self._check_no_gap(history, keys)
            return history

    def _check_no_gap(self, history: History, keys: Sequence[str]) -> None:
        later = [n for key in keys if (n := layout.number_of(key, layout.ENTRY)) is not None and n > history.last + 1]
        if later and layout.entry_key(history.last + 1) not in keys:
            raise JournalError(
                f"{self._place}: {layout.entry_key(history.last + 1)} of the journal is missing, and "
                f"{layout.entry_key(min(later))} exists. The state of the job cannot be told from here on: restore the object "
                "from a copy, or start the job in another directory"
            )

    def _entry(self, stored: Stored, number: int) -> layout.Entry:
        """Reads an entry. Raises `StaleMasterError` for one of a later master."""
        entry = layout.entry_of_bytes(stored.data, number, self._place)
        if not (entry.opening and entry.epoch == self.epoch):
            self._check_epoch(entry.epoch, number)
        return entry

    def _check_epoch(self, epoch: int, number: int) -> None:
        if epoch >= self.epoch:
            raise StaleMasterError(
                f"{self._place}: a master of epoch {epoch} has taken the journal over, as entry {number} says; this one has "
                f"epoch {self.epoch}"
            )

    # --- appending ---

    def append(
        self, events: Sequence[Mapping[str, Any]], handles: Mapping[str, Any] | None = None, give_up: float = math.inf
    ) -> Exchange[layout.Entry]:
        """Makes events durable, and the backend's changed handles; returns their entry.

        Raises `EntryTooLarge` before anything is written; `StaleMasterError` if a later master has opened the journal;
        `StoreError` once `give_up` has passed: whether it is written is then not known, and `retry` must follow.
        """
        assert self._pending is None, "an entry is not known to be written; retry it first"
        self._pending = layout.Entry(self.last + 1, self.epoch, False, events, handles or {})
        try:
            layout.to_bytes(self._pending)
        except BaseException:
            self._pending = None
            raise
        return (yield from self.retry(give_up))

    @property
    def has_pending(self) -> bool:
        """Whether it is not known that the last entry is written."""
        return self._pending is not None

    def retry(self, give_up: float = math.inf) -> Exchange[layout.Entry]:
        """Goes on with the append that `StoreError` ended. Raises as `append` does."""
        entry = self._pending
        assert entry is not None, "there is nothing to be written"
        data = layout.to_bytes(entry)
        other = yield from self._create(layout.entry_key(entry.number), data, give_up)
        if other is not None:
            self._entry(other, entry.number)
            raise JournalError(
                f"{self._place}: {layout.entry_key(entry.number)} was written by an earlier master than that of epoch "
                f"{self.epoch}, after the latter had opened the journal: the storage does not keep its conditions"
            )
        self._pending = None
        self.last = entry.number
        merge_handles(self.handles, entry.handles)
        self._since_snapshot += 1
        self._bytes_since += len(data)
        return entry

    def _create(self, key: str, data: bytes, give_up: float) -> Exchange[Stored | None]:
        """Creates an object, and repeats until it is known what is there; returns what another has written instead."""
        try:
            yield from write_until_known(Write(key, data, None), self._now, give_up, f"{self._place}: ")
        except Superseded as other:
            return other.stored
        return None

    def _patiently(self, request: Read | ListKeys, give_up: float) -> Exchange[Any]:
        for pause in pauses():
            try:
                return (yield request)
            except StoreError:
                if self._now() >= give_up:
                    raise
            yield pause

    # --- snapshots ---

    @property
    def snapshot_is_due(self) -> bool:
        """Whether so much was appended since the last snapshot that another is worth its bytes."""
        return self._since_snapshot >= ENTRIES_BEFORE_SNAPSHOT and self._bytes_since >= self._snapshot_bytes

    def take_snapshot(self, state: Mapping[str, Any]) -> layout.Snapshot:
        """Returns the snapshot at the last entry, whose fold is `state`; `write_snapshot` makes it durable."""
        self._since_snapshot = self._bytes_since = 0
        return layout.Snapshot(self.last, self.epoch, state, dict(self.handles), tuple(self.openings))

    def write_snapshot(self, snapshot: layout.Snapshot) -> Exchange[None]:
        """Makes a snapshot durable, and then discards what came before it, except the openings.

        May run beside an append. Raises `StoreError`, after which nothing is missing, and `EntryTooLarge`.
        """
        data = layout.to_bytes(snapshot)
        self._snapshot_bytes = len(data)
        try:
            yield Write(layout.snapshot_key(snapshot.number), data, None)
        except Conflict:  # The answer of an earlier try was lost: what is there is the fold of the same entries.
            stored: Stored | None = yield Read(layout.snapshot_key(snapshot.number))
            if stored is not None:
                layout.snapshot_of_bytes(stored.data, snapshot.number, self._place)
        kept = set(snapshot.openings)
        for key in (yield ListKeys()):
            entry, earlier = layout.number_of(key, layout.ENTRY), layout.number_of(key, layout.SNAPSHOT)
            is_old = entry is not None and entry <= snapshot.number and entry not in kept
            if is_old or (earlier is not None and earlier < snapshot.number):
                yield Discard(key)
