"""Ends one run in order, so that it can be resumed, or evicts it. `counterpoint/job/admin/stop_run.py` has the steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from counterpoint.job.admin.ask import VerbOutcome, run_directory
from counterpoint.job.admin.stop_run import await_end, await_orchestrator, stop_timeout, terminate
from counterpoint.job.directory import orchestrator_of, steps_of
from counterpoint.job.number_format import duration
from counterpoint.job.reading.metrics.history import History
from counterpoint.trainer.runs.control_files import evict
from counterpoint.transport.config import Config
from counterpoint.transport.files.lock import LockHolder


class Eviction(Config):
    """What an eviction is asked with."""

    reason: str = Field(default="", max_length=1000)
    """Why, for people; it is shown with the run, and kept in its directory."""


class Ended(VerbOutcome, frozen=True):
    """What has come of ending a run."""

    evicted: bool
    """Whether it was evicted."""
    pid: int | None
    """The process id of its orchestrator; null if it did not run."""
    has_ended: bool
    """Whether its orchestrator has ended within the time that was waited."""
    seconds: float
    """How long that took."""
    progress: str
    """Its step, as `12/100`."""


def stop_run(
    job: Path,
    run_id: str,
    wait_seconds: float | None = None,
    *,
    on_begin: Callable[[LockHolder, float], None] = lambda holder, timeout: None,
) -> Ended:
    """Asks the run's orchestrator to end: it drains, commits and exits with 143. The run can be resumed.

    Waits for that, at most `wait_seconds`, by default as long as it may take; 0: not at all. `on_begin` is called before the
    wait, with its length. Raises `NotThere`, and `UserError` if it runs elsewhere or as another user.
    """
    run_directory(job, run_id)
    holder = await_orchestrator(job, run_id)
    if holder is None:
        return _not_running(job, run_id, evicted=False)
    timeout = stop_timeout(job, run_id) if wait_seconds is None else wait_seconds
    on_begin(holder, timeout)
    began = time.monotonic()
    terminate(job, run_id, holder)
    return _ended(job, run_id, holder, began, timeout, evicted=False)


def evict_run(
    job: Path,
    run_id: str,
    asked: Eviction,
    wait_seconds: float | None = None,
    *,
    on_begin: Callable[[LockHolder, float], None] = lambda holder, timeout: None,
) -> Ended:
    """Ends the run for good: the trainer accepts nothing from it until `control/evicted.txt` is removed.

    Waits as `stop_run`. Raises `NotThere`.
    """
    run_directory(job, run_id)
    evict(job, run_id, asked.reason.strip() or "by its operator, without a reason")
    holder = orchestrator_of(job, run_id)
    if holder is None:
        return _not_running(job, run_id, evicted=True)
    timeout = stop_timeout(job, run_id) if wait_seconds is None else wait_seconds
    on_begin(holder, timeout)
    return _ended(job, run_id, holder, time.monotonic(), timeout, evicted=True)


def _ended(job: Path, run_id: str, holder: LockHolder, began: float, timeout: float, *, evicted: bool) -> Ended:
    has_ended = await_end(job, run_id, holder, timeout)
    seconds, progress = time.monotonic() - began, _progress(job, run_id)
    if has_ended:
        how = "was evicted" if evicted else "has stopped"
        sentence = f"run {run_id} {how} after {duration(seconds)}; step {progress}"
    elif timeout == 0:
        sentence = f"run {run_id} (process {holder.pid}) is to end; step {progress}"
    else:
        sentence = f"run {run_id} (process {holder.pid}) still runs after {duration(seconds)}; see its log"
    return Ended(
        run_id=run_id,
        sentence=sentence,
        evicted=evicted,
        pid=holder.pid,
        has_ended=has_ended,
        seconds=seconds,
        progress=progress,
    )


def _not_running(job: Path, run_id: str, *, evicted: bool) -> Ended:
    progress = _progress(job, run_id)
    step, _, steps = progress.partition("/")
    if evicted and step == steps:
        sentence = (
            f"run {run_id} was done; step {progress}. It is evicted now: with more steps it is resumed only once its "
            "control/evicted.txt is removed"
        )
    else:
        sentence = f"run {run_id} {'is evicted; it ' if evicted else ''}does not run; step {progress}"
    return Ended(
        run_id=run_id, sentence=sentence, evicted=evicted, pid=None, has_ended=True, seconds=0.0, progress=progress
    )


def _progress(job: Path, run_id: str) -> str:
    history = History.of(job, run_id, steps_of(job, run_id))
    history.refresh()
    return history.progress
