"""Whether what this machine or container does in a job's directory is alive, for a container's health check.

It asks only what a restart would mend: does a process hold its lock, and does its event loop go on? Its metrics tell that. Their
address is in the run's own directory, since the job's `prometheus/` may be another user's. A trainer or a server that is away is
waited for, and a restart would not bring it back. What other machines or containers do in the directory is their own check's. It
imports little, as it is asked again and again.
"""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from counterpoint.transport.files.lock import LockHolder, holder_of
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes

SILENT_SECONDS = 60.0
"""How long an event loop may be silent: as long as `counterpoint run` bears with it."""

ANSWER_SECONDS = 5.0

MAX_BYTES = 16 * 2**20
"""The size of an answer."""

STARTING_SECONDS = 600.0
"""How long a process may take until it has an address: it loads its environments before that."""

ENDPOINT = "endpoint.json"

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks no proxy for what is on this machine, whatever the environment says."""

_SILENT = re.compile(r"^counterpoint_event_loop_silent_seconds\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Health:
    """What was found, a sentence each."""

    alive: list[str]
    faults: list[str]
    """Empty if all is well."""


def health_of(directory: Path) -> Health:
    """Returns how the command and the runs of this machine in the job's `directory` are."""
    here = socket.gethostname()
    job = _holder(directory / "job.lock")
    if job is not None and job.host == here:
        if _is_stopped(job.pid):
            return Health([], [f"process {job.pid}, which runs the job, is stopped (SIGSTOP)"])
        return Health([f"process {job.pid} runs the job, and restarts a role that is not alive"], [])
    locks = {path.parent.name.removeprefix("run_"): _holder(path) for path in directory.glob("run_*/orchestrator.lock")}
    alive: list[str] = []
    faults: list[str] = []
    for run_id, holder in sorted(locks.items()):
        if holder is None or holder.host != here:
            continue
        state, is_well = _state_of(directory, run_id, holder.pid)
        (alive if is_well else faults).append(state)
    if not alive and not faults:
        faults = [f"no process of this machine ({here}) plays a run in {directory.absolute()}"]
    return Health(alive, faults)


def _state_of(directory: Path, run_id: str, pid: int) -> tuple[str, bool]:
    """Returns how a run is whose process lives, and whether that is well."""
    places = (
        directory / f"run_{run_id}" / "control" / ENDPOINT,
        directory / "prometheus" / f"orchestrator_{run_id}.json",
    )
    place = next(filter(_exists, places), None)
    if place is None:
        return _without_address(directory, run_id, pid)
    try:
        targets = json.loads(read_bytes(place, MAX_BYTES))
        url = f"http://{targets[0]['targets'][0]}/metrics"
    except FileNotFoundError:  # it has just ended
        return _without_address(directory, run_id, pid)
    except (OSError, UntrustedFileError, ValueError, LookupError, TypeError) as error:
        return f"run {run_id}: its address of metrics cannot be read: {error!r}", False
    try:
        with _DIRECTLY.open(url, timeout=ANSWER_SECONDS) as answer:
            text = answer.read(MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError) as error:
        return f"run {run_id}: its process does not answer at {url}: {error}", False
    silent = max(map(float, _SILENT.findall(text)), default=None)
    if silent is None:
        return f"process {pid} begins run {run_id}", True
    if silent > SILENT_SECONDS:
        return f"run {run_id}: its event loop has been silent for {silent:.0f} s", False
    return f"process {pid} plays run {run_id}, and its event loop goes on", True


def _without_address(directory: Path, run_id: str, pid: int) -> tuple[str, bool]:
    """Returns the same of a process that has no address of metrics: it begins, unless it is stopped or began long ago."""
    if _is_stopped(pid):
        return f"run {run_id}: its process {pid} is stopped (SIGSTOP)", False
    try:
        seconds = time.time() - (directory / f"run_{run_id}" / "orchestrator.lock").stat().st_mtime
    except FileNotFoundError:
        seconds = 0.0
    if seconds < STARTING_SECONDS:
        return f"process {pid} begins run {run_id}", True
    return (
        f"run {run_id}: its process {pid} has run for {seconds:.0f} s without an address of metrics, so nobody knows whether "
        f"its event loop goes on; expected control/{ENDPOINT} in its directory within {STARTING_SECONDS:.0f} s"
    ), False


def _is_stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    return False


def _holder(lock: Path) -> LockHolder | None:
    """Returns the holder of a lock; None also for one of another user, who lets nobody look."""
    with suppress(PermissionError):
        return holder_of(lock)
    return None


def _exists(path: Path) -> bool:
    with suppress(PermissionError):
        return path.exists()
    return False
