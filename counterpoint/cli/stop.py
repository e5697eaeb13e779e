"""`counterpoint stop RUN`: ends one run of a job, or a guest, in order. The other runs go on. A submitted job ends as a whole."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.cli.cluster.wait import job_in
from counterpoint.cluster.errors import ClusterError, JobFailed
from counterpoint.cluster.job_files import holds_job
from counterpoint.job.admin.ask import checked
from counterpoint.job.admin.stop import Eviction, evict_run, stop_run
from counterpoint.job.number_format import duration
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.lock import LockHolder
from counterpoint.transport.printable import printable

USAGE = """usage: counterpoint stop RUN [--job DIRECTORY] [--evict REASON]
       counterpoint stop DIRECTORY

Ends the run in order: its orchestrator drains, commits, and exits with 143. The run can be resumed.
  --job DIRECTORY   the job's output directory; the only job at or below the working directory unless given
  --evict REASON    ends the run with that reason and exit code 3; it can be resumed only once its
                    control/evicted.txt is removed

DIRECTORY is that of a job that `counterpoint submit` started: it ends as a whole, in order, with exit code 143."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 once the run has ended, 1 if it still runs after its time limit."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0 if arguments else 2
    given = _parse(arguments)
    if given.job is None and given.evict is None and holds_job(Path(given.run)):
        return stop_job(Path(given.run))
    job = job_of(given)
    if given.evict is None:
        ended = stop_run(job, given.run, on_begin=partial(_print_beginning, given.run))
    else:
        eviction = checked(Eviction, given.run, reason=given.evict)
        ended = evict_run(job, given.run, eviction, on_begin=partial(_print_beginning, given.run))
    print(ended.sentence)
    return 0 if ended.has_ended else 1


def _print_beginning(run_id: str, holder: LockHolder, timeout: float) -> None:
    print(f"run {run_id} (process {holder.pid}) is to end, within {duration(timeout)}", flush=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Raises `UserError`, with the usage."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run")
    add_job(parser)
    parser.add_argument("--evict")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"stop: {error}\n{USAGE}") from None
    if unknown:
        raise UserError(f"stop: {unknown[0]}: unexpected\n{USAGE}")
    return given


def stop_job(directory: Path) -> int:
    """Stops the job in order and waits for its end. Returns 0 once it has ended, however that was."""
    handle = job_in(directory)
    if (ended := handle.outcome()) is not None:
        print(f"job {handle.spec.name} has ended: {printable(ended.reason)}")
        return 0
    print(f"job {handle.spec.name} is to end; a further `counterpoint stop` kills it", flush=True)
    began = time.monotonic()
    try:
        handle.stop_and_wait()
    except JobFailed as end:
        print(printable(str(end)))
    except ClusterError as error:
        raise UserError(str(error)) from None
    print(f"job {handle.spec.name} has ended after {duration(time.monotonic() - began)}")
    return 0
