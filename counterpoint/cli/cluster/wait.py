"""`counterpoint wait`: waits for the end of a job of roles; gives it another master if it has none.

Other commands that wait for a job use its parts: how its end is told, and how signals are passed on to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.cluster.errors import ClusterError, JobFailed
from counterpoint.cluster.job_handle import JobHandle
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable
from counterpoint.transport.process.stop_requests import StopSignals


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the job's exit code; 130 after Ctrl-C, which leaves the job alone."""
    parser = argparse.ArgumentParser(
        prog="counterpoint wait",
        description="Waits for the end of a job that `counterpoint submit` started, and returns its exit code. If its master is "
        "dead, another one is started, which goes on with the job. Ctrl-C ends the waiting only.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    return await_end(job_in(job_of(parser.parse_args(arguments))))


def job_in(directory: Path) -> JobHandle:
    """Returns the job in a directory. Raises `UserError` if there is none."""
    try:
        return JobHandle(directory)
    except ClusterError as error:
        raise UserError(str(error)) from None


def await_end(handle: JobHandle) -> int:
    """Waits for the job's end, prints how it ended, and returns its exit code."""
    print(f"job {handle.spec.name} in {handle.directory}", flush=True)
    try:
        outcome = handle.wait()
    except JobFailed as failure:
        print(printable(str(failure)))
        _print_log(handle)
        return failure.code
    except ClusterError as error:
        raise UserError(str(error)) from None
    print(f"the job is complete: {printable(outcome.reason)}")
    return outcome.code


def _print_log(handle: JobHandle) -> None:
    """Prints the end of the output of the worker that failed."""
    outcome = handle.outcome()
    if outcome is not None and outcome.failed_worker is not None:
        print(f"end of {handle.log_path(outcome.failed_worker)}:")
        print(printable(handle.logs(outcome.failed_worker, lines=20)))


class StopJobOnSignals(StopSignals):
    """Inside its block the first signal stops the job in order, and the second kills it."""

    def __init__(self) -> None:
        super().__init__(self._pass_on)
        self._job: JobHandle | None = None

    def attend(self, handle: JobHandle) -> None:
        """Takes the job. A signal that came before, while it was being submitted, stops it now."""
        self._job = handle
        if self.count:
            self._pass_on(1, self.exit_code - 128)

    def _pass_on(self, request: int, number: int) -> None:
        if self._job is None:
            return
        how = "stops in order; a second signal kills it" if request == 1 else "is killed"
        print(f"the job {how}", flush=True)
        try:
            self._job.stop("stopped by its user", 128 + number)
        except ClusterError as error:
            print(f"it could not be told: {error}", flush=True)
