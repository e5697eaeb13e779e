"""A JSON Lines file of bounded size, for what is worth reading and not worth waiting for: decisions, spans.

When the file is full it becomes `<name>.1`, in place of the former one. Neither a disk that is full nor one that is slow costs
anything but lines: `append` never raises. `files/json_lines.py` has the format.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transport.files.json_lines import append_lines

logger = logging.getLogger(__name__)

FORMER = ".1"
"""Added to the file's name when it is full."""


class RotatedLines:
    """The writer of one such file: one writer a file, one thread at a time."""

    def __init__(self, path: Path, what: str, max_bytes: int) -> None:
        """`what` names the lines in the log, in the plural; the two files have at most about `max_bytes` each."""
        self._path = path
        self._what = what
        self._max_bytes = max_bytes
        self._is_failing = False

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Writes the lines. Blocks: call it in a thread. A failure is logged once, and costs the lines."""
        try:
            append_lines(self._path, lines)
            if self._path.stat().st_size > self._max_bytes:
                os.replace(self._path, f"{self._path}{FORMER}")
            self._is_failing = False
        except Exception as error:  # noqa: BLE001 - a value that is no JSON, too: nobody who adds lines expects a failure
            if not self._is_failing:
                logger.warning("%s cannot be written; %s are missing from it: %s", self._path, self._what, error)
            self._is_failing = True
