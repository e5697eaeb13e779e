"""The phases of a job's start, as its processes note them: what each does from when on, until its start is over.

A process of a job calls `enter` as it begins the next phase of its start, and once more with `OVER`. What it did before the first
one was to start and to import. The notes go into one file of the job (`START_FILE`), a line each; a process that belongs to no
job notes nothing. `counterpoint status --start` draws them (`counterpoint/job/reading/start.py`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

START_FILE = "start.jsonl"
"""The file in a job's directory."""

VARIABLE = "CLUSTER_START"
"""The variable by which a role and its children know their name and the file: `NAME=PATH`."""

MAX_BYTES = 2**18
"""The size that the file does not grow beyond, however often its roles start again."""

IMPORTS = "imports"
"""The phase before the first one that a process enters."""

OVER = ""
"""The phase that a start ends with."""


class Note(NamedTuple):
    """That a process entered a phase."""

    phase: str
    at: float
    """Unix seconds."""
    cpu: float
    """CPU seconds that the process had taken by then."""

    @classmethod
    def now(cls, phase: str) -> Note:
        """Returns the note of this process at this moment."""
        return cls(phase, time.time(), time.process_time())


def variable_of(name: str, directory: Path) -> dict[str, str]:
    """Returns the variable by which a role of the job in `directory`, and what it starts, note their starts."""
    return {VARIABLE: f"{name}={directory.absolute() / START_FILE}"}


FIRST_STEP = "first step"
"""The phase of an orchestrator until the rewards of its first step are known, and the step is committed."""

API_SERVER, ENGINE = "API server", "engine"
"""The parts of a server."""

_imported = time.time()

_entered: tuple[int, set[str]] = (0, set())
"""A process, this one or the one that it was forked from, and the phases that it has entered."""


def enter(phase: str, part: str = "", *, beside: bool = False) -> None:
    """Notes that this process enters a phase, which it does once, and before its start is over; else nothing.

    `part` names the process within its role, unless it is the role's own. With `beside` a thread writes: an event loop must
    not wait for a file system.
    """
    global _entered
    process, phases = _entered
    if process != os.getpid():
        _entered = process, phases = os.getpid(), set()
    if OVER in phases or phase in phases:
        return
    phases.add(phase)
    name, _, path = os.environ.get(VARIABLE, "").partition("=")
    if not path:
        return
    given = Path(path), f"{name} {part}".strip(), [Note.now(phase)]
    if beside:
        with suppress(
            RuntimeError
        ):  # a machine that has no room for a thread: only who looks at the start misses the note
            threading.Thread(target=append, args=given, name="noting a phase of the start", daemon=True).start()
    else:
        append(*given)


def append(file: Path, process: str, notes: Iterable[Note], *, anew: bool = False) -> None:
    """Appends notes of this process to the file, or begins it `anew` with them. A file that cannot be written stays as it is."""
    began = process_began()
    lines = b"".join(
        json.dumps({"process": process, "pid": os.getpid(), "began": began, **note._asdict()}).encode() + b"\n"
        for note in notes
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError):  # only who looks at the start misses it
        descriptor = os.open(file, flags | (os.O_TRUNC if anew else 0), 0o644)
        try:
            if os.fstat(descriptor).st_size + len(lines) <= MAX_BYTES:
                os.write(descriptor, lines)  # at once: other processes append to it, too
        finally:
            os.close(descriptor)


def process_began() -> float:
    """Returns when this process began, in Unix seconds, to a hundredth; outside Linux, when it imported this module."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return _imported
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / os.sysconf("SC_CLK_TCK")
