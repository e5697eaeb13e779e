"""`state.json`: the state of a job, which its master writes before it does anything that follows from an event.

It is one JSON object: `format`, `crc32` of what is `saved`, and `saved`. Whoever shows a job reads it with `read_state`, without
a lock: it is replaced whole, so a reader finds what the master had decided at one moment.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import MAX_BYTES, STATE_FILE
from counterpoint.cluster.manager.state import JobState, Phase
from counterpoint.cluster.manager.state import WorkerRecord as WorkerRecord
from counterpoint.transport.files.format_number import OtherFormatError, check_format
from counterpoint.transport.files.untrusted import UntrustedFileError, parse_json, read_bytes
from counterpoint.transport.typed import typed

FORMAT = 1

MOST_CHANGES = 500
"""Changes that are kept, the newest."""

_DEATHS = frozenset({Phase.RESTARTING, Phase.HELD, Phase.FAILED})
"""Phases in which the last death is the reason."""


class StateError(ClusterError):
    """A state file that cannot be read as written; the message names the file, what is wrong with it, and what to do."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """A worker, or the job, went from one state to another."""

    time: float
    """The time when its master decided it, in seconds since 1970."""
    worker: str
    """Empty for the job as a whole."""
    before: str
    """Empty for a worker that is new."""
    after: str
    incarnation: int
    node: str
    cause: str
    """The event that led to it, in words."""
    reason: str
    """How the worker died, or why the job ends; empty for others."""


@dataclass(frozen=True, slots=True)
class MasterState:
    """All that a master has to know of the job, and what it tells of it."""

    epoch: int
    """The epoch of the master that wrote it."""
    number: int
    """How often the state was written."""
    at: float
    """The job's time, in seconds."""
    job: JobState
    """What the manager knows."""
    handles: Mapping[str, Any] = field(default_factory=dict)
    """What the backend needs to find its keepers again."""
    changes: Sequence[StateChange] = ()
    """The newest `MOST_CHANGES`, the newest last."""


@dataclass(slots=True)
class _File:
    format: object
    crc32: int
    saved: dict[str, Any]


@dataclass(slots=True)
class _Saved:
    epoch: int
    number: int
    at: float
    job: dict[str, Any]
    handles: dict[str, Any]
    changes: tuple[StateChange, ...]


def to_bytes(saved: MasterState) -> bytes:
    """Returns the file's content. Raises `TypeError` for what JSON does not have."""
    body = orjson.dumps(saved)
    return b'{"format":%d,"crc32":%d,"saved":%b}\n' % (FORMAT, zlib.crc32(body), body)


def of_bytes(data: bytes, place: str) -> MasterState:
    """Reads what `to_bytes` returned. Raises `StateError` naming the `place`, the file, for anything else."""
    try:
        found = parse_json(data)
        check_format(found.get("format"), FORMAT)
        file = typed(found, _File, "it", ValueError)
        if zlib.crc32(orjson.dumps(file.saved)) != file.crc32:
            raise ValueError("its values are not those that were written (checksum)")
        saved = typed(file.saved, _Saved, "it", ValueError)
        job = JobState.from_dict(saved.job)
    except OtherFormatError as error:
        raise StateError(f"{place} cannot be read: {error}") from None
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{place} cannot be read: {error}. Restore it from a copy, or start the job in another directory"
        ) from None
    return MasterState(saved.epoch, saved.number, saved.at, job, saved.handles, saved.changes)


def read_state(directory: Path) -> MasterState:
    """Returns the state that the job in a directory has there.

    Raises `StateError`, and `OSError` (`FileNotFoundError` if it has none there).
    """
    path = directory / STATE_FILE
    try:
        return of_bytes(read_bytes(path, MAX_BYTES), str(path))
    except UntrustedFileError as error:
        raise StateError(f"{path} cannot be read: {error}") from None


class ChangeLog:
    """Notes what changes in a job's state, for people."""

    def __init__(self, job: JobState, earlier: Sequence[StateChange] = ()) -> None:
        self._job = job
        self._changes = deque(earlier, maxlen=MOST_CHANGES)
        self._stage = str(job.stage)
        self._looks = {one.name: (str(one.phase), one.incarnation) for one in job.workers.values()}

    @property
    def changes(self) -> tuple[StateChange, ...]:
        """The newest changes."""
        return tuple(self._changes)

    def note(self, workers: Iterable[str], cause: str, reason: str, time: float) -> None:
        """Compares these workers, and the job, with what they were: `cause` has led to the difference."""
        if (stage := str(self._job.stage)) != self._stage:
            self._changes.append(StateChange(time, "", self._stage, stage, 0, "", cause, reason))
            self._stage = stage
        for name in workers:
            record = self._job.workers[name]
            now, was = (str(record.phase), record.incarnation), self._looks.get(name, ("", 0))
            if now != was:
                self._looks[name] = now
                why = reason or (record.last_death if record.phase in _DEATHS else "")
                self._changes.append(StateChange(time, name, was[0], *now, record.node, cause, why))
