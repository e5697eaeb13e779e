"""The sessions of all clients: their owners, whether they go on, and the last sign of life of each."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

import msgspec

from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import SessionRecord, without_notes
from counterpoint.service.tinker.refusals import Gone, NoSuchThing

KNOWN_SESSIONS = 4096
"""Sessions that it does not read from the disk again."""


class ClientSessions:
    """The sessions of the newest requests: each request has one."""

    def __init__(self, store: RecordStore) -> None:
        """Reads and writes them in `store`."""
        self._store = store
        self._known: OrderedDict[str, SessionRecord] = OrderedDict()
        self._seen: dict[str, float] = {}
        self._started = time.monotonic()

    async def begin(self, session: SessionRecord) -> None:
        """Takes a new session. Raises `OSError` and `ValueError`."""
        self._take(session)
        await asyncio.to_thread(self._store.write, session)
        self._seen[session.session_id] = time.monotonic()

    async def live(self, session_id: str, owner: str) -> SessionRecord:
        """Returns a session that goes on. Raises `NoSuchThing` and `Gone`."""
        found = await self.any(session_id, owner)
        if found.finished:
            raise Gone(f"session {session_id} has ended")
        self._seen[session_id] = time.monotonic()
        return found

    async def any(self, session_id: str, owner: str) -> SessionRecord:
        """Returns a session, also one that has ended. Raises `NoSuchThing`."""
        found = self._known.get(session_id) or await asyncio.to_thread(self._store.session, session_id)
        if found is None or found.owner != owner:
            raise NoSuchThing(f"there is no session {session_id[:80]!r}")
        known = self._known.setdefault(found.session_id, found)  # it may have ended while it was read
        self._known.move_to_end(known.session_id)
        while len(self._known) > KNOWN_SESSIONS:
            self._known.popitem(last=False)
        return known

    async def end(self, session: SessionRecord, ending: dict[str, Any]) -> None:
        """Ends a session. Raises `OSError`."""
        await self.change(msgspec.structs.replace(session, finished=True, ending=ending))

    async def change(self, session: SessionRecord) -> None:
        """Replaces a session by its changed record. Raises `OSError`."""
        self._take(session)
        await asyncio.to_thread(self._store.change_session, session)

    def _take(self, session: SessionRecord) -> None:
        self._known[session.session_id] = without_notes(session)
        self._store.ledger.assign(session.session_id, "" if session.finished else session.project)

    def forget(self, session_id: str) -> None:
        """Forgets a session's last sign of life."""
        self._seen.pop(session_id, None)

    def heard_of(self, seconds: float) -> list[str]:
        """Returns the sessions with a sign of life in the last `seconds`."""
        return [each for each, seen in self._seen.items() if seen >= time.monotonic() - seconds]

    def was_silent(self, session_id: str, seconds: float) -> bool:
        """Whether a session has been silent for `seconds` while the service ran."""
        return self._seen.get(session_id, self._started) < time.monotonic() - seconds

    def last_seen(self, session_id: str) -> float:
        """Returns a session's last sign of life since this service started, in seconds since 1970, or 0."""
        seen = self._seen.get(session_id)
        return 0.0 if seen is None else time.time() - (time.monotonic() - seen)


def session_of(any_id: str) -> str:
    """Returns the session of a model, a sampler or a request by its id."""
    return any_id.partition(":")[0]
