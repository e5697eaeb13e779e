"""The base of every configuration model, and the configuration of the wire between orchestrator and trainer.

Each package keeps its configuration beside what it configures; all of them derive from `Config`, so that an unknown key is
always an error and a field's docstring is its documentation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"

Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER_PATTERN)]

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A seed as torch takes it."""
"""An id that becomes part of a path or of a frame: letters, digits, `_`, `.`, `-`, 64 characters at most."""


# pydantic looks for plugins of its own in every installed package, which took a quarter of a small process's start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


NO_NUMBER = "boolean_for_number"
"""The type of pydantic's error about a boolean that stands where a number is expected."""


def _number(value: Any) -> Any:
    """Refuses a boolean, which pydantic takes as 1 or 0."""
    if isinstance(value, bool):
        raise PydanticCustomError(NO_NUMBER, "expected a number; true and false are none")
    return value


def _integer(value: Any) -> Any:
    """Does so, and reads `1e3` in a flag or a variable as a file's is read."""
    if isinstance(value, str) and "e" in value.lower():
        with suppress(ValueError):
            return float(value)
    return _number(value)


def _with_numbers_checked(schema: Any, model: type[Config]) -> Any:
    """Returns a copy of a part of the schema of `model`; the models in it have had their own turn."""
    if isinstance(schema, list | tuple):
        return type(schema)(_with_numbers_checked(each, model) for each in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind in ("int", "float"):
        return core_schema.no_info_before_validator_function(_integer if kind == "int" else _number, schema)
    if kind == "model" and schema["cls"] is not model and issubclass(schema["cls"], Config):
        return schema
    data = ("metadata", "config", "default", "expected", "serialization") if isinstance(kind, str) else ()
    return {key: value if key in data else _with_numbers_checked(value, model) for key, value in schema.items()}


class Config(BaseModel):
    """The base of every configuration model.

    Unknown keys are refused. A field's docstring is its description (`transport/configuration/docstrings.py`).
    """

    model_config = ConfigDict(extra="forbid", validate_default=True)

    gone: ClassVar[Mapping[str, Any]] = {}
    """Defaults of keys that earlier versions wrote into files, and that are no keys any more: they are left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_gone(cls, given: Any) -> Any:
        if not cls.gone or not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if key not in cls.gone or value != cls.gone[key]}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the schema with `_number` or `_integer` before each number, wherever it is in a field's type."""
        schema: CoreSchema = _with_numbers_checked(handler(source), cls)
        return schema

    def table(self) -> dict[str, Any]:
        """Returns the values as a table that loads to the same. Unset keys are left out: TOML has no null."""
        return self.model_dump(mode="json", exclude_none=True)


def _kind(value: Any) -> Any:
    if value == "filesystem":
        raise ValueError(
            "there is no wire of files any more: leave kind out. For a trainer on any node of Ray, set address = "
            '"tcp://0.0.0.0:5555", and keys as `counterpoint keys` makes them (docs/cluster.md)'
        )
    return value


class TransportConfig(Config):
    """The wire between an orchestrator and the trainer. Both ends need the same values."""

    kind: Annotated[Literal["zmq"], BeforeValidator(_kind)] = "zmq"
    """The only kind; leave it out."""

    address: str | None = None
    """ZMQ endpoint, `ipc://PATH` or `tcp://HOST:PORT`. If HOST is `0.0.0.0` at both ends, the trainer may be on any node: it
    writes where it is reached to the job's directory. Unset: a socket in the job's directory, or in the temporary directory
    if that path would be too long for a UNIX socket."""

    server_public_key_file: Path | None = None
    """CURVE public key of the trainer. Required at both ends for a `tcp://` address that is not loopback."""

    secret_key_file: Path | None = None
    """This end's CURVE secret key. Required for a `tcp://` address that is not loopback."""

    authorized_keys_directory: Path | None = None
    """The trainer's end: a directory with the CURVE public key (`*.key`) of every orchestrator that may connect. Required with
    keys; an orchestrator ignores it."""

    max_batch_bytes: int = Field(default=32 * 2**30, gt=0)
    """Most bytes of a batch's arrays. An orchestrator ends before it commits a larger batch; a trainer refuses it before it
    allocates memory for it. Each end also refuses a batch that is larger than its machine's memory."""

    credit: int = Field(default=4, ge=1)
    """How many unacknowledged batches the trainer holds for one run."""

    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """A peer that is silent for three of these counts as lost; the link reconnects and logs it."""

    @property
    def largest_batch(self) -> int:
        """Bytes: `max_batch_bytes`, or this machine's memory where that is less."""
        return min(self.max_batch_bytes, machine_memory())


def machine_memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
