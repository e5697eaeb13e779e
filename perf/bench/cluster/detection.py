"""Measures how soon the controller knows of a worker's death and of its silence: until the event is in the job's journal.

A worker of which two heartbeats are missing is suspected, which is shown, and is killed only at the role's limit.

    python -m perf.bench.cluster.detection [--quick | --full]

Real workers of a real job are killed by SIGKILL, or stopped by SIGSTOP, one after the other. The time of an event is that of the
file of its journal entry.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster import JobBuilder, JobFailed, JobHandle, submit
from cluster.spec import BEATS_IN_THE_LIMIT
from perf.bench.command import Size, show
from perf.figures import Case, Figure

SILENCE_SECONDS = 4.0
"""The limit of the role; its workers then send a heartbeat each second."""
DEATH_BOUND_SECONDS = 0.5
HEARTBEAT_SECONDS = SILENCE_SECONDS / BEATS_IN_THE_LIMIT
SUSPICION_BOUND = 1.25
"""The bound, in two heartbeats."""
SILENCE_BOUND = 1.5
"""The bound, in limits."""
TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.02


def measure(size: Size) -> list[Case]:
    """Measures the case `cluster-detection`, in some 20 s."""
    count = size.pick(2, 4, 8)
    place = Path(tempfile.mkdtemp(prefix="counterpoint-bench-"))
    try:
        deaths, suspicions, silences = _measured(place / "job", count)
    finally:
        shutil.rmtree(place)
    figures = [
        Figure("workers killed, and as many stopped", count, ""),
        Figure("a death: median until it is in the journal", statistics.median(deaths), "s"),
        Figure("a death: longest until it is in the journal", max(deaths), "s", DEATH_BOUND_SECONDS),
        Figure("silence: longest until it is suspected", max(suspicions), "s"),
        Figure("silence: that over two heartbeats", max(suspicions) / (2 * HEARTBEAT_SECONDS), "x", SUSPICION_BOUND),
        Figure("silence: longest until the worker is killed for it", max(silences), "s"),
        Figure("silence: that over the role's limit", max(silences) / SILENCE_SECONDS, "x", SILENCE_BOUND),
    ]
    return [Case("cluster-detection", figures)]


def _measured(directory: Path, count: int) -> tuple[list[float], list[float], list[float]]:
    builder = JobBuilder("detection", stay=True)
    builder.role(
        "worker",
        worker="cluster.worker:Worker",
        count=2 * count,
        resources={"cpu": 0},
        silence_timeout_seconds=SILENCE_SECONDS,
    )
    handle = submit(builder.build(), directory, standby=False)
    try:
        _until("the start of the job", lambda: handle.status().stage == "RUNNING")
        names = [f"worker-{rank}" for rank in range(2 * count)]
        deaths = [_seconds_until(handle, name, signal.SIGKILL, "WorkerExited")[0] for name in names[:count]]
        silent = [
            _seconds_until(handle, name, signal.SIGSTOP, "WorkerSuspected", "WorkerSilent") for name in names[count:]
        ]
    finally:
        handle.stop()
        with suppress(JobFailed):  # for the one that is stopped, and cannot end in order
            handle.wait(TIMEOUT_SECONDS)
    return deaths, [each[0] for each in silent], [each[1] for each in silent]


def _seconds_until(handle: JobHandle, worker: str, number: signal.Signals, *kinds: str) -> list[float]:
    """Sends the first process of a worker a signal, and returns how long it takes until each event is in the journal."""
    pid = {one.worker: one.pid for one in handle.status().workers}[worker]
    sent = time.time()
    os.kill(pid, number)
    written: dict[str, float] = {}

    def are_there() -> bool:
        for kind in kinds:
            times = [at for at in _times_of(handle.directory / "journal", worker, kind) if at >= sent - POLL_SECONDS]
            if kind not in written and times:
                written[kind] = times[0]
        return len(written) == len(kinds)

    _until(f"{' and '.join(kinds)} of {worker}", are_there)
    return [max(0.0, written[kind] - sent) for kind in kinds]


def _times_of(journal: Path, worker: str, kind: str) -> list[float]:
    """Returns when the entries with such an event were written."""
    times = []
    for path in sorted(journal.glob("entry-*")):
        try:
            entry, at = json.loads(path.read_bytes().splitlines()[1]), path.stat().st_mtime
        except FileNotFoundError:  # a snapshot has made it needless
            continue
        if any((event["kind"], event.get("worker")) == (kind, worker) for event in entry["events"]):
            times.append(at)
    return times


def _until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT_SECONDS:g} s for {what}")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    show(measure)
