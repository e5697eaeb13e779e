"""The start of a job as its processes noted it (`transport/telemetry/start_phases.py`): what each did from when to when.

The file is read bounded, and what others wrote into it, or cut off, is passed over.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes
from counterpoint.transport.telemetry.start_phases import IMPORTS, MAX_BYTES, OVER, START_FILE

MOST_PROCESSES = 64
"""Processes that are shown: those that began first."""

WAITS = "waits for"
"""How the phases begin in which a process only waits."""

_Seconds = Annotated[FiniteFloat, Field(ge=0, lt=2**40)]


class _Line(BaseModel):
    process: Annotated[str, Field(max_length=256)]
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    began: _Seconds
    phase: Annotated[str, Field(max_length=64)]
    at: _Seconds
    cpu: _Seconds


@dataclass(frozen=True, slots=True)
class StartPhase:
    """What a process did from `begin` to `end`, in Unix seconds."""

    phase: str
    begin: float
    end: float | None
    """None while it does."""
    cpu: float | None
    """The CPU seconds that it took; None while it does."""

    @property
    def waits(self) -> bool:
        """Whether it only waited for another process."""
        return self.phase.startswith(WAITS)


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """The start of one process."""

    process: str
    pid: int
    phases: list[StartPhase]

    @property
    def is_over(self) -> bool:
        """Whether all its phases have ended."""
        return self.phases[-1].end is not None


def read_start(directory: Path) -> list[ProcessStart]:
    """Returns the starts of a job's processes, in the order of their beginnings. Raises `UserError` if it has none."""
    try:
        content = read_bytes(directory / START_FILE, MAX_BYTES)
    except FileNotFoundError:
        content = b""
    except (OSError, UntrustedFileError) as error:
        raise UserError(f"the start of the job cannot be read: {error}") from None
    lines: dict[tuple[str, int], list[_Line]] = {}
    for raw in content.splitlines():
        try:
            line = _Line.model_validate_json(raw)
        except ValidationError:
            continue
        lines.setdefault((line.process, line.pid), []).append(line)
    if not lines:
        raise UserError(
            f"nothing is known of a start: {directory} has no {START_FILE} with a readable line, as `counterpoint run` and its "
            "workers write it"
        )
    of_processes = sorted(lines.values(), key=lambda notes: notes[0].began)
    return [ProcessStart(notes[0].process, notes[0].pid, _phases(notes)) for notes in of_processes[:MOST_PROCESSES]]


def _phases(notes: list[_Line]) -> list[StartPhase]:
    notes = sorted(notes, key=lambda note: note.at)  # threads may have written them in another order
    first, last = notes[0], notes[-1]
    phases = [StartPhase(IMPORTS, first.began, first.at, first.cpu)]
    phases += [StartPhase(a.phase, a.at, b.at, b.cpu - a.cpu) for a, b in pairwise(notes)]
    return phases if last.phase == OVER else [*phases, StartPhase(last.phase, last.at, None, None)]


def start_as_json(processes: list[ProcessStart]) -> list[dict[str, Any]]:
    """Returns them for programs."""
    return [asdict(process) for process in processes]
