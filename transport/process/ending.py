"""Ends a process without taking it apart: with torch imported, the interpreter frees a million objects one by one."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def end_at_once(code: int, *, wait_for_threads: bool) -> NoReturn:
    """Calls what was registered for the end, writes out what was printed, and ends the process with this exit code.

    With `wait_for_threads`, threads end first, as they do where the interpreter ends: those that have work, and those of a pool
    of processes, for which what is registered would wait for ever. Without, a thread that still runs is not waited for.
    """
    if wait_for_threads:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as one is that was closed when the process began
            stream.flush()
    os._exit(code)
