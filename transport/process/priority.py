"""The priority of threads that copy gigabytes for a disk or a wire, so that an event loop of the process has a core first."""

from __future__ import annotations

import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

NICENESS = 5
"""Added to the thread's own. Of a core that both want, such a thread has a quarter and the loop has the rest."""


def lower_own_priority() -> None:
    """Lowers the priority of the calling thread, on Linux. Elsewhere niceness is a process's, so nothing is done.

    For good: only root may raise it again. Threads and processes that the thread starts inherit it. So it is for threads that
    start no process, and that run no code by import path.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)  # at most 19
        except OSError as error:  # a filter of system calls, such as systemd's `~@resources`
            logger.info(
                "%s keeps its priority, so the event loop may lag more: %s", threading.current_thread().name, error
            )
