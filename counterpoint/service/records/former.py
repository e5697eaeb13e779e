"""The records of a former version, JSON files and a journal: read once, when the database is made, and removed.

`sessions/S.json`, `samplers/S.json`, `losses/L.json`, `models/RUN/model.json`, `models/RUN/KIND/NAME.json`, with
`.deleted-N.json` for deleted weights, and `ledger/`. The journals of models, `models/RUN/items/`, stay.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from counterpoint.service.records.ledger import LedgerLine, Sums
from counterpoint.service.records.structs import (
    LossRecord,
    ModelRecord,
    SamplerRecord,
    SavedRecord,
    SessionRecord,
    put,
)
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.journal import DamagedJournal, FileJournal
from counterpoint.transport.files.json_lines import read_lines
from counterpoint.transport.typed import met

Kind = TypeVar("Kind", SessionRecord, ModelRecord, SavedRecord, SamplerRecord, LossRecord, Sums, LedgerLine)


def import_former(directory: Path, connection: sqlite3.Connection) -> None:
    """Writes the records of a former version below `directory`, if there are any, to the new database.

    Raises `OSError`, and `UserError` for an unreadable record: nothing is taken over then.
    """
    for path in directory.glob("sessions/[!.]*.json"):
        put(connection, _decoded(path, path.read_bytes(), SessionRecord), heard=path.stat().st_mtime)
    for path in directory.glob("samplers/[!.]*.json"):
        put(connection, _decoded(path, path.read_bytes(), SamplerRecord))
    for path in directory.glob("losses/[!.]*.json"):
        put(connection, _decoded(path, path.read_bytes(), LossRecord))
    for path in directory.glob("models/*/model.json"):
        put(connection, _decoded(path, path.read_bytes(), ModelRecord), next_look=time.time())
    for path in directory.glob("models/*/*/*.json"):
        is_deleted = path.name.startswith(".deleted-")
        if is_deleted or not path.name.startswith("."):
            put(connection, _decoded(path, path.read_bytes(), SavedRecord), deleted=is_deleted)
    sums = _ledger(directory / "ledger")
    accounts = [(day, account) for day, accounts in sums.days.items() for account in accounts]
    sums.writing(accounts, sums.counted)(connection)


def remove_former(directory: Path) -> None:
    """Removes the records that were taken over. Raises `OSError`."""
    for path in (*directory.glob("models/*/model.json"), *directory.glob("models/*/*/*.json")):
        path.unlink()
    for name in ("sessions", "samplers", "losses", "ledger"):
        shutil.rmtree(directory / name, ignore_errors=True)


def _ledger(directory: Path) -> Sums:
    """Returns a ledger's sums. It is a journal that begins with a sum, or before that `N.json`, a sum, and `N.jsonl`."""
    path, sums = directory / "ledger.journal", Sums()
    if path.exists():
        try:
            total, *lines = FileJournal(path, 0).replay()
        except (DamagedJournal, ValueError) as error:
            raise UserError(str(error)) from error
        sums = _decoded(path, total, Sums)
    else:
        number = max((int(each.stem) for each in directory.glob("[0-9]*.json*")), default=0)
        path = directory / f"{number}.jsonl"
        if (total_path := path.with_suffix(".json")).exists():
            sums = _decoded(total_path, total_path.read_bytes(), Sums)
        lines = [memoryview(raw) for raw, _ in read_lines(path)]
    for line in lines:
        sums.add(_decoded(path, line, LedgerLine))
    return sums


def _decoded(path: Path, data: bytes | memoryview, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(data, type=met(kind))
    except (msgspec.MsgspecError, ValueError) as error:
        raise UserError(
            f"{path} is no record of the service: {error}; restore it from a copy, or move it away"
        ) from error
