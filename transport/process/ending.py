"""Ends a process without taking it apart: with torch imported, the interpreter frees a million objects one by one."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_at_once(code: int) -> NoReturn:
    """Calls what was registered for the end, writes out what was printed, and ends the process with this exit code.

    Threads that still run are not waited for.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
