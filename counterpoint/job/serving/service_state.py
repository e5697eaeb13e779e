"""What the service for the Tinker SDK of a job has done, for the console and the summary: by the files that it leaves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.job.number_format import duration
from counterpoint.run.trainer_files import saved_directory
from counterpoint.service.records.structs import run_of
from counterpoint.service.tinker.status import MOST_MODELS, STATUS_FILE, Status
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes
from counterpoint.transport.typed import met

MOST_STATUS_BYTES = 16 * 2**20


def read_status(job: Path) -> Status | None:
    """Returns what the service of a job last said of itself; None before it has."""
    try:
        return msgspec.json.decode(read_bytes(job / "service" / STATUS_FILE, MOST_STATUS_BYTES), type=met(Status))
    except (OSError, UntrustedFileError, msgspec.MsgspecError):
        return None


def service_in_words(job: Path) -> str:
    """Returns one line: models, updates, and what waits."""
    status = read_status(job)
    if status is None:
        return "no client yet"
    pending = sum(each.pending for each in status.keys.values())
    waiting = f"{pending} requests pending, the oldest ({status.oldest}) for {duration(time.time() - status.since)}"
    parts = [
        f"{len(status.updates)} models, {len(status.open)} open",
        f"{sum(status.updates.values())} updates",
        waiting if pending else "no request pending",
    ]
    return ", ".join(parts)


def summarize_service(job: Path) -> dict[str, Any]:
    """Returns the same in numbers, with the newest weights of each model."""
    status = read_status(job)
    if status is None:
        return {"models": {}, "updates": 0, "pending": 0, "oldest": None}
    shown = sorted(status.updates.items(), key=lambda each: -each[1])[:MOST_MODELS]
    return {
        "models": {
            name: {"updates": count, "is_open": name in status.open, **_newest_weights(job, status, name)}
            for name, count in shown
        },
        "updates": sum(status.updates.values()),
        "pending": sum(each.pending for each in status.keys.values()),
        "oldest": {"request": status.oldest, "seconds": status.time - status.since} if status.oldest else None,
    }


def _newest_weights(job: Path, status: Status, model_id: str) -> dict[str, str | None]:
    """Returns the name of the weights that a model saved last, and the directory where they are."""
    if (saved := status.newest.get(model_id)) is None:
        return {"weights": None, "directory": None}
    place = saved.directory or str(saved_directory(job, run_of(model_id)) / f"step_{saved.step}")
    return {"weights": saved.path, "directory": place}
