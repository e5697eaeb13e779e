"""Passes the signals that a command receives on to the job that it waits for."""

from __future__ import annotations

from cluster.errors import ClusterError
from cluster.job_handle import JobHandle
from transport.process.stop_requests import StopSignals


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
