"""Keeps the output of a worker bounded: a full log is put aside while the worker goes on writing."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

LOG_BYTES, OLD_LOGS = 64 * 2**20, 4
"""Size at which a worker's log is rotated, and how many old logs are kept, as `<name>.1` (the newest) and so on."""


def rotate_if_full(log_file: Path) -> bool:
    """Rotates the log if it is full; returns whether it was. Ignores anything but a regular file. Raises `OSError`.

    A worker goes on writing to the file that it was started with, so that file is copied and then emptied. The worker opened it
    for appending, so its next line begins the empty file. A line that is written between the copy and the emptying is lost.
    """
    try:
        descriptor = os.open(log_file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < LOG_BYTES:
            return False
        copy = _copy(file, log_file)  # first: if the disk has no room for it, the old logs stay as they are
        for number in range(OLD_LOGS - 1, 0, -1):
            if (old := _old(log_file, number)).exists():
                old.replace(_old(log_file, number + 1))
        copy.replace(_old(log_file, 1))
        os.ftruncate(descriptor, 0)
    return True


def _copy(file: BinaryIO, log_file: Path) -> Path:
    """Copies the log to a file beside it. Raises `OSError`, after removing the partial copy."""
    path = log_file.with_name(f"{log_file.name}.partial")
    path.unlink(missing_ok=True)  # left by a supervisor that was killed
    try:
        with path.open("xb") as copy:
            shutil.copyfileobj(file, copy)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def _old(log_file: Path, number: int) -> Path:
    return log_file.with_name(f"{log_file.name}.{number}")
