"""`sweep_status`: the state of every target of a root, for tables and tools. Reads only; needs no right to write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from counterpoint.sweep.lock import missing_output
from counterpoint.sweep.open_store import open_store
from counterpoint.sweep.record import Record, RecordError, RecordState, checked_id
from counterpoint.sweep.store import Store, patiently


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """The state of one target. All fields but the first two are None where they do not apply."""

    target_id: str
    state: Literal["PENDING", "RUNNING", "SUCCESS", "FAILED", "INTERRUPTED", "UNREADABLE"]
    """PENDING: never claimed. UNREADABLE: its record is damaged, and `error` says how."""
    owner: str | None = None
    """The uuid of the claim."""
    host: str | None = None
    pid: int | None = None
    token: int | None = None
    """The fencing token of the claim: how many there were."""
    attempts: int = 0
    """How many attempts these had, without those given back."""
    started_at: float | None = None
    """Seconds since the epoch by the owner's clock, like the next two."""
    heartbeat_at: float | None = None
    finished_at: float | None = None
    duration: float | None = None
    """Seconds from the claim to its end, or to the last heartbeat while it runs."""
    lease_seconds: float | None = None
    error: str | None = None
    """The error of the last attempt that did not succeed; of one that did, that its output is not there any more."""
    traceback: str | None = None


def sweep_status(sweep_root: str | os.PathLike[str], target_ids: Iterable[str] = ()) -> list[TargetStatus]:
    """Returns the targets that were ever claimed, and those of `target_ids` that were not, sorted by id.

    Each is as it was at some moment of the call. A RUNNING one whose last heartbeat is older than its lease has lost its
    worker, if the clocks agree. Raises `ValueError` for an invalid root, `StoreError` when the storage does not
    answer for some seconds.
    """
    store = open_store(sweep_root)
    found = patiently(store.keys)
    keys = sorted({key for key in found if _is_id(key)} | {checked_id(target_id) for target_id in target_ids})
    if store.readers == 1:
        return [_look(store, key) for key in keys]
    with ThreadPoolExecutor(store.readers, thread_name_prefix="sweep status") as readers:
        return list(readers.map(partial(_look, store), keys))


def _look(store: Store, target_id: str) -> TargetStatus:
    stored = patiently(partial(store.read, target_id))
    if stored is None:
        return TargetStatus(target_id, "PENDING")
    try:
        record = Record.of_bytes(stored.data, target_id, store.root)
    except RecordError as error:
        return TargetStatus(target_id, "UNREADABLE", error=str(error))
    gone = missing_output(store, record) if record.state is RecordState.SUCCESS else None
    return replace(status_of(record), error=gone or record.error)


def status_of(record: Record) -> TargetStatus:
    """Returns what a record says."""
    until = record.finished_at if record.finished_at is not None else record.heartbeat_at
    return TargetStatus(
        target_id=record.target_id,
        state=record.state.value,
        owner=record.owner,
        host=record.host,
        pid=record.pid,
        token=record.token,
        attempts=record.attempts,
        started_at=record.started_at,
        heartbeat_at=record.heartbeat_at,
        finished_at=record.finished_at,
        duration=max(0.0, until - record.started_at),
        lease_seconds=record.lease_seconds,
        error=record.error,
        traceback=record.traceback,
    )


def _is_id(key: str) -> bool:
    try:
        checked_id(key)
    except ValueError:
        return False
    return True
