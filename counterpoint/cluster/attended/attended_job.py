"""A job whose master is this process: it shows the job while it runs, and the job ends with it unless another takes over.

`submit` (`counterpoint/cluster/job_handle.py`) is for jobs whose masters are processes of their own; both run `MasterProcess`. If
this process is killed, the keepers stop the workers in order after a lease; a later one in the same directory adopts them before
that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.cluster import job_files
from counterpoint.cluster.attended.left_running import left_running
from counterpoint.cluster.attended.views import Views, shown_outcome
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.manager.events import JobStopRequested, Outcome
from counterpoint.cluster.master.main import MasterProcess
from counterpoint.cluster.master.prime_master import MasterObserver, MasterTerm
from counterpoint.cluster.spec import JobSpec
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.sweep.store import StoreError
from counterpoint.transport.files.atomic import remove_directory

logger = logging.getLogger(__name__)

REPLACED = JobStopRequested("replaced by a job with another configuration", 143, "", 0.0)

LEASES_OF_AN_END = 5
"""Leases within which keepers without a master have ended, killed workers included."""

POLL_SECONDS = 0.05

LOOK_SECONDS = 1.0
"""Longest time for which the job waits to know its guests."""

Answer = TypeVar("Answer")


class AttendedJob(MasterObserver):
    """A job with an observer. Run it in the main thread, on asyncio's own loop."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Path,
        on_change: Callable[[AttendedJob], None] = lambda job: None,
        guests: Callable[[], Sequence[str]] = lambda: (),
        log_from: Mapping[str, int] | None = None,
        *,
        backend: str = "local",
        options: Mapping[str, Any] | None = None,
        on_reload: Callable[[], object] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        """Takes the job, the directory for its state and its keepers, and callbacks.

        `on_change` is called, on the loop, after anything that `views` shows has changed. `guests` returns the names of the
        job's guests, for which the services go on; it is called in a thread, and may block. An exception of either is logged and
        does not end the job. `on_reload` is as of `MasterProcess`; `on_trouble` is called, on the loop, as
        `MasterObserver.troubled`. `log_from`: where the output of workers that run already begins (`WorkerView`). `backend` and
        `options` as of `JobFile`.
        """
        self.spec = spec
        self._job = job_files.JobFile(spec=spec, backend=backend, options=dict(options or {}))
        self._directory = directory.absolute()
        self._on_change = on_change
        self._on_reload = on_reload
        self._on_trouble = on_trouble
        self._guests = guests
        self._log_from = log_from or {}
        self._views = Views(spec, self._directory)
        self._logged_failures: set[str] = set()
        self._looking: asyncio.Task[tuple[str, ...] | None] | None = None
        """A look for guests that has not ended yet."""

    @property
    def state(self) -> State:
        """The state of the job as a whole."""
        return self._views.job

    @property
    def heard(self) -> Mapping[str, float]:
        """The time at which each worker was heard last, as `Views` has it."""
        return self._views.heard

    def views(self) -> list[WorkerView]:
        """Returns the workers as they are, in their order, by the names for people."""
        return self._views.all()

    async def run(self, *, adopt: bool = False) -> Outcome:
        """Runs the job to its end, and ends its keepers.

        With `adopt` it goes on with what an earlier process left running, if that is the same job; else that is stopped in order
        first. Raises `ClusterError` or `StoreError` if the job cannot begin.
        """
        is_left = await left_running(self._directory)
        if adopt and is_left and self._is_same():
            self._views = Views(self.spec, self._directory, self._log_from)
        elif (stopped := await self._begin_anew(is_left)) is not None:
            return stopped
        outcome, _ = await _run_master(self._directory, self._job, self, on_reload=self._on_reload)
        return shown_outcome(self.spec, outcome)

    def observe(self, look: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Returns the result of a callback that only observes the job, or `otherwise` if it raises.

        The exception does not end the job; it is logged once for each reason.
        """
        try:
            return look()
        except Exception as error:
            if repr(error) not in self._logged_failures:
                self._logged_failures.add(repr(error))
                logger.exception("watching the job failed; the job goes on")
            return otherwise

    # --- as an observer ---

    def changed(self, term: MasterTerm) -> None:
        """See `MasterObserver.changed`."""
        self.observe(lambda: self._views.update(term), otherwise=None)
        self.observe(lambda: self._on_change(self), otherwise=None)

    def troubled(self, trouble: str) -> None:
        """See `MasterObserver.troubled`."""
        (self._on_trouble or super().troubled)(trouble)

    async def guests(self) -> Sequence[str] | None:
        """See `MasterObserver.guests`.

        They are not known while a look takes longer than `LOOK_SECONDS`: a file system may hang.
        """
        if self._looking is not None and not self._looking.done():
            return None
        look = asyncio.to_thread(self.observe, lambda: tuple(self._guests()), None)
        self._looking = asyncio.create_task(look, name="looking for guests")
        done, _ = await asyncio.wait([self._looking], timeout=LOOK_SECONDS)
        return self._looking.result() if done else None

    # --- what an earlier process left ---

    def _is_same(self) -> bool:
        """Whether what an earlier process left is this job, and it has not ended."""
        try:
            return _goes_on(self._directory) and job_files.read_job(self._directory) == self._job
        except ClusterError as error:
            logger.warning("what an earlier command left is not adopted: %s", error)
            return False

    async def _begin_anew(self, is_left: bool) -> Outcome | None:
        """Stops what an earlier process left, in order, and makes the directory of a new job. Returns as `end_earlier`."""
        stopped = await end_earlier(self._directory) if is_left else None
        if stopped is None:
            await asyncio.to_thread(remove_directory, self._directory)
            self._directory.mkdir(parents=True, mode=0o700)
            job_files.write_privately(self._directory / job_files.JOB_FILE, self._job)
        return stopped


async def end_earlier(directory: Path) -> Outcome | None:
    """Stops what an earlier process left running in the directory, in order, and returns once its keepers have ended.

    Returns the outcome of this process if a signal asked it to end meanwhile, else None. Raises `ClusterError` if they do
    not end.
    """
    if not await left_running(directory):
        return None
    logger.warning("what an earlier command left running is stopped first")
    lease, signalled = JobSpec.model_fields["lease_seconds"].default, None
    if job_files.holds_job(directory):
        earlier = job_files.read_job(directory)
        lease = earlier.spec.lease_seconds
        if _goes_on(directory):
            try:
                _, signalled = await _run_master(directory, earlier, None, REPLACED)
            except ClusterError as error:
                logger.warning("it is left to end by itself: %s", error)
    try:
        async with asyncio.timeout(LEASES_OF_AN_END * lease):  # without a master they end by themselves
            while await left_running(directory):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise ClusterError(f"{directory}: the keepers that an earlier command left there do not end") from None
    return None if signalled is None else Outcome(signalled.code, signalled.reason)


def _goes_on(directory: Path) -> bool:
    """Whether a job has not ended that a master of this version can go on with: an earlier version left no state."""
    return job_files.read_outcome(directory) is None and (directory / job_files.STATE_FILE).exists()


async def _run_master(
    directory: Path,
    job: job_files.JobFile,
    observer: MasterObserver | None,
    stop_first: JobStopRequested | None = None,
    on_reload: Callable[[], object] | None = None,
) -> tuple[Outcome, JobStopRequested | None]:
    """Runs a job to its end; returns its outcome, and what a signal asked for."""
    process = MasterProcess(directory, job, observer=observer, stop_first=stop_first, alone=True, on_reload=on_reload)
    try:
        await process.run()
    except StoreError as error:
        raise ClusterError(f"{directory}: the job's state cannot be used: {error}") from error
    ended = process.outcome
    if ended is None and process.signalled is not None:
        return Outcome(process.signalled.code, process.signalled.reason), process.signalled
    if ended is None:
        return Outcome(1, "another process has taken the job over"), process.signalled
    return Outcome(ended.code, ended.reason, ended.failed_worker), process.signalled
