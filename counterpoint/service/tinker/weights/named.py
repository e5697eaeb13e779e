"""The weights that clients have saved: their names, their end, and their owners."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import ModelRecord, SavedRecord
from counterpoint.service.tinker.refusals import BadRequest, NoSuchThing
from counterpoint.service.tinker.sessions import session_of

LONGEST_TTL = 10 * 366 * 86_400
"""Seconds for which weights stay at most, unless they stay for ever."""


class Weights:
    """Saved weights of all clients."""

    def __init__(self, store: RecordStore) -> None:
        """Reads and writes their records in `store`."""
        self._store = store

    async def named(self, path: str, owner: str) -> SavedRecord:
        """Returns the weights of a URI. Raises `NoSuchThing`."""
        found = await asyncio.to_thread(self._store.saved, path)
        session = None
        if found is not None and found.kind != "inflight":
            session = await asyncio.to_thread(self._store.session, session_of(found.model_id))
        if found is None or session is None or session.owner != owner:
            raise NoSuchThing(f"there are no weights {path[:120]!r}")
        return found

    def all_of(self, model: ModelRecord) -> list[SavedRecord]:
        """Returns a model's saved weights, the newest first. Blocks."""
        found = self._store.all_saved(model.model_id)
        return sorted((each for each in found if not each.has_expired), key=lambda each: each.created, reverse=True)

    async def delete(self, path: str, owner: str) -> None:
        """Takes the name from weights. A sweep deletes their bytes once nothing needs them. Raises `NoSuchThing`."""
        record = await self.named(path, owner)
        await asyncio.to_thread(self._store.delete, record)

    async def set_ttl(self, path: str, ttl_seconds: int | None, owner: str) -> None:
        """Has weights deleted after a time, or never. Raises `NoSuchThing` and `BadRequest`."""
        record = await self.named(path, owner)
        if not await asyncio.to_thread(self._store.set_expiry, record, expiry(ttl_seconds)):
            raise NoSuchThing(f"there are no weights {path[:120]!r}")

    async def adapter_of(self, saved: SavedRecord) -> str:
        """Returns the name that published weights have at the servers."""
        model = await asyncio.to_thread(self._store.model, saved.model_id)
        assert model is not None
        return adapter_name(model.run_id, saved.directory)


def adapter_name(run_id: str, directory: str) -> str:
    """Returns the name at the servers of a run's published directory."""
    return f"{run_id}.{Path(directory).name}"


def expiry(ttl_seconds: int | None) -> float | None:
    """Returns when weights expire that stay `ttl_seconds` from now, or None for ever. Raises `BadRequest`."""
    if ttl_seconds is None:
        return None
    if not 1 <= ttl_seconds <= LONGEST_TTL:
        raise BadRequest(f"ttl_seconds = {ttl_seconds}; expected 1 to {LONGEST_TTL}")
    return time.time() + ttl_seconds
