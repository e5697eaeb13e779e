"""The objects of a journal as bytes: entries and snapshots, each a header line and one line of JSON.

`counterpoint/cluster/master/journal.py` writes and reads them. The header has the length and a checksum of the second line, so
that an object that is torn or was edited is found, and never taken for the truth.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from counterpoint.cluster.errors import ClusterError
from counterpoint.sweep.store import LARGEST_OBJECT_BYTES
from counterpoint.transport.files.format_number import OtherFormatError, check_format

FORMAT = 1

MAX_ENTRY_BYTES = 256 * 2**10
"""The size of an entry's second line."""

MAX_SNAPSHOT_BYTES = LARGEST_OBJECT_BYTES - 1024
"""The size of a snapshot's second line."""

ENTRY, SNAPSHOT = "entry-", "snapshot-"


class JournalError(ClusterError):
    """A journal that cannot be read as written; the message names the object, what is wrong with it, and what to do."""


class EntryTooLarge(ClusterError):
    """An event does not fit into an entry, whatever else is in it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one append made durable."""

    number: int
    """1 for the first, and one more for each that follows."""
    epoch: int
    """The epoch of the master that appended it."""
    opening: bool
    """Whether it is the first of its master. These are never discarded: they keep earlier masters out."""
    events: Sequence[Mapping[str, Any]] = ()
    """The events, as `counterpoint/cluster/master/event_codec.py` writes them."""
    handles: Mapping[str, Any] = field(default_factory=dict)
    """The backend's handles that are new or changed; None for one that is gone."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fold of every entry up to one."""

    number: int
    """The number of the last entry that is in it."""
    epoch: int
    """The epoch of that entry."""
    state: Mapping[str, Any]
    """The state of the manager."""
    handles: Mapping[str, Any]
    openings: Sequence[int]
    """The numbers of all opening entries up to here."""


def entry_key(number: int) -> str:
    """Returns the name of the object of that number."""
    return f"{ENTRY}{number:012d}"


def snapshot_key(number: int) -> str:
    """Returns the name of the snapshot at that number."""
    return f"{SNAPSHOT}{number:012d}"


def number_of(key: str, prefix: str) -> int | None:
    """Returns the number in an object's name; None if it is not of that kind."""
    digits = key.removeprefix(prefix)
    return int(digits) if key.startswith(prefix) and digits.isdecimal() and digits.isascii() else None


def to_bytes(what: Entry | Snapshot) -> bytes:
    """Returns the object's bytes. Raises `EntryTooLarge`; `TypeError` for what JSON does not have."""
    body = orjson.dumps(asdict(what))
    limit = MAX_ENTRY_BYTES if isinstance(what, Entry) else MAX_SNAPSHOT_BYTES
    if len(body) > limit:
        kind = type(what).__name__.lower()
        raise EntryTooLarge(f"{kind} {what.number} has {len(body)} bytes; at most {limit} are journalled")
    header = orjson.dumps({"format": FORMAT, "bytes": len(body), "crc32": zlib.crc32(body)})
    return header + b"\n" + body + b"\n"


def entry_of_bytes(data: bytes, number: int, place: str) -> Entry:
    """Reads an entry. Raises `JournalError` naming the object."""
    key = entry_key(number)
    body = _checked_body(data, key, place)
    try:
        entry = Entry(**body)
        if not (isinstance(entry.epoch, int) and isinstance(entry.events, list) and isinstance(entry.handles, dict)):
            raise TypeError("a field has another type than it was written with")
    except TypeError as error:
        raise _damaged(key, place, str(error)) from None
    if entry.number != number:
        raise _damaged(key, place, f"it is entry {entry.number}")
    return entry


def snapshot_of_bytes(data: bytes, number: int, place: str) -> Snapshot:
    """Reads a snapshot. Raises `JournalError` naming the object."""
    key = snapshot_key(number)
    try:
        snapshot = Snapshot(**_checked_body(data, key, place))
        if not (isinstance(snapshot.epoch, int) and isinstance(snapshot.state, dict)):
            raise TypeError("a field has another type than it was written with")
    except TypeError as error:
        raise _damaged(key, place, str(error)) from None
    if snapshot.number != number:
        raise _damaged(key, place, f"it is that of entry {snapshot.number}")
    return snapshot


def _checked_body(data: bytes, key: str, place: str) -> dict[str, Any]:
    if len(data) > LARGEST_OBJECT_BYTES:
        raise _damaged(key, place, f"it has more than {LARGEST_OBJECT_BYTES} bytes")
    header_line, _, rest = data.partition(b"\n")
    body = rest.removesuffix(b"\n")
    try:
        header = orjson.loads(header_line)
        if not isinstance(header, dict):
            raise _damaged(key, place, f"its first line is no JSON object with format {FORMAT}")
        check_format(header.get("format"), FORMAT)
        if header.get("bytes") != len(body):
            raise _damaged(key, place, f"it is torn: it has {len(body)} bytes of {header.get('bytes')}")
        if header.get("crc32") != zlib.crc32(body):
            raise _damaged(key, place, "its bytes are not those that were written (checksum)")
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _damaged(key, place, f"it is no JSON: {error}") from None
    except OtherFormatError as error:
        raise JournalError(f"{place}: {key} of the journal cannot be read: {error}") from None
    except ValueError as error:
        raise _damaged(key, place, str(error)) from None
    if not isinstance(found, dict):
        raise _damaged(key, place, "it is no JSON object")
    return found


def _damaged(key: str, place: str, why: str) -> JournalError:
    return JournalError(
        f"{place}: {key} of the journal is damaged: {why}. The state of the job cannot be told from here on: restore the "
        "object from a copy, or start the job in another directory"
    )
