"""The audit log: who asked for which change, when, and what came of it. `audit.jsonl` in the state directory, one object a line.

A change begins only once its line is on the disk. So a full disk refuses changes, and a change without a second line is one
whose end was not seen: the process was killed, or the disk was full by then. The log is bounded: it has `MOST_BYTES`, and
`FORMER` files of that size before it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from counterpoint.serve.errors import StorageFull
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.files.json_lines import append_bytes
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.printable import printable

logger = logging.getLogger(__name__)

FILE = "audit.jsonl"

MOST_BYTES = 4 * 2**20
FORMER = 3
"""`audit.jsonl.1` is the newest of these."""

LONGEST_TEXT = 200
"""Longer values are recorded as their size and digest: a run's file may hold what is not for everyone who reads the log."""

LOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ApiCaller:
    """The person who asks."""

    address: str
    """The network address; behind a proxy it is the proxy's."""


class AuditLog:
    """Appends to the log of one state directory. Safe in several threads, and in several processes. Blocks on the disk."""

    def __init__(self, directory: Path, most_bytes: int = MOST_BYTES) -> None:
        """`directory` is made at the first line, its parent never: that would be a job's, which has gone."""
        self.path = directory / FILE
        self._most_bytes = most_bytes

    def begin(self, caller: ApiCaller, operation: str, parameters: Mapping[str, Any]) -> str:
        """Records that a change begins, durably. Returns its number. Raises `StorageFull` if that cannot be."""
        number = secrets.token_hex(8)
        line = {"change": number, "event": "begin", "client": caller.address, "operation": operation}
        try:
            self._append(line | {"parameters": {key: _shortened(value) for key, value in parameters.items()}})
        except OSError as error:
            raise StorageFull(f"the audit log cannot be written: {error}") from None
        return number

    def end(self, number: str, status: int, what: str) -> None:
        """Records what came of a change. It is carried out by now, so a failure is logged and nothing else."""
        try:
            self._append({"change": number, "event": "end", "status": status, "what": printable(what)[:LONGEST_TEXT]})
        except OSError as error:
            logger.warning("the audit log cannot be written: %s; change %s ended with %d", error, number, status)

    def _append(self, line: Mapping[str, Any]) -> None:
        """Raises `OSError`: then the log is as it was."""
        data = dumps({"time": time.time(), **line}, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = self._lock()
        try:
            self._make_room(len(data))
            append_bytes(self.path, data, durable=True, mode=0o600, flags=os.O_NOFOLLOW)
        finally:
            os.close(lock)

    def _lock(self) -> int:
        path = self.path.with_name("audit.lock")
        return take_lock(path, f"another process has held {path} for {LOCK_SECONDS:g} s", LOCK_SECONDS)

    def _make_room(self, size: int) -> None:
        try:
            if self.path.lstat().st_size + size <= self._most_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(FORMER, 0, -1):
            earlier = self._former(number - 1) if number > 1 else self.path
            if earlier.exists():
                earlier.replace(self._former(number))

    def _former(self, number: int) -> Path:
        return self.path.with_name(f"{FILE}.{number}")


def _shortened(value: Any) -> Any:
    text = value if isinstance(value, str) else dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    if len(text) <= LONGEST_TEXT:
        return printable(value) if isinstance(value, str) else value
    return {"characters": len(text), "sha256": hashlib.sha256(text.encode(errors="replace")).hexdigest()}
