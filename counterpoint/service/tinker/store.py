"""What the service knows of sessions, models, saved weights and samplers: small JSON files, each written before it is told.

Names of clients are never names of files, but for what `IDENTIFIER_PATTERN` allows. Everything blocks: call it in a thread.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from counterpoint.run.trained import StartFrom
from counterpoint.service.ledger import Ledger
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.atomic import write_atomically

MAX_RECORD_BYTES = 2**20

LISTED_BYTES = 8 * 2**20
"""The bytes of the records of one list that are read for what clients noted there; those after them are listed without it."""

Position = Annotated[int, Meta(ge=0, lt=2**31)]
"""A number that a client gives and that is a part of an id. More digits would make an id too long for the name of a file."""

Number = Annotated[int, Meta(ge=1, lt=2**31)]
"""A number that a client gives to a request of a model."""


class Session(msgspec.Struct, frozen=True):
    """A client, from its start to its end."""

    session_id: str
    owner: str
    """The digest of its key; empty where there are no keys."""
    finished: bool = False
    ending: dict[str, Any] | None = None
    """The reason and the remark with which its client finished it."""
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    created: float = 0.0
    """When it began, in seconds since 1970."""
    project: str = ""
    """What the ledger counts it in, beside its owner; empty: nothing."""


class ModelRecord(msgspec.Struct, frozen=True):
    """A model that a client trains: one driven run, whose id is `run_of` the model's unless it was loaded into."""

    model_id: str
    run_id: str
    owner: str
    rank: int
    target_modules: list[str]
    start_run: str = ""
    """The run whose saved state it began with; empty: none."""
    start_step: int = 0
    start_optimizer: bool = True
    user_metadata: dict[str, Any] | None = None
    created_by: str = "create_model"
    """The request that made it."""
    created: float = 0.0
    """When it was asked for, in seconds since 1970."""
    seed: int | None = None
    """That of its adapter; None: the job's."""
    start_adapter: str = ""
    """The directory of the adapter in PEFT's format that it began with; empty: none."""
    alpha: float = 32.0
    """The scale of its adapter. Clients give a rank alone; one that was trained elsewhere brings its own."""

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
    """`weights`, `sampler_weights` or `external_weights`, which clients name and list; `snapshot`, of one sampler alone;
    `inflight`, the newest weights of a model's samplers that follow it."""
    name: str
    number: int
    """The item that made it."""
    step: int
    directory: str = ""
    """Where published weights are; empty for a saved state."""
    user_metadata: dict[str, Any] | None = None
    created: float = 0.0
    """When it was saved, in seconds since 1970."""
    expires: float | None = None
    """When it is deleted, in seconds since 1970; None: never."""
    size: int | None = None
    """Bytes on the disk."""
    recipients: list[str] = []
    """To whom external weights are encrypted; none: they are not."""

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
    """The name of the adapter at the servers; empty: the base model."""
    directory: str = ""
    path: str = ""
    """The URI of its weights, if they have one."""
    model_id: str = ""
    """The model whose adapter it is."""
    step: int = 0
    """The update of the model that made the adapter; 0: none did."""
    follows: str = ""
    """The model whose newest weights for such samplers it uses; empty: its own are fixed."""
    clones: int = 0
    """Further clients that have joined it."""


class LossRecord(msgspec.Struct, frozen=True):
    """A loss that a client has traced; clients of its session use it."""

    loss_id: str
    graph: msgspec.Raw
    """Inputs and graph, in the JSON that `counterpoint/run/loss_graph.py` reads."""


Record = TypeVar("Record", bound=msgspec.Struct)

Noted = TypeVar("Noted", Session, ModelRecord, SavedRecord)
"""The records to which clients add `user_metadata`, up to a megabyte: lists are made without it."""


class Store:
    """The records of one service."""

    def __init__(self, directory: Path) -> None:
        """Keeps them below `directory`. Raises `OSError`, and `UserError` for a damaged ledger."""
        self.directory = directory
        self.ledger = Ledger(directory / "ledger")
        self._finished: set[str] = set()
        """The files of sessions that have ended: they are not read again."""
        self._slim: dict[Path, tuple[int, Any]] = {}
        """Records without `user_metadata`, with the numbers of their files: they are not read for each list."""
        self._written = 0
        """Records that were written since the start."""
        self._saving = threading.Lock()
        """Held while a name of saved weights changes its meaning."""
        for name in ("sessions", "models", "samplers", "losses"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def run_directory(self, run_id: str) -> Path:
        """Returns the directory of what belongs to a run."""
        return self.directory / "models" / run_id

    def secret(self, name: str) -> str:
        """Returns a secret of the service's own, which is the same however often it is started. Raises `OSError`."""
        path = self.directory / name
        if not path.exists():
            write_atomically(path, secrets.token_hex(16).encode(), mode=0o600)
        return path.read_text().strip()

    def write(self, record: Session | ModelRecord | SavedRecord | SamplerRecord | LossRecord) -> None:
        """Writes a record, durably. Raises `OSError`, and `ValueError` for one that would not be read again."""
        path, data = self._path_of(record), encoded(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        self._forget_slim(path)

    def _path_of(self, record: Session | ModelRecord | SavedRecord | SamplerRecord | LossRecord) -> Path:
        match record:
            case Session():
                return self.directory / "sessions" / f"{record.session_id}.json"
            case ModelRecord():
                return self.run_directory(run_of(record.model_id)) / "model.json"
            case SavedRecord():
                return self.run_directory(run_of(record.model_id)) / record.kind / f"{record.name}.json"
            case SamplerRecord():
                return self.directory / "samplers" / f"{file_name(record.sampler_id)}.json"
            case LossRecord():
                return self.directory / "losses" / f"{file_name(record.loss_id)}.json"

    def session(self, session_id: str) -> Session | None:
        """Returns a session, without its `user_metadata`; None if there is none."""
        found = self._listed(self.directory / "sessions" / f"{file_name(session_id)}.json", Session)
        if found is not None and found.project and not found.finished:
            self.ledger.assign(session_id, found.project)
        return found

    def models(self, owner: str | None = None, session_id: str = "*") -> list[ModelRecord]:
        """Returns the models of an owner, or of all; of one session, or of all; as `noted` says."""
        return self._all(f"models/{session_id}_train_*/model.json", ModelRecord, owner)

    def model(self, model_id: str) -> ModelRecord | None:
        """Returns a model; None if there is none."""
        found = self._read(self.run_directory(run_of(model_id)) / "model.json", ModelRecord)
        return found if found is not None and found.model_id == model_id else None

    def sessions(self, owner: str | None = None) -> list[Session]:
        """Returns the sessions of an owner, or of all, as `noted` says."""
        return self._all("sessions/*.json", Session, owner)

    def touch(self, session_id: str) -> None:
        """Notes that a session was heard of."""
        with suppress(FileNotFoundError):
            os.utime(self.directory / "sessions" / f"{file_name(session_id)}.json")

    def silent_sessions(self, before: float) -> list[Session]:
        """Returns the sessions that go on and were not heard of since a time, in seconds since 1970."""
        paths = [path for path in self.directory.glob("sessions/[!.]*.json") if path.name not in self._finished]
        found = [each for path in paths if path.stat().st_mtime < before and (each := self._listed(path, Session))]
        self._finished |= {f"{each.session_id}.json" for each in found if each.finished}
        return [each for each in found if not each.finished]

    def of_sessions(self) -> dict[str, list[Path]]:
        """Returns the records of samplers and losses by the session that they end with."""
        found: dict[str, list[Path]] = {}
        for path in (*self.directory.glob("samplers/[!.]*.json"), *self.directory.glob("losses/[!.]*.json")):
            found.setdefault(path.name.partition("_")[0], []).append(path)
        return found

    def saved(self, path: str) -> SavedRecord | None:
        """Returns what a URI names; None if there is none, or its time is over."""
        found = re.fullmatch(r"tinker://([^/]+)/(weights|sampler_weights|external_weights|inflight)/([^/]+)", path)
        if found is None or not re.fullmatch(IDENTIFIER_PATTERN, found[3]):
            return None
        record = self._read(self.run_directory(run_of(found[1])) / found[2] / f"{found[3]}.json", SavedRecord)
        return record if record is not None and record.model_id == found[1] and not record.has_expired else None

    def all_saved(self, model_id: str, kinds: str = "*weights") -> list[SavedRecord]:
        """Returns all that is saved of a model, also what has expired and is not deleted yet, as `noted` says."""
        return self._all(f"models/{run_of(model_id)}/{kinds}/[!.]*.json", SavedRecord)

    def knows(self, record: SavedRecord) -> bool:
        """Whether what an item has saved is there by its name, or was deleted since."""
        former = self._read(self._path_of(record), SavedRecord)
        return (former is not None and former.number == record.number) or self._tombstone_of(record).exists()

    def keep(self, record: SavedRecord, *, overwrite: bool) -> bool:
        """Writes a record; returns False if a later one has its name: a model that is opened again asks for what it had before.

        Raises `FileExistsError` if another one has its name.
        """
        with self._saving:
            former = self._read(self._path_of(record), SavedRecord)
            if self.knows(record):
                return True
            if former is not None and former.number > record.number and overwrite:
                return False
            if former is not None and not (overwrite or former.has_expired):
                raise FileExistsError(f"{record.path} is there already; overwrite it, or take another name")
            if former is not None:
                self._bury(former)
            self.write(record)
            return True

    def change(self, record: SavedRecord) -> bool:
        """Writes what changed of a record; returns False if it is there no more."""
        with self._saving:
            former = self._read(self._path_of(record), SavedRecord)
            if former is None or former.number != record.number:
                return False
            self.write(record)
            return True

    def delete(self, record: SavedRecord) -> None:
        """Takes the name from weights. They are on the disk until `retention.sweep`."""
        with self._saving:
            former = self._read(self._path_of(record), SavedRecord)
            if former is not None and former.number == record.number:
                self._bury(former)
                self._path_of(record).unlink()
                self._forget_slim(self._path_of(record))

    def deleted(self, run_id: str) -> list[SavedRecord]:
        """Returns what was deleted of a run."""
        return self._all(f"models/{run_id}/*/.deleted-*.json", SavedRecord)

    def forget(self, record: SavedRecord) -> None:
        """Forgets that weights were deleted, whose item never comes again."""
        self._tombstone_of(record).unlink(missing_ok=True)
        self._forget_slim(self._tombstone_of(record))

    def _bury(self, record: SavedRecord) -> None:
        write_atomically(self._tombstone_of(record), encoded(record))

    def _tombstone_of(self, record: SavedRecord) -> Path:
        return self._path_of(record).with_name(f".deleted-{record.number}.json")

    def samplers(self, session_id: str = "*") -> list[SamplerRecord]:
        """Returns all samplers of a session, or of all."""
        return self._all(f"samplers/{session_id}_sample_*.json", SamplerRecord)

    def _all(self, pattern: str, kind: type[Record], owner: str | None = None) -> list[Record]:
        found = [each for path in sorted(self.directory.glob(pattern)) if (each := self._listed(path, kind))]
        return found if owner is None else [each for each in found if getattr(each, "owner", None) == owner]

    def _listed(self, path: Path, kind: type[Record]) -> Record | None:
        """Returns a record without its `user_metadata`; None if there is none."""
        try:
            file = path.stat().st_ino
        except FileNotFoundError:
            return None
        known = self._slim.get(path)
        if known is not None and known[0] == file:
            slim: Record = known[1]
            return slim
        written = self._written
        if (found := self._read(path, kind)) is None:
            return None
        if not hasattr(found, "user_metadata"):
            return found
        bare: Record = msgspec.structs.replace(found, user_metadata=None)
        if written == self._written:  # else it may be older than what is there now
            self._slim[path] = file, bare
        return bare

    def _forget_slim(self, path: Path) -> None:
        self._written += 1
        self._slim.pop(path, None)

    def noted(self, records: Iterable[Noted]) -> list[Noted]:
        """Returns records of lists with what clients have noted of them: these are made without `user_metadata`."""
        found, left = list[Noted](), LISTED_BYTES
        for record in records:
            path = self._path_of(record)
            whole = None
            with suppress(FileNotFoundError):
                if (size := path.stat().st_size) <= left:
                    whole, left = self._read(path, type(record)), left - size
            found.append(record if whole is None else with_notes_of(record, whole))
        return found

    def bytes_of_records(self) -> Counter[str]:
        """Returns the bytes of all records by owner. Their names begin with that of their session."""
        sizes = Counter[str]()
        for pattern in (
            "sessions/*.json",
            "samplers/*.json",
            "losses/*.json",
            "models/*/model.json",
            "models/*/*/*.json",
        ):
            for path in self.directory.glob(pattern):
                name = path.relative_to(self.directory).parts[1]
                with suppress(FileNotFoundError):
                    sizes[name.partition(".")[0].partition("_")[0]] += path.stat().st_size
        found = Counter[str]()
        for session_id, size in sizes.items():
            if (session := self.session(session_id)) is not None:
                found[session.owner] += size
        return found

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        """Returns a sampler; None if there is none."""
        return self._read(self.directory / "samplers" / f"{file_name(sampler_id)}.json", SamplerRecord)

    def loss(self, loss_id: str) -> LossRecord | None:
        """Returns a loss; None if there is none."""
        found = self._read(self.directory / "losses" / f"{file_name(loss_id)}.json", LossRecord)
        return found if found is not None and found.loss_id == loss_id else None

    def _read(self, path: Path, kind: type[Record]) -> Record | None:
        try:
            with path.open("rb") as file:
                return msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=kind)
        except FileNotFoundError:
            return None


def encoded(record: msgspec.Struct) -> bytes:
    """Returns a record as JSON. Raises `ValueError` for one that is too long."""
    data = msgspec.json.encode(record)
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(data)} bytes are to be kept; at most {MAX_RECORD_BYTES}: give less user_metadata")
    return data


def without_notes(record: Noted) -> Noted:
    """Returns a record without its `user_metadata`."""
    return record if record.user_metadata is None else msgspec.structs.replace(record, user_metadata=None)


def with_notes_of(record: Noted, other: Noted) -> Noted:
    """Returns a record with the `user_metadata` of another."""
    return msgspec.structs.replace(record, user_metadata=other.user_metadata)


def file_name(text: str) -> str:
    """Returns an id of the service's making as the name of a file; one that no file has for anything else."""
    name = text.replace(":", "_")
    return name if re.fullmatch(IDENTIFIER_PATTERN, name) else ".none"


def run_of(model_id: str) -> str:
    """Returns the id of a model's run."""
    return file_name(model_id)
