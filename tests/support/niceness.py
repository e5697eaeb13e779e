"""The priority of threads, as the kernel has it."""

from __future__ import annotations

import os
import threading


def niceness_of(thread: threading.Thread) -> int:
    """Returns the niceness of a thread that runs."""
    assert thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread.native_id)


def own_niceness() -> int:
    """Returns that of the calling thread."""
    return niceness_of(threading.current_thread())
