"""The workers of a real job, as its master shows them, and their deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from counterpoint.cluster import JobHandle, WorkerStatus
from tests.support.polling import DEADLINE_SECONDS, wait_until

RUNNING = ("RUNNING",)


def running(
    handle: JobHandle, worker: str, after: int = 0, stages: Collection[str] = RUNNING, seconds: float = DEADLINE_SECONDS
) -> WorkerStatus:
    """Waits until the worker has a process in one of `stages`, of a later incarnation than `after`. Returns it.

    A master that does not yet act, because it has just been started, shows no workers: that is waited for, too.
    """
    seen: list[WorkerStatus] = []

    def runs() -> bool:
        seen[:] = [one for one in handle.status().workers if one.worker == worker]
        return any(one.stage in stages and one.pid > 0 and one.incarnation > after for one in seen)

    wait_until(runs, f"{worker} to run after incarnation {after}", seconds, lambda: str(seen or handle.status()))
    return seen[0]


def send(
    handle: JobHandle, worker: str, number: signal.Signals = signal.SIGKILL, stages: Collection[str] = RUNNING
) -> None:
    """Sends a signal to the worker's process, and waits for its next incarnation to run."""
    found = running(handle, worker, stages=stages)
    os.kill(found.pid, number)
    running(handle, worker, found.incarnation, stages)
