"""Functions that jobs of the tests call."""

from __future__ import annotations

import os
import time
from pathlib import Path


def leave(directory: str, name: str = "left") -> None:
    """Writes what it was given, and a variable."""
    Path(directory, name).write_text(os.environ.get("LEFT", ""))


def fail(reason: str) -> None:
    """Raises."""
    raise RuntimeError(reason)


def leave_another(directory: str) -> None:
    """Leaves a file of its own, once there is one named `go`."""
    while not Path(directory, "go").exists():
        time.sleep(0.02)
    Path(directory, f"left-{os.getpid()}").touch()
