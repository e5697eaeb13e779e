"""The process of one worker, as the orchestrator has it: starts it below a guardian, kills it, reads what it left.

Start it from the main thread: the guardian lives as long as the thread that started it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from counterpoint.environments.workers.boot import Boot
from counterpoint.transport.printable import ending, printable, shortened
from counterpoint.transport.process.child import Child, size_of
from counterpoint.transport.process.priority import side_nice

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a worker write the stacks of its threads to its stack file, even while one of them holds the GIL."""

_TAIL_BYTES = 4096
_LAST_OUTPUT, _LONGEST_LINE = 300, 120
_CRASH = "Fatal Python error"


class WorkerProcess:
    """A started worker. `ended` is called on the running loop, once, with its exit code (128 + signal for a killed one)."""

    def __init__(self, boot: Boot, log_file: Path, ended: Callable[[int], None]) -> None:
        """Raises `OSError` when the system lacks memory, processes or descriptors; then nothing is left of the attempt."""
        self.log_file = log_file
        self.stack_file = Path(boot.stack_file)
        self.pid = 0
        """The worker's own; 0 until it has said so."""
        self.log_from = size_of(log_file)
        """The place in the log where its output begins, in bytes."""
        command = [sys.executable, "-P", "-m", "counterpoint.environments.workers.worker"]
        variables = os.environ | {"PYTHONUNBUFFERED": "1"}
        # Lower, so that the orchestrator's loop comes first where there are fewer cores than workers.
        nice, given = side_nice(), boot.write()
        self._child = Child("a worker", command, environment=variables, given=given, log=log_file, nice=nice)
        self.guardian = self._child.pid
        self._watching = asyncio.create_task(self._watch(ended))

    def kill(self) -> None:
        """Makes the guardian kill everything below itself. Does nothing once it has ended."""
        self._child.kill_soon()

    def ask_for_stack(self) -> None:
        """Makes the worker write its stacks into `stack_file`, after those that are there."""
        if self._child.code is None and self.pid and _parent_of(self.pid) == self.guardian:
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACK_SIGNAL)

    async def _watch(self, ended: Callable[[int], None]) -> None:
        ended(await self._child.ended())


def in_words(code: int) -> str:
    """Returns how a process ended."""
    if code > 128:
        with suppress(ValueError):
            return f"signal {code - 128} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def last_output(log_file: Path, begin: int) -> str:
    """Returns the last lines of a log after `begin`, short, in one line. Reads the disk: not for an event loop."""
    try:
        with log_file.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(begin if begin <= size else 0, size - _TAIL_BYTES))  # it was emptied if it is shorter now
            lines = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return "none"
    crash = max((number for number, line in enumerate(lines) if line.startswith(_CRASH)), default=None)
    shown = [shortened(line.strip(), _LONGEST_LINE) for line in lines if line.strip()]
    if crash is not None:  # faulthandler's first lines say what happened, its last ones list modules
        shown = [line.strip() for line in lines[crash : crash + 5] if line.strip()]
    text = " | ".join(shown)
    text = ending(text, _LAST_OUTPUT) if crash is None else shortened(text, _LAST_OUTPUT)
    return repr(printable(text)) if text else "none"


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_RUNNERS = (f"{Path(__file__).parent}/", "/asyncio/", "/uvloop/", "/runpy.py", "<frozen runpy>")


def blocked_at(stack_file: Path) -> str:
    """Returns where the main thread was when it last wrote its stacks: `FUNCTION, FILE:LINE` in the environment's code.

    Empty if it did not. Reads the disk.
    """
    try:
        text = stack_file.read_bytes()[-65536:].decode(errors="replace")
    except OSError:
        return ""
    # The main thread is written last; a signal's own thread is called "current".
    dump = text.rpartition("\nThread ")[2].rpartition("\nCurrent thread ")[2]
    frames = [found for line in dump.split("\n") if (found := _FRAME.match(line))]
    theirs = [found for found in frames if not any(part in found["file"] for part in _RUNNERS)]
    if not theirs:
        return ""
    inner = theirs[0]
    own = next((found for found in theirs if "/lib/python" not in found["file"]), inner)
    place = f"{own['function']}, {own['file']}:{own['line']}"
    return printable(place if own is inner else f"{place}, in {inner['function']}, {inner['file']}:{inner['line']}")


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
