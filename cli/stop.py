"""`counterpoint stop RUN`: ends one run of a job, or a guest, in order. The other runs go on. A submitted job ends as a whole."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from cli.cluster.stop import stop_job
from cluster.job_files import holds_job
from job.directory import orchestrator_of, steps_of
from job.inspection.history import History
from job.number_format import duration
from job.stop_run import await_end, await_orchestrator, check_run_exists, stop_timeout, terminate
from trainer.runs.control_files import evict
from transport.errors import UserError
from transport.files.lock import Holder

USAGE = """usage: counterpoint stop RUN [--job DIRECTORY] [--evict REASON]
       counterpoint stop DIRECTORY

Ends the run in order: its orchestrator drains, commits, and exits with 143. The run can be resumed.
  --job DIRECTORY   the job's output directory; the current one unless given
  --evict REASON    ends the run with that reason and exit code 3; it can be resumed only once its
                    control/evicted.txt is removed

DIRECTORY is that of a job that `counterpoint submit` started: it ends as a whole, in order, with exit code 143."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 once the run has ended, 1 if it still runs after its time limit."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0 if arguments else 2
    given = _parse(arguments)
    if holds_job(Path(given.run)) and given.evict is None:
        return stop_job(Path(given.run))
    check_run_exists(given.job, given.run)
    evicted = given.evict is not None
    if evicted:
        evict(given.job, given.run, given.evict.strip() or "by its operator, without a reason")
    holder = orchestrator_of(given.job, given.run) if evicted else await_orchestrator(given.job, given.run)
    if holder is None:
        remark = "is evicted; it " if evicted else ""
        print(f"run {given.run} {remark}does not run; step {_progress(given.job, given.run)}")
        return 0
    return _end(given.job, given.run, holder, evicted)


def _end(directory: Path, run_id: str, holder: Holder, evicted: bool) -> int:
    """Ends the orchestrator and prints what happens. An evicted run's orchestrator ends by itself."""
    timeout, began = stop_timeout(directory, run_id), time.monotonic()
    print(f"run {run_id} (process {holder.pid}) is to end, within {duration(timeout)}", flush=True)
    if not evicted:
        terminate(directory, run_id, holder)
    if not await_end(directory, run_id, holder, timeout):
        print(f"run {run_id} (process {holder.pid}) still runs after {duration(timeout)}; see its log")
        return 1
    how = "was evicted" if evicted else "has stopped"
    print(f"run {run_id} {how} after {duration(time.monotonic() - began)}; step {_progress(directory, run_id)}")
    return 0


def _progress(directory: Path, run_id: str) -> str:
    history = History.of(directory, run_id, steps_of(directory, run_id))
    history.refresh()
    return history.progress


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Raises `UserError`, with the usage."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run")
    parser.add_argument("--job", type=Path, default=Path())
    parser.add_argument("--evict")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"stop: {error}\n{USAGE}") from None
    if unknown:
        raise UserError(f"stop: {unknown[0]}: unexpected\n{USAGE}")
    return given
