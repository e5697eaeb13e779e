"""What the workers of `counterpoint run` say of themselves, from `processes.json`, which their supervisor keeps current."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from counterpoint.job.inspection.rollout_records import finite_number
from counterpoint.job.processes_file import PROCESSES_FILE
from counterpoint.serve.readers.rollouts.view import name_of
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Said:
    """What one worker says."""

    status: str = ""
    trouble: str = ""
    since: float | None = None
    pid: int = 0


def said_by_workers(directory: Path) -> dict[str, Said]:
    """Returns what each worker says, by the name that people see; empty without the file, or for a damaged one."""
    try:
        workers = read_json(directory / PROCESSES_FILE, MAX_BYTES).get("workers")
    except (OSError, UntrustedFileError):
        return {}
    known = [worker for worker in workers if isinstance(worker, dict)] if isinstance(workers, list) else []
    return {
        name: Said(
            name_of(worker.get("status")),
            name_of(worker.get("trouble")),
            finite_number(worker.get("since")),
            pid if type(pid := worker.get("pid")) is int and 0 < pid < 2**31 else 0,
        )
        for worker in known
        if isinstance(name := worker.get("name"), str)
    }
