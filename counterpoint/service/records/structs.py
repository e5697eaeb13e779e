"""The records of the service: sessions, models, saved weights, samplers and losses, as structs and as rows of its database.

The name of a field is that of its column. `session_id` and `bytes` are columns of every table.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from counterpoint.run.trained import StartFrom
from counterpoint.transport.config import IDENTIFIER_PATTERN

MAX_RECORD_BYTES = 2**20

Position = Annotated[int, Meta(ge=0, lt=2**31)]
"""A client's number that is a part of an id. More digits would make an id too long for the name of a file."""

Number = Annotated[int, Meta(ge=1, lt=2**31)]
"""A client's number for a request of a model."""


class SessionRecord(msgspec.Struct, frozen=True):
    """A client, from its start to its end."""

    session_id: str
    owner: str
    """The digest of its key, or empty without keys."""
    finished: bool = False
    ending: dict[str, Any] | None = None
    """The reason and the remark with which its client finished it."""
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    created: float = 0.0
    """When it began, in seconds since 1970."""
    project: str = ""
    """The project in which the ledger counts it, beside its owner, or empty for none."""


class ModelRecord(msgspec.Struct, frozen=True):
    """A model that a client trains: one driven run, with the id `run_of` the model's unless it was loaded into."""

    model_id: str
    run_id: str
    owner: str
    rank: int
    target_modules: list[str]
    start_run: str = ""
    """The run of the saved state that it began with, or empty for none."""
    start_step: int = 0
    start_optimizer: bool = True
    user_metadata: dict[str, Any] | None = None
    created_by: str = "create_model"
    """The request that made it."""
    created: float = 0.0
    """When it was asked for, in seconds since 1970."""
    seed: int | None = None
    """That of its adapter, or None for the job's."""
    start_adapter: str = ""
    """The directory of the adapter in PEFT's format that it began with, or empty for none."""
    alpha: float = 32.0
    """The scale of its adapter. Clients give a rank alone. An adapter that was trained elsewhere has another scale."""

    @property
    def start(self) -> StartFrom | None:
        """The saved state that it began with."""
        if not self.start_run:
            return None
        return StartFrom(run=self.start_run, step=self.start_step, optimizer=self.start_optimizer)


class SavedRecord(msgspec.Struct, frozen=True):
    """Weights of a model under a name."""

    model_id: str
    kind: str
    """`weights`, `sampler_weights` or `external_weights`, which clients name and list, or `snapshot`, of one sampler alone, or
    `inflight`, the newest weights of a model for samplers that follow it."""
    name: str
    number: int
    """The item that made it."""
    step: int
    directory: str = ""
    """Directory of published weights, or empty for a saved state."""
    user_metadata: dict[str, Any] | None = None
    created: float = 0.0
    """When it was saved, in seconds since 1970."""
    expires: float | None = None
    """When it is deleted, in seconds since 1970, or None for never."""
    size: int | None = None
    """Bytes on the disk."""
    recipients: list[str] = []
    """The public keys for the encryption of external weights, or empty for none."""

    @property
    def path(self) -> str:
        """The URI by which clients name it."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def has_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and self.expires <= time.time()


class SamplerRecord(msgspec.Struct, frozen=True):
    """A sampler of a client."""

    sampler_id: str
    owner: str
    adapter: str = ""
    """The name of the adapter at the servers, or empty for the base model."""
    directory: str = ""
    path: str = ""
    """The URI of its weights, if they have one."""
    model_id: str = ""
    """The model that its adapter is of."""
    step: int = 0
    """The update of the model that made the adapter, or 0 for none."""
    follows: str = ""
    """The model whose newest weights for such samplers it uses, or empty for fixed weights."""
    clones: int = 0
    """Further clients that have joined it."""


class LossRecord(msgspec.Struct, frozen=True):
    """A loss that a client has traced, for clients of its session."""

    loss_id: str
    graph: msgspec.Raw
    """Inputs and graph, in the JSON that `counterpoint/run/loss_graph.py` reads."""


Record = SessionRecord | ModelRecord | SavedRecord | SamplerRecord | LossRecord

Kind = TypeVar("Kind", SessionRecord, ModelRecord, SavedRecord, SamplerRecord, LossRecord)

Noted = TypeVar("Noted", SessionRecord, ModelRecord, SavedRecord)
"""The records to which clients add `user_metadata`, up to a megabyte. Lists lack it."""

TABLES: dict[type[Record], str] = {
    SessionRecord: "sessions",
    ModelRecord: "models",
    SavedRecord: "saved",
    SamplerRecord: "samplers",
    LossRecord: "losses",
}

_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("ending", "user_metadata", "target_modules", "recipients"), msgspec.json.decode),
    **dict.fromkeys(("finished", "start_optimizer"), bool),
    "graph": msgspec.Raw,
}
"""Readers of columns with another type than their field."""


def columns_of(kind: type[Record], *, noted: bool) -> str:
    """Returns the columns of a query for records, with or without `user_metadata`."""
    return ", ".join(each for each in kind.__struct_fields__ if noted or each != "user_metadata")


def record_of(kind: type[Kind], row: sqlite3.Row) -> Kind:
    """Returns the record of a row."""
    values = dict(zip(row.keys(), row, strict=True))
    return kind(
        **{name: _READ[name](each) if name in _READ and each is not None else each for name, each in values.items()}
    )


def put(connection: sqlite3.Connection, record: Record, **further: object) -> None:
    """Writes a record in place of one of its name. `further` are columns that are no fields.

    Raises `ValueError` for a too long record.
    """
    row: dict[str, object] = {
        "bytes": len(encoded(record)),
        "session_id": msgspec.structs.astuple(record)[0].partition(":")[0],
    }
    for name in record.__struct_fields__:
        value = getattr(record, name)
        row[name] = (
            text_of(value)
            if isinstance(value, dict | list)
            else bytes(value)
            if isinstance(value, msgspec.Raw)
            else value
        )
    row |= further
    query = f"INSERT OR REPLACE INTO {TABLES[type(record)]} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
    connection.execute(query, tuple(row.values()))


def text_of(value: object) -> str:
    """Returns a value as the JSON text of a column."""
    return msgspec.json.encode(value).decode()


def encoded(record: msgspec.Struct) -> bytes:
    """Returns a record as JSON. Raises `ValueError` for a too long one."""
    data = msgspec.json.encode(record)
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(data)} bytes are to be kept; at most {MAX_RECORD_BYTES}: give less user_metadata")
    return data


def without_notes(record: Noted) -> Noted:
    """Returns a record without its `user_metadata`."""
    return record if record.user_metadata is None else msgspec.structs.replace(record, user_metadata=None)


def run_of(model_id: str) -> str:
    """Returns the id of a model's run, a name of directories. For an unknown id, it is one that no directory has."""
    name = model_id.replace(":", "_")
    return name if re.fullmatch(IDENTIFIER_PATTERN, name) else ".none"
