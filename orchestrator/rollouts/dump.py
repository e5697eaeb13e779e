"""Dumps: a step's rollouts in full, for replay.

A run with `dump_raw_rollouts = true`, `counterpoint synthesize` and `counterpoint import-dump` write them. Readers map them
into memory. `docs/debugging.md` has the format.

A dump is a published directory of `header.json` (its contents, and the part of the configuration that a replay needs) and
`rollouts.bin` (`rollout_file.py`). A reader checks a header's claims against the bytes present before it uses them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import orjson
from pydantic import Field, ValidationError, field_validator

from counterpoint.orchestrator.rollouts.rollout_file import parse_rollouts, write_rollouts
from counterpoint.run.config import AdvantageConfig, FilterConfig, GibberishFilter, RunConfig
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.exact_json import JsonError, dumps, loads
from counterpoint.transport.files.atomic import STABLE, publish_directory, published_steps
from counterpoint.transport.records import Rollout

FORMAT: Final = "counterpoint raw rollouts"
VERSION: Final = 1

_HEADER = "header.json"
_ROLLOUTS = "rollouts.bin"
_MAX_HEADER_BYTES = 16 * 2**20
_MADV_POPULATE_READ = 22
"""The number of an advice of `madvise`, since Linux 5.14. Python 3.11 has no name for it."""


class DumpError(ValueError):
    """A directory that is not a valid dump. The message names the file, the finding and the expectation."""


class DumpHeader(Config):
    """A dump's `header.json`. `write_dump` sets the counts and sizes."""

    format: Literal["counterpoint raw rollouts"] = FORMAT
    version: Literal[1] = VERSION
    run_id: Identifier
    step: int = Field(ge=1)
    shipped: int = Field(ge=0)
    """How many of the first rollouts are the step's batch, whole groups. The rest were discarded since the step before."""
    rollouts: int = Field(default=0, ge=0)
    turns: int = Field(default=0, ge=0)
    """The turns of all rollouts."""
    files: dict[str, int] = {}
    """Size of each bulk file in bytes."""
    advantage: AdvantageConfig = AdvantageConfig()
    """This and the following fields are the part of the run's configuration that a replay needs."""
    filters: list[FilterConfig] = []
    gather_chunk_size: int | None = Field(default=None, ge=1)
    state_columns: dict[str, list[str]]
    """The columns of state, for every environment of the rollouts."""
    group_scoring: list[str] = []
    """Environments that are scored as a group."""

    @field_validator("filters")
    @classmethod
    def _has_thresholds(cls, filters: list[FilterConfig]) -> list[FilterConfig]:
        for position, config in enumerate(filters):
            if isinstance(config, GibberishFilter) and config.log_probability_below is None:
                raise ValueError(
                    f"filters[{position}].log_probability_below is missing; expected a number, since a dump has no record of "
                    "the vocabulary of its tokens"
                )
        return filters


def header_of(config: RunConfig, group_scoring: list[str]) -> DumpHeader:
    """Returns the header of a run's dumps. `step` and `shipped` are set for each step."""
    return DumpHeader(
        run_id=config.run_id,
        step=1,
        shipped=0,
        advantage=config.advantage,
        filters=config.filters,
        gather_chunk_size=config.gather_chunk_size,
        state_columns={environment.name: environment.state_columns for environment in config.environments},
        group_scoring=group_scoring,
    )


@dataclass(frozen=True, slots=True)
class Dump:
    """An opened dump. The memory map lives as long as the dump or any array of its rollouts."""

    directory: Path
    header: DumpHeader
    _data: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of the bulk files."""
        return self._data.nbytes

    def rollouts(self) -> list[Rollout]:
        """Returns new `Rollout`s, with arrays as read-only views of the memory map. Blocks: call it in a thread.

        Raises `DumpError` when the bulk file is damaged or contradicts the header.
        """
        path = self.directory / _ROLLOUTS
        try:
            rollouts = parse_rollouts(self._data)
        except ValueError as error:
            raise DumpError(f"{path}: {error}") from error
        found = (len(rollouts), sum(len(rollout.turns) for rollout in rollouts))
        if found != (self.header.rollouts, self.header.turns):
            raise DumpError(
                f"{path} holds {found[0]} rollouts of {found[1]} turns; {_HEADER} says {self.header.rollouts} of "
                f"{self.header.turns}"
            )
        unknown = {rollout.environment for rollout in rollouts} - set(self.header.state_columns)
        if unknown:
            raise DumpError(
                f"{path} holds rollouts of {', '.join(sorted(unknown))}; state_columns of {_HEADER} has only "
                f"{', '.join(self.header.state_columns)}"
            )
        return rollouts

    def populate(self) -> None:
        """Loads all pages, so that later measurements are of memory and not of the disk. Blocks: call it in a thread."""
        data = np.frombuffer(self._data, dtype=np.uint8)
        # By ctypes, which releases the GIL; `mmap.madvise` holds it until the disk is done.
        library = ctypes.CDLL(None, use_errno=True)
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if library.madvise(data.ctypes.data, data.nbytes, _MADV_POPULATE_READ) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code), str(self.directory / _ROLLOUTS))
        data[:: mmap.PAGESIZE].max()  # an older kernel


def write_dump(directory: Path, header: DumpHeader, rollouts: Iterable[Rollout]) -> DumpHeader:
    """Publishes a dump and returns its complete header. `rollouts` may be a generator: few are in memory at a time. Blocks.

    Raises `ValueError` if there is no rollout, or fewer than `header.shipped`, `FileExistsError` if `directory` exists, and
    `OSError`.
    """
    counts = [0, 0]

    def counted() -> Iterator[Rollout]:
        for rollout in rollouts:
            counts[0] += 1
            counts[1] += len(rollout.turns)
            yield rollout

    with publish_directory(directory) as partial:
        write_rollouts(partial / _ROLLOUTS, counted())
        if counts[0] < max(1, header.shipped):
            raise ValueError(f"{directory}: a dump of {counts[0]} rollouts; expected {max(1, header.shipped)} or more")
        sizes = {_ROLLOUTS: (partial / _ROLLOUTS).stat().st_size}
        header = header.model_copy(update={"rollouts": counts[0], "turns": counts[1], "files": sizes})
        (partial / _HEADER).write_bytes(dumps(header.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
    return header


def open_dump(directory: Path) -> Dump:
    """Opens the dump in `directory` (`raw_rollouts/step_N`, not `raw_rollouts`). Reads the header only.

    Raises `DumpError` if there is no dump or it is incomplete, `OSError` if it cannot be read.
    """
    if not (directory / STABLE).exists():
        raise DumpError(_absence(directory))
    header = _read_header(directory / _HEADER)
    return Dump(directory, header, _map(directory / _ROLLOUTS, header.files[_ROLLOUTS]))


def _absence(directory: Path) -> str:
    if not directory.exists():
        return f"{directory} does not exist; expected the directory of a dump"
    if directory.is_file():
        return (
            f"{directory} is a file; expected the directory of a dump. `counterpoint import-dump {directory} OUT` makes one of "
            "a step that prime-rl has pickled"
        )
    for parent in (directory, directory / "raw_rollouts", *sorted(directory.glob("run_*/raw_rollouts"))):
        if steps := published_steps(parent):
            among = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
            return f"{parent} holds the dumps of {among}; name one of them, such as {parent / f'step_{steps[-1]}'}"
    return f"{directory} is not a published dump: {STABLE} is missing"


def _read_header(path: Path) -> DumpHeader:
    """Raises `DumpError`."""
    try:
        if path.stat().st_size > _MAX_HEADER_BYTES:
            raise DumpError(f"{path} has {path.stat().st_size} bytes; expected at most {_MAX_HEADER_BYTES}")
        values: Any = loads(path.read_bytes())
    except FileNotFoundError:
        raise DumpError(f"{path} is missing; {path.parent} is not a dump") from None
    except JsonError as error:
        raise DumpError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DumpError(f"{path} does not describe a dump; expected format = {FORMAT!r}")
    if values.get("version") != VERSION:
        raise DumpError(f"{path}: the dump has version {values.get('version')!r}; this program reads version {VERSION}")
    try:
        header = DumpHeader.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DumpError(f"{path}: {where}: {first['msg']}; found {str(first['input'])[:80]!r}") from error
    if not max(1, header.shipped) <= header.rollouts:
        raise DumpError(f"{path}: rollouts = {header.rollouts}, shipped = {header.shipped}; expected 1 to rollouts")
    if list(header.files) != [_ROLLOUTS]:
        raise DumpError(f"{path}: files names {', '.join(header.files) or 'nothing'}; version 1 has {_ROLLOUTS}")
    return header


def _map(path: Path, claimed: int) -> memoryview:
    """Maps a bulk file, read-only. Raises `DumpError` when its size is not `claimed` bytes."""
    try:
        with path.open("rb") as file:
            present = os.fstat(file.fileno()).st_size
            if present != claimed or not present:
                raise DumpError(f"{path} has {present} bytes; {_HEADER} says {claimed}: it was truncated or changed")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise DumpError(f"{path} is missing; {_HEADER} says that it has {claimed} bytes") from None
