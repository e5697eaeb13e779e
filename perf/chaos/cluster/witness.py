"""What the workers of the chaos say of themselves, in one file: who lives, what was stored and what was committed.

Every line is one write with O_APPEND, so the order of the lines is the order in which they were written, whatever the clocks of
the processes say. `audit.py` reads the file when all has ended; nothing of the product reads or writes it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FILE = "witness.jsonl"


class Witness:
    """The pen of one process. Usable from several threads."""

    def __init__(self, directory: Path, worker: str, incarnation: int) -> None:
        self._descriptor = os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._who = [worker, incarnation, os.getpid()]

    def note(self, what: str, detail: Any = None) -> None:
        """Appends a line."""
        line = json.dumps([*self._who, what, detail, time.time()]) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Closes the file; a process that ends need not."""
        os.close(self._descriptor)


class Reader:
    """Reads the file along while it grows."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._offset = 0
        self.lines: list[list[Any]] = []

    def read(self) -> None:
        """Adds the lines that have been written whole since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._offset += len(whole) + 1
            self.lines += [json.loads(line) for line in whole.split(b"\n")]
