"""What a job and its runs are, for whoever steers them. The numbers are those of `counterpoint status --json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.job.admin.ask import run_directory
from counterpoint.job.admin.change import changeable_values
from counterpoint.job.directory import is_running, own_steps, steps_of
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.status import JobSnapshot
from counterpoint.run.changes import JournalError, read_journal
from counterpoint.run.pause import read_pause
from counterpoint.transport.errors import UserError


def inspect_run(job: Path, run_id: str) -> dict[str, Any]:
    """Returns a run's entry of `counterpoint status --json`, and what steers it.

    That is `paused` (None, or `since` and `reason`), `changeable` (the next step's value of each key that may change; empty while
    it is unknown) and `changes` (what has changed, oldest first). Raises `NotThere`, and `UserError` for a damaged journal.
    """
    run_dir = run_directory(job, run_id)
    own = own_steps(job)
    history = History.of(job, run_id, own[run_id] if own and run_id in own else steps_of(job, run_id))
    history.refresh()
    [entry] = JobSnapshot(job, own, {run_id: history}, [], is_running(job)).as_json()["runs"]
    try:
        changes = [change.model_dump(mode="json") for change in read_journal(run_dir)]
    except JournalError as error:
        raise UserError(str(error)) from None
    try:
        changeable = changeable_values(job, run_id)
    except UserError:
        changeable = {}
    pause = read_pause(run_dir)
    return {
        **entry,
        "paused": None if pause is None else {"since": pause.since, "reason": pause.reason},
        "changeable": changeable,
        "changes": changes,
    }
