"""The record of one target: its owner, its times, its result. One small JSON object, which is both lease and status.

Every change is one compare-and-swap of the whole record (`counterpoint/sweep/store.py`), so a status can never disagree with the
lock. The allowed changes are in `counterpoint/sweep/lease.py`. Wall-clock times are for people: they decide only how soon a
failed target may be tried again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

FORMAT = 1
LARGEST_BYTES = 65_536
"""Nothing larger is read as a record."""

LARGEST_ID_BYTES = 200
"""A file's name may have 255, and a partial file's has 34 more than the id."""
RECORD_SUFFIX = ".json"

_COUNTS = ("token", "attempts", "revision", "pid")
_SECONDS = ("lease_seconds", "started_at", "heartbeat_at", "finished_at")
_TEXTS = ("owner", "host", "error", "traceback", "config", "field_names")
_OPTIONAL = ("finished_at", "error", "traceback", "config", "field_names")
_LATER = ("config", "field_names")
"""What the records of earlier releases lack."""


class RecordState(StrEnum):
    """The state in which the last writer left a record."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    INTERRUPTED = "INTERRUPTED"
    """Given back before its body ended: any worker may take it."""


STATUS_SUCCESS = RecordState.SUCCESS
STATUS_FAILED = RecordState.FAILED


class RecordError(ValueError):
    """Bytes that are no record of this format. Nothing is done with their target until a person has checked it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One target as stored.

    `revision` rises with every write and `owner` differs with every claim, so no two writes are alike.
    """

    target_id: str
    state: RecordState
    owner: str
    """A uuid made for this one claim; never a host, process or thread, whose names are used again."""
    token: int
    """The fencing token: 1 for the first claim, and one more for each that follows."""
    attempts: int
    """Claims, without those that were given back."""
    revision: int
    lease_seconds: float
    """How long an observer must have seen this record unchanged before it may take a RUNNING target."""
    host: str
    pid: int
    started_at: float
    """Seconds since the epoch by the owner's clock, like the next two."""
    heartbeat_at: float
    finished_at: float | None = None
    error: str | None = None
    """The error of the last attempt that did not succeed, also while the next one runs."""
    traceback: str | None = None
    config: str | None = None
    """A digest of the target's configuration; None where it has none that is JSON."""
    field_names: str | None = None
    """The fields that its dataclasses had (`counterpoint/sweep/identity.py`)."""

    def to_bytes(self) -> bytes:
        """Returns UTF-8 JSON with a line a field, readable with `cat`."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def of_bytes(cls, data: bytes, target_id: str, root: str = "") -> Record:
        """Reads what `to_bytes` wrote, for this target.

        Raises `RecordError` naming root, target and error.
        """
        try:
            if len(data) > LARGEST_BYTES:
                raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
            record = cls._of_json(json.loads(data))
            if record.target_id != target_id:
                raise ValueError(f"it is that of {record.target_id}")
            return record
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            place = f"{root}: {target_id}" if root else target_id
            raise RecordError(
                f"{place} is not a sweep's record of format {FORMAT}: {error}; move it away to run its target afresh"
            ) from error

    @classmethod
    def _of_json(cls, found: Any) -> Record:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"no object with format {FORMAT}")
        names = [field.name for field in fields(cls)]
        given: dict[str, Any] = {name: found.get(name) if name in _LATER else found[name] for name in names}
        for name, value in given.items():
            if value is None and name in _OPTIONAL:
                continue
            if name in _COUNTS and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} is {value!r}, not a whole number of at least 0")
            if name in _SECONDS and (not isinstance(value, int | float) or not 0 <= value < float("inf")):
                raise ValueError(f"{name} is {value!r}, not a number of at least 0")
            if name in _TEXTS and not isinstance(value, str):
                raise ValueError(f"{name} is {value!r}, not a text")
        return cls(**{**given, "state": RecordState(given["state"]), "target_id": checked_id(given["target_id"])})


def checked_id(target_id: str) -> str:
    """Returns the id. Raises `ValueError` when it is not safe as the name of a file and of a directory beside the records."""
    if not isinstance(target_id, str) or (reason := _why_unsafe(target_id)) is not None:
        why = reason if isinstance(target_id, str) else "it is no text"
        raise ValueError(
            f"{target_id!r} is not an id: {why}; expected a name for a file, of at most {LARGEST_ID_BYTES} bytes"
        )
    return target_id


def _why_unsafe(target_id: str) -> str | None:
    if not target_id:
        return "it is empty"
    if target_id.startswith("."):
        return "it begins with '.', as the files of the sweep itself"
    if target_id.endswith(RECORD_SUFFIX):
        return (
            f"it ends with {RECORD_SUFFIX!r}, as the records, beside which each target has a directory of its own name"
        )
    if "/" in target_id or "\\" in target_id:
        return "it has a separator of paths"
    if not target_id.isprintable():
        return "it has a character that cannot be printed"
    if target_id != target_id.strip():
        return "it begins or ends with a space"
    if len(target_id.encode()) > LARGEST_ID_BYTES:
        return f"it has {len(target_id.encode())} bytes"
    return None
