"""What the service knows of sessions, models, saved weights and samplers: small JSON files, each written before it is told.

Names of clients are never names of files, but for what `IDENTIFIER_PATTERN` allows. Everything blocks: call it in a thread.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from counterpoint.run.trained import StartFrom
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.atomic import write_atomically

MAX_RECORD_BYTES = 2**20

Position = Annotated[int, Meta(ge=0, lt=2**31)]
"""A number that a client gives and that is a part of an id. More digits would make an id too long for the name of a file."""


class Session(msgspec.Struct, frozen=True):
    """A client, from its start to its end."""

    session_id: str
    owner: str
    """The digest of its key; empty where there are no keys."""
    finished: bool = False


class ModelRecord(msgspec.Struct, frozen=True):
    """A model that a client trains: one driven run."""

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
    """`weights` or `sampler_weights`."""
    name: str
    number: int
    """The item that made it."""
    step: int
    directory: str = ""
    """Where published weights are; empty for a saved state."""

    @property
    def path(self) -> str:
        """The URI by which clients name it."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class SamplerRecord(msgspec.Struct, frozen=True):
    """A sampler of a client."""

    sampler_id: str
    owner: str
    adapter: str = ""
    """The name of the adapter at the servers; empty: the base model."""
    directory: str = ""
    path: str = ""
    """The URI of its weights, if they have one."""


Record = TypeVar("Record", bound=msgspec.Struct)


class Store:
    """The records of one service."""

    def __init__(self, directory: Path) -> None:
        """Keeps them below `directory`. Raises `OSError`."""
        self.directory = directory
        for name in ("sessions", "models", "samplers"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def run_directory(self, run_id: str) -> Path:
        """Returns the directory of what belongs to a run."""
        return self.directory / "models" / run_id

    def write(self, record: Session | ModelRecord | SavedRecord | SamplerRecord) -> None:
        """Writes a record, durably. Raises `OSError`, and `ValueError` for one that would not be read again."""
        path, data = self._path_of(record), encoded(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)

    def _path_of(self, record: Session | ModelRecord | SavedRecord | SamplerRecord) -> Path:
        match record:
            case Session():
                return self.directory / "sessions" / f"{record.session_id}.json"
            case ModelRecord():
                return self.run_directory(record.run_id) / "model.json"
            case SavedRecord():
                return self.run_directory(run_of(record.model_id)) / record.kind / f"{record.name}.json"
            case SamplerRecord():
                return self.directory / "samplers" / f"{file_name(record.sampler_id)}.json"

    def session(self, session_id: str) -> Session | None:
        """Returns a session; None if there is none."""
        return self._read(self.directory / "sessions" / f"{file_name(session_id)}.json", Session)

    def models(self) -> list[ModelRecord]:
        """Returns all models."""
        paths = sorted((self.directory / "models").glob("*/model.json"))
        return [found for path in paths if (found := self._read(path, ModelRecord)) is not None]

    def model(self, model_id: str) -> ModelRecord | None:
        """Returns a model; None if there is none."""
        found = self._read(self.run_directory(run_of(model_id)) / "model.json", ModelRecord)
        return found if found is not None and found.model_id == model_id else None

    def saved(self, path: str) -> SavedRecord | None:
        """Returns what a URI names; None if there is none."""
        found = re.fullmatch(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)", path)
        if found is None or not re.fullmatch(IDENTIFIER_PATTERN, found[3]):
            return None
        return self._read(self.run_directory(run_of(found[1])) / found[2] / f"{found[3]}.json", SavedRecord)

    def all_saved(self, run_id: str) -> list[SavedRecord]:
        """Returns all that is saved of a run."""
        paths = sorted(self.run_directory(run_id).glob("*weights/*.json"))
        return [found for path in paths if (found := self._read(path, SavedRecord)) is not None]

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        """Returns a sampler; None if there is none."""
        return self._read(self.directory / "samplers" / f"{file_name(sampler_id)}.json", SamplerRecord)

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


def file_name(text: str) -> str:
    """Returns an id of the service's making as the name of a file; one that no file has for anything else."""
    name = text.replace(":", "_")
    return name if re.fullmatch(IDENTIFIER_PATTERN, name) else ".none"


def run_of(model_id: str) -> str:
    """Returns the id of a model's run."""
    return file_name(model_id)
