"""The service's records of sessions, models, saved weights, samplers and losses: in its database before clients hear of them.

Everything blocks: call it in a thread.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.service.records.database import Database
from counterpoint.service.records.former import import_former, remove_former
from counterpoint.service.records.ledger import Ledger
from counterpoint.service.records.structs import (
    TABLES,
    Kind,
    LossRecord,
    ModelRecord,
    Noted,
    Record,
    SamplerRecord,
    SavedRecord,
    SessionRecord,
    columns_of,
    put,
    record_of,
    text_of,
)
from counterpoint.transport.files.atomic import write_atomically

LISTED_BYTES = 8 * 2**20
"""The bytes of one list's records that are read for clients' notes. Those after them are listed without notes."""

OF_A_SESSION = ("snapshot", "inflight")
"""The kinds of weights that belong to samplers of a session."""

GOES_ON = "session_id IN (SELECT session_id FROM sessions WHERE NOT finished)"
"""Whether the session of a row goes on."""

SAME = "model_id = ? AND kind = ? AND number = ? AND name = ?"
"""Whether a row is of the weights that an item has saved, by `_same`."""


class RecordStore:
    """The records of one service."""

    def __init__(self, directory: Path) -> None:
        """Keeps them below `directory`, and takes over files of a former version. Raises `OSError` and `UserError`."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.database = Database(directory / "records.db", lambda connection: import_former(directory, connection))
        if self.database.is_new:
            remove_former(directory)
        self.ledger = Ledger(self.database)
        for session in self.all(SessionRecord, "NOT finished AND project != ''"):
            self.ledger.assign(session.session_id, session.project)

    def run_directory(self, run_id: str) -> Path:
        """Returns the directory of a run."""
        return self.directory / "models" / run_id

    def secret(self, name: str) -> str:
        """Returns a secret of the service, the same after every start. Raises `OSError`."""
        path = self.directory / name
        if not path.exists():
            write_atomically(path, secrets.token_hex(16).encode(), mode=0o600)
        return path.read_text().strip()

    def write(self, record: Record) -> None:
        """Writes a record, durably. Raises `OSError`, and `ValueError` for a too long one."""
        further = {"heard": time.time()} if isinstance(record, SessionRecord) else {}
        self.database.write(lambda connection: put(connection, record, **further))

    # --- sessions ---

    def session(self, session_id: str) -> SessionRecord | None:
        """Returns a session, without its `user_metadata`, or None if there is none."""
        return self._one(SessionRecord, "session_id = ?", session_id)

    def sessions(self, owner: str | None = None) -> list[SessionRecord]:
        """Returns the sessions of an owner, or of all, without their `user_metadata`."""
        return self.all(SessionRecord, *_where(owner=owner))

    def change_session(self, session: SessionRecord) -> None:
        """Writes a changed session, and leaves its `user_metadata`. Raises `OSError`."""
        statement = "UPDATE sessions SET finished = ?, ending = ?, project = ? WHERE session_id = ?"
        ending = None if session.ending is None else text_of(session.ending)
        self.change(statement, session.finished, ending, session.project, session.session_id)

    def touch(self, session_ids: Iterable[str]) -> None:
        """Notes a sign of life of sessions."""
        heard, change = (
            [(time.time(), each) for each in session_ids],
            "UPDATE sessions SET heard = ? WHERE session_id = ?",
        )
        if heard:
            self.database.write(lambda connection: connection.executemany(change, heard), durable=False)

    def silent_sessions(self, before: float) -> list[SessionRecord]:
        """Returns the sessions that go on and have been silent since a time, in seconds since 1970."""
        return self.all(SessionRecord, "NOT finished AND heard < ?", before)

    # --- models ---

    def model(self, model_id: str) -> ModelRecord | None:
        """Returns a model, or None if there is none."""
        return self._one(ModelRecord, "model_id = ?", model_id, noted=True)

    def models(self, owner: str | None = None, session_id: str | None = None) -> list[ModelRecord]:
        """Returns the models of an owner, or of all, and of one session, or of all, without their `user_metadata`."""
        return self.all(ModelRecord, *_where(owner=owner, session_id=session_id))

    def open_models(self) -> list[ModelRecord]:
        """Returns the models of sessions that go on."""
        return self.all(ModelRecord, GOES_ON, noted=True)

    # --- saved weights ---

    def saved(self, path: str) -> SavedRecord | None:
        """Returns the record of a URI, without its `user_metadata`, or None if there is none, or its time is over."""
        found = re.fullmatch(r"tinker://([^/]+)/(weights|sampler_weights|external_weights|inflight)/([^/]+)", path)
        if found is None:
            return None
        record = self._one(SavedRecord, "model_id = ? AND kind = ? AND name = ? AND NOT deleted", *found.groups())
        return None if record is None or record.has_expired else record

    def all_saved(self, model_id: str) -> list[SavedRecord]:
        """Returns the weights of a model that clients name, also expired ones, without their `user_metadata`."""
        return self.all(SavedRecord, "model_id = ? AND NOT deleted AND kind NOT IN (?, ?)", model_id, *OF_A_SESSION)

    def saved_of(self, owner: str, session_id: str | None = None) -> list[SavedRecord]:
        """Returns the same for an owner, or for one of its sessions."""
        where, *values = _where(owner=owner, session_id=session_id)
        query = f"model_id IN (SELECT model_id FROM models WHERE {where}) AND NOT deleted AND kind NOT IN (?, ?)"
        return self.all(SavedRecord, query, *values, *OF_A_SESSION)

    def deleted(self, model_id: str | None = None) -> list[SavedRecord]:
        """Returns the deleted weights of a model, or of all."""
        return self.all(SavedRecord, *_where("deleted", model_id=model_id))

    def knows(self, record: SavedRecord) -> bool:
        """Whether an item's saved weights have a record under their name, or were deleted since."""
        return bool(self.database.rows(f"SELECT 1 FROM saved WHERE {SAME}", *_same(record)))

    def keep(self, record: SavedRecord, *, overwrite: bool, sampler: SamplerRecord | None = None) -> bool:
        """Writes a record, and its sampler. Returns False if a later one has its name.

        That is the case if a model is opened again and asks for its former saves. Raises `FileExistsError` if another record
        has the name.
        """

        def change(connection: sqlite3.Connection) -> bool:
            if sampler is not None:
                put(connection, sampler)
            if connection.execute(f"SELECT 1 FROM saved WHERE {SAME}", _same(record)).fetchone():
                return True
            name = (record.model_id, record.kind, record.name)
            where = "model_id = ? AND kind = ? AND name = ? AND NOT deleted"
            former = connection.execute(f"SELECT number, expires FROM saved WHERE {where}", name).fetchone()
            if former is not None and former["number"] > record.number and overwrite:
                return False
            has_expired = former is not None and former["expires"] is not None and former["expires"] <= time.time()
            if former is not None and not (overwrite or has_expired):
                raise FileExistsError(f"{record.path} is there already; overwrite it, or take another name")
            connection.execute(f"UPDATE saved SET deleted = 1 WHERE {where}", name)
            put(connection, record)
            return True

        return self.database.write(change)

    def set_expiry(self, record: SavedRecord, expires: float | None) -> bool:
        """Sets when weights expire. Returns False if they are gone."""
        return self.change("UPDATE saved SET expires = ? WHERE NOT deleted AND " + SAME, expires, *_same(record))

    def delete(self, record: SavedRecord) -> None:
        """Takes the name from weights. They stay on the disk until `retention.sweep`."""
        self.change("UPDATE saved SET deleted = 1 WHERE " + SAME, *_same(record))

    def note_gone(self, record: SavedRecord) -> None:
        """Notes that the bytes of deleted weights are gone from the disk."""
        self.change(f"UPDATE saved SET size = 0 WHERE deleted AND {SAME}", *_same(record))

    def forget(self, record: SavedRecord) -> None:
        """Forgets that weights were deleted, once their item can never come again."""
        self.change("DELETE FROM saved WHERE deleted AND " + SAME, *_same(record))

    # --- samplers and losses ---

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        """Returns a sampler, or None if there is none."""
        return self._one(SamplerRecord, "sampler_id = ?", sampler_id)

    def samplers(self, session_id: str) -> list[SamplerRecord]:
        """Returns the samplers of a session."""
        return self.all(SamplerRecord, "session_id = ? ORDER BY sampler_id", session_id)

    def loss(self, loss_id: str) -> LossRecord | None:
        """Returns a loss, or None if there is none."""
        return self._one(LossRecord, "loss_id = ?", loss_id)

    # --- all of them ---

    def noted(self, records: Iterable[Noted]) -> list[Noted]:
        """Returns records of lists, which lack `user_metadata`, with these notes of clients."""
        found, left = list[Noted](), LISTED_BYTES
        for record in records:
            where, values = f"{record.__struct_fields__[0]} = ?", msgspec.structs.astuple(record)[:1]
            if isinstance(record, SavedRecord):
                where, values = f"NOT deleted AND {SAME}", _same(record)
            query = f"SELECT bytes, user_metadata FROM {TABLES[type(record)]} WHERE {where} AND bytes <= ?"
            size, text = next(iter(self.database.rows(query, *values, left)), (0, None))
            left -= size
            notes = None if text is None else msgspec.json.decode(text)
            found.append(msgspec.structs.replace(record, user_metadata=notes))
        return found

    def bytes_held(self) -> Counter[str]:
        """Returns the bytes of records and saved weights by owner, also of deleted weights that are still needed."""
        records = " UNION ALL ".join(f"SELECT session_id, bytes FROM {table}" for table in TABLES.values())
        places = (
            "SELECT session_id, MAX(size) AS bytes FROM saved WHERE size > 0 "
            "GROUP BY model_id, CASE directory WHEN '' THEN step ELSE directory END"
        )
        query = f"SELECT owner, SUM(b.bytes) FROM ({records} UNION ALL SELECT * FROM ({places})) b "
        rows = self.database.rows(f"{query} JOIN sessions USING (session_id) GROUP BY owner")
        return Counter(dict(map(tuple, rows)))

    def largest_saves(self) -> list[tuple[ModelRecord, bool, int]]:
        """Returns the largest save of each kind of model: its model, whether it is a state, and its bytes."""
        kind = "rank, target_modules, directory = ''"
        query = (
            f"SELECT model_id, {kind}, MAX(size) FROM saved JOIN models USING (model_id) WHERE size > 0 GROUP BY {kind}"
        )
        found = [
            (self.model(model_id), bool(is_state), size) for model_id, _, _, is_state, size in self.database.rows(query)
        ]
        return [(model, is_state, size) for model, is_state, size in found if model is not None]

    def _one(self, kind: type[Kind], where: str, *values: object, noted: bool = False) -> Kind | None:
        found = self.all(kind, where, *values, noted=noted)
        return found[0] if found else None

    def all(self, kind: type[Kind], where: str, *values: object, noted: bool = False) -> list[Kind]:
        """Returns the records for which a condition of SQL holds, with `noted` including clients' notes."""
        query = f"SELECT {columns_of(kind, noted=noted)} FROM {TABLES[kind]} WHERE {where}"
        return [record_of(kind, row) for row in self.database.rows(query, *values)]

    def change(self, statement: str, *values: object) -> bool:
        """Carries out a statement of SQL, durably, and returns whether it changed a row. Raises `OSError`."""
        return self.database.write(lambda connection: connection.execute(statement, values).rowcount > 0)


def _same(record: SavedRecord) -> tuple[str, str, int, str]:
    return record.model_id, record.kind, record.number, record.name


def _where(*terms: str, **equal: object) -> tuple[Any, ...]:
    """Returns a condition that columns have these values, but for None, and its values."""
    given = {name: value for name, value in equal.items() if value is not None}
    return " AND ".join([*terms, *(f"{name} = ?" for name in given)]) or "1", *given.values()
