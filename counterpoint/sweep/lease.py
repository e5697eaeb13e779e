"""The rules of a lease: what an observer may do with a target, and what each step writes. Pure: no I/O and no clock.

`counterpoint/sweep/protocol.py` applies them, request by request. The argument that no two owners run at once is in
`docs/sweep.md`; it rests on three rules that are here. An observer counts by its own clock, from when it first saw a record, and
takes a RUNNING target only after the whole lease. An owner counts from the start of its last confirmed write, and stops a margin
sooner. Every step is written on condition that the record is the one on which it was decided.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from counterpoint.sweep.identity import Identity
from counterpoint.sweep.record import Record, RecordState

MARGIN = 1 / 6
"""The last share of a lease, before which its owner has stopped: time for a body to end, and for clocks that drift."""

LONGEST_BACKOFF_SECONDS = 600.0
TRACEBACK_CHARACTERS = 4000
ERROR_CHARACTERS = 1000
"""Longest error text, in characters. With up to 12 bytes each, it and a traceback fit into one record."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which targets are claimed. Raises `ValueError` for invalid terms."""

    heartbeat: float = 30.0
    """Seconds between two writes of an owner."""
    lease: float = 90.0
    """Seconds without one after which a peer may take over."""
    force_run_failed: bool = True
    """Whether a target that reads FAILED is tried again."""
    max_attempts: int | None = None
    """Attempts, in all workers together, after which a target stays FAILED; None: no limit."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.heartbeat) and self.heartbeat > 0):
            raise ValueError(f"heartbeat is {self.heartbeat!r} s; it must be above 0")
        if not (math.isfinite(self.lease) and self.lease >= 2 * self.heartbeat):
            raise ValueError(
                f"lease is {self.lease!r} s; it must be at least twice the heartbeat of {self.heartbeat!r} s, or one late "
                "heartbeat loses it"
            )
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts!r}; it must be at least 1, or None for no limit")

    @property
    def safe_seconds(self) -> float:
        """Seconds after the start of its last confirmed write during which an owner may go on."""
        return self.lease * (1 - MARGIN)


# --- what an observer may do ---


@dataclass(frozen=True, slots=True)
class Take:
    """Has the target claimed."""


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Mark the target FAILED: its owner vanished in the last attempt that it had."""


@dataclass(frozen=True, slots=True)
class TargetHeld:
    """A peer holds the target, or it pauses after a failure. Check again after `seconds`."""

    seconds: float
    record: Record


@dataclass(frozen=True, slots=True)
class Done:
    """The target reads SUCCESS."""

    record: Record


@dataclass(frozen=True, slots=True)
class StaysFailed:
    """The target reads FAILED and is not tried again."""

    record: Record


Assessment = Take | MarkFailed | TargetHeld | Done | StaysFailed


def assess(record: Record | None, unchanged_seconds: float, wall_time: float, terms: Terms) -> Assessment:
    """Returns what to do with a target.

    Its `record` is unchanged for `unchanged_seconds`, by the observer's own monotonic clock; `wall_time` is in seconds since
    the epoch.
    """
    if record is None or record.state is RecordState.INTERRUPTED:
        return Take()
    if record.state is RecordState.SUCCESS:
        return Done(record)
    exhausted = terms.max_attempts is not None and record.attempts >= terms.max_attempts
    if record.state is RecordState.RUNNING:
        remaining = record.lease_seconds - unchanged_seconds
        if remaining > 0:
            return TargetHeld(remaining, record)
        return MarkFailed() if exhausted else Take()
    if exhausted or not terms.force_run_failed:
        return StaysFailed(record)
    # A wrong wall clock makes a retry too soon, or the whole pause begin again by our clock: neither is unsafe.
    rested = max(unchanged_seconds, wall_time - (record.finished_at or wall_time))
    remaining = backoff_seconds(record.attempts, terms) - rested
    return TargetHeld(remaining, record) if remaining > 0 else Take()


def backoff_seconds(attempts: int, terms: Terms) -> float:
    """Returns the pause of a target after its attempt of that number failed.

    One heartbeat, doubled with each attempt, up to ten minutes.
    """
    return min(terms.heartbeat * 2.0 ** min(attempts - 1, 32), LONGEST_BACKOFF_SECONDS)


class RecordAges:
    """The time, by this observer's clock, for which each target has had its present record."""

    def __init__(self) -> None:
        self._first_seen: dict[str, tuple[str, float]] = {}

    def unchanged_seconds(self, target_id: str, version: str | None, now: float) -> float:
        """Notes the version of a record that was read, and returns for how many seconds it is unchanged.

        `now` is the time at which the answer had arrived, since the record may be no older than that.
        """
        if version is None:
            self._first_seen.pop(target_id, None)
            return 0.0
        if target_id not in self._first_seen or self._first_seen[target_id][0] != version:
            self._first_seen[target_id] = (version, now)
        return now - self._first_seen[target_id][1]


# --- what each step writes ---


def claimed(
    previous: Record | None,
    target_id: str,
    owner: str,
    host: str,
    pid: int,
    terms: Terms,
    wall_time: float,
    identity: Identity | None = None,
) -> Record:
    """Returns the record of a new claim, which must replace exactly `previous`."""
    return Record(
        target_id=target_id,
        state=RecordState.RUNNING,
        owner=owner,
        token=(previous.token if previous else 0) + 1,
        attempts=(previous.attempts if previous else 0) + 1,
        revision=(previous.revision if previous else 0) + 1,
        lease_seconds=terms.lease,
        host=host,
        pid=pid,
        started_at=wall_time,
        heartbeat_at=wall_time,
        error=_last_error(previous),
        traceback=previous.traceback if previous else None,
        config=None if identity is None else identity.digest,
        field_names=None if identity is None else identity.field_names,
    )


def with_heartbeat(record: Record, wall_time: float) -> Record:
    """Returns the record after one more heartbeat."""
    return replace(record, revision=record.revision + 1, heartbeat_at=wall_time)


def succeeded(record: Record, wall_time: float) -> Record:
    """Returns the record after the body returned."""
    return replace(_ended(record, RecordState.SUCCESS, wall_time), error=None, traceback=None)


def failed(record: Record, error: str, traceback: str, wall_time: float) -> Record:
    """Returns the record after the body raised. The end of the traceback is kept, which has the error."""
    shown = error[:ERROR_CHARACTERS]
    return replace(
        _ended(record, RecordState.FAILED, wall_time), error=shown, traceback=traceback[-TRACEBACK_CHARACTERS:] or None
    )


def interrupted(record: Record, wall_time: float) -> Record:
    """Returns the record after the body was stopped from outside.

    The claim is given back, and does not count as an attempt.
    """
    return replace(_ended(record, RecordState.INTERRUPTED, wall_time), attempts=record.attempts - 1)


def marked_failed(record: Record, owner: str, wall_time: float) -> Record:
    """Returns the record that an observer writes after the owner of the last attempt vanished."""
    return replace(_ended(record, RecordState.FAILED, wall_time), owner=owner, error=_vanished(record), traceback=None)


def _ended(record: Record, state: RecordState, wall_time: float) -> Record:
    return replace(record, state=state, revision=record.revision + 1, heartbeat_at=wall_time, finished_at=wall_time)


def _last_error(previous: Record | None) -> str | None:
    if previous is not None and previous.state is RecordState.RUNNING:
        return _vanished(previous)
    return previous.error if previous else None


def _vanished(record: Record) -> str:
    return f"attempt {record.attempts} on {record.host}, process {record.pid}, sent no heartbeat for {record.lease_seconds:g} s"


def monotonic() -> float:
    """Returns seconds by a clock that is never set.

    It goes on while the machine sleeps, where the system has such a clock: so does a lease.
    """
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
