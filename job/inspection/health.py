"""Whether what this machine or container does in a job's directory is alive, for a container's health check.

It asks only what a restart would mend: does a process hold its lock, and does its event loop go on? A trainer or a server that is
away is waited for, and a restart would not bring it back. What other machines or containers do in the directory is their own
check's. It imports little, as it is asked again and again.
"""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from transport.files.lock import holder_of

SILENT_SECONDS = 60.0
"""How long an event loop may be silent: as long as `counterpoint run` bears with it."""

ANSWER_SECONDS = 5.0

MAX_BYTES = 16 * 2**20
"""The size of an answer."""

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
    job = holder_of(directory / "job.lock")
    if job is not None and job.host == here:
        return Health([f"process {job.pid} runs the job, and restarts a role that is not alive"], [])
    locks = {
        path.parent.name.removeprefix("run_"): holder_of(path) for path in directory.glob("run_*/orchestrator.lock")
    }
    alive: list[str] = []
    faults: list[str] = []
    for run_id, holder in sorted(locks.items()):
        if holder is None or holder.host != here:
            continue
        fault = _fault_of(directory, run_id)
        (faults if fault else alive).append(
            fault or f"process {holder.pid} plays run {run_id}, and its event loop goes on"
        )
    if not alive and not faults:
        faults = [f"no process of this machine ({here}) plays a run in {directory.absolute()}"]
    return Health(alive, faults)


def _fault_of(directory: Path, run_id: str) -> str:
    """Returns what is wrong with a run whose process lives; empty if nothing is. One that begins serves no metrics yet."""
    try:
        targets = json.loads((directory / "prometheus" / f"orchestrator_{run_id}.json").read_bytes())
        url = f"http://{targets[0]['targets'][0]}/metrics"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"run {run_id}: its address of metrics cannot be read: {error!r}"
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            text = answer.read(MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError) as error:
        return f"run {run_id}: its process does not answer at {url}: {error}"
    silent = max(map(float, _SILENT.findall(text)), default=0.0)
    return f"run {run_id}: its event loop has been silent for {silent:.0f} s" if silent > SILENT_SECONDS else ""
