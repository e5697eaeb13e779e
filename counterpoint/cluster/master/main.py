"""The master's process: takes the lock, runs one term after the other until the job has ended, and says how it ended.

A master that another one has replaced ends at once (`LOST`). An exception in a term, a bug of ours, begins another one that stops
the job in order; a second one ends everything at once. While the state cannot be written, a term waits, and keeps the keepers
informed: the workers go on. A process that is `alone` in the job's directory does not wait once a signal asks it to end: a last
term goes on from what was written last, stops the job in order, and writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoint.cluster import job_files
from counterpoint.cluster.backends.base import Backend
from counterpoint.cluster.clock import RunningClock
from counterpoint.cluster.errors import CapacityError, ClusterError, StaleMasterError
from counterpoint.cluster.manager.events import LONGEST_REASON, JobStopRequested, Outcome
from counterpoint.cluster.master import queries
from counterpoint.cluster.master.backend_choice import open_backend
from counterpoint.cluster.master.control import ControlServer
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.master.orders import Orders
from counterpoint.cluster.master.prime_master import MasterObserver, MasterTerm
from counterpoint.cluster.master.state_writer import NotWritten, StateWriter, open_state
from counterpoint.cluster.state_file import StateError
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.hangup import Hangups

if TYPE_CHECKING:
    from counterpoint.cluster.master.standby import HungMaster, Standby

logger = logging.getLogger(__name__)

LOST = 75
"""Exit code of a master that another one has replaced."""

HELD = 76
"""Exit code when the job has another master, and this one was not to wait."""

STOPS = {
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGINT: "interrupted by Ctrl-C",
    signal.SIGHUP: "the terminal was closed (SIGHUP)",
}
"""Signals that stop the job in order, and the reason that each gives it."""

WRITE_SECONDS = 5.0
"""How long a process that is alone and was asked to end waits for a state that cannot be written."""

LOOK_SECONDS = 0.1
"""Seconds between two tries of a waiting master to take the lock."""

END_SECONDS = 60.0
"""Longest time to end the keepers after the job."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
"""The lines of a master's log."""


class MasterProcess:
    """The terms of one process."""

    def __init__(
        self,
        directory: Path,
        job: job_files.JobFile,
        *,
        hung: HungMaster | None = None,
        standby: Standby | None = None,
        observer: MasterObserver | None = None,
        stop_first: JobStopRequested | None = None,
        alone: bool = False,
        on_reload: Callable[[], object] | None = None,
    ) -> None:
        """Stops the job in order, before anything else happens, with `stop_first`.

        `on_reload` is called, in a thread, for a SIGHUP that comes from no closed terminal; without it, each SIGHUP stops the
        job. With `hung` this process waits as long as another master lives. `alone`: a lock of the caller keeps every other
        master away, on any machine.
        """
        self._directory, self._job = directory, job
        self._hung = hung
        self._patience = float("inf") if hung is not None else 2 * job.spec.lease_seconds + 10.0
        self._standby = standby
        self._faults = Faults()
        self._state: StateWriter | None = None
        self._master: MasterTerm | None = None
        self._control: ControlServer | None = None
        self._stop_first = stop_first
        self._observer = observer
        self._alone = alone
        self._on_reload = on_reload
        self._failures = 0
        self.outcome: job_files.OutcomeFile | None = None
        """How the job ended, if this process knows it."""
        self.signalled: JobStopRequested | None = None
        """What the first signal asked for."""

    async def run(self) -> int:
        """Runs terms until the job has ended, or another master has it; returns the exit code.

        Raises `ClusterError`, and `StoreError` if the state's storage does not answer.
        """
        async with self._signals():
            lock = await self._take_lock()
            try:
                if (ended := self._read_outcome()) is not None:
                    return ended.code
                if lock is None:
                    logger.warning("%s: the job has another master", self._directory)
                    return HELD
                self._state = await asyncio.to_thread(self._read_state)
                while (code := await self._term(self._state)) is None:
                    pass
                return code
            finally:
                if self._control is not None:
                    await self._control.close()
                self._master = None
                if self._standby is not None:
                    self._standby.stop_watching()
                if lock is not None:
                    os.close(lock)

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        """Handles signals in its block."""
        # SIGINT is handled also where a shell has it ignored, as it does for what a script runs in the background.
        handled = set(STOPS)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started by nohup: meant to outlive its terminal
            handled.discard(signal.SIGHUP)
        loop = asyncio.get_running_loop()
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        hangups: Hangups | None = None
        if self._on_reload is not None and signal.SIGHUP in handled:
            hangups = Hangups(lambda: loop.call_soon_threadsafe(self._on_signal, signal.SIGHUP), self._on_reload)
            loop.add_signal_handler(signal.SIGHUP, hangups.note)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
            if hangups is not None:
                await asyncio.to_thread(hangups.close)

    async def _take_lock(self) -> int | None:
        """Returns the lock that makes this process the master, once nobody else has it; None if another keeps it.

        Raises `ClusterError` if it cannot be taken for another reason.
        """
        clock = RunningClock()
        began, said = clock.read(), ""
        while True:
            if self._hung is not None and not job_files.holds_job(self._directory):
                return None  # the directory was removed: there is no job to take over
            try:
                return take_lock(self._directory / job_files.LOCK_FILE, "the job has another master")
            except OSError as error:
                if error.errno != errno.EADDRINUSE and str(error) != said:
                    said = str(error)
                    logger.error("the master's lock cannot be taken, and it is tried again: %s", said)
                if self.signalled is not None or clock.read() - began >= self._patience:
                    if error.errno == errno.EADDRINUSE:
                        return None
                    raise ClusterError(f"{self._directory}: the master's lock cannot be taken: {error}") from error
            if self._hung is not None:
                await self._hung.look()
            await asyncio.sleep(LOOK_SECONDS)

    def _read_state(self) -> StateWriter:
        """Reads the job's state. Blocks. Raises `StateError`, `StoreError`."""
        try:
            state = StateWriter(open_state(self._directory, self._job.journal), self._faults)
        except OSError as error:
            raise ClusterError(f"{self._directory}: the job's state cannot be kept: {error}") from error
        if state.read() is None and (self._directory / job_files.MASTER_FILE).exists():
            raise StateError(
                f"{self._directory}: the job has had a master, and has no {job_files.STATE_FILE}: an earlier version of "
                "Counterpoint ran it, or the file was removed; its workers end by themselves. Submit the job to another directory"
            )
        return state

    def _on_signal(self, number: signal.Signals) -> None:
        """Stops the job in order; a second signal kills it. A master that waits only ends."""
        request = JobStopRequested(STOPS[number], 128 + number, "", 0.0)
        self.signalled = self.signalled or request
        if self._master is not None:
            self._master.emit(request)
            if self._alone:
                asyncio.get_running_loop().call_later(WRITE_SECONDS, self._give_up_if_stuck)

    def _give_up_if_stuck(self) -> None:
        """Ends a term that waits for its state to be written although it was asked to end."""
        if self._state is not None:
            self._state.gives_up = True

    def _read_outcome(self) -> job_files.OutcomeFile | None:
        self.outcome = job_files.read_outcome(self._directory)
        return self.outcome

    # --- one term ---

    async def _term(self, state: StateWriter) -> int | None:
        """Runs one term. Returns the process's exit code; None if another term is to follow."""
        epoch = state.epoch + 1
        logger.info("master of %s with epoch %d, process %d", self._job.spec.name, epoch, os.getpid())
        backend = open_backend(self._job.backend, self._job.spec, self._directory, epoch, self._job.options)
        orders = Orders(self._job.spec, self._directory, self._job.path)
        master = MasterTerm(orders, state, backend, epoch, self._faults, self._observer)
        if self._master is None and self.signalled is not None:  # it came before there was a master to tell
            master.emit(self.signalled)
        self._master = master
        if self._control is None:
            self._control = ControlServer(job_files.control_path(self._directory), self._answer)
            await self._control.start()
        if state.writes:
            master.on_begun = self._on_begun
        try:
            outcome = await master.run(self._stop_first)
        except StaleMasterError as error:
            logger.error("the master with epoch %d ends: %s", epoch, error)
            await _closed(backend, end=False)
            return LOST
        except NotWritten as error:
            logger.warning("the job is stopped although its state cannot be written: %s", error)
            state.writes, self._stop_first = False, self.signalled
            await _closed(backend, end=False)
            return None
        except CapacityError as error:
            outcome = Outcome(1, f"the job cannot start: {error}")
        except Exception as error:
            logger.exception("the master failed")
            self._failures += 1
            log = "the output of this command" if self._alone else f"{self._directory}/{job_files.MASTER_LOG}"
            reason = f"the master failed: {error!r}"[: LONGEST_REASON - 200] + f"; see {log}"
            if self._failures < 2 and not isinstance(error, ClusterError):
                self._stop_first = JobStopRequested(reason, 1, "", 0.0)
                await _closed(backend, end=False)
                return None
            outcome = Outcome(1, reason)
            if state.writes and await asyncio.to_thread(state.is_replaced):  # perhaps it failed for that reason
                await _closed(backend, end=False)
                return LOST
        return await self._end(backend, master, outcome)

    def _on_begun(self, epoch: int) -> None:
        """Says who is the master, now that the state says so."""
        file = job_files.MasterFile(epoch=epoch, pid=os.getpid(), machine=job_files.machine())
        with contextlib.suppress(OSError):  # a full disk; it only helps a standby
            job_files.write_privately(self._directory / job_files.MASTER_FILE, file)
        if self._standby is not None:
            self._standby.watch()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._master is not None
        return await queries.answer(self._master, self._directory, request)

    async def _end(self, backend: Backend, master: MasterTerm, outcome: Outcome) -> int:
        """Ends what is left of the job, and writes how it ended: whoever is not alone needs to know. Returns its exit code."""
        await _closed(backend, end=True)
        if self._standby is not None:
            await self._standby.end()
        status = replace(queries.status(master, self._directory), stage="STOPPED").as_json()
        file = job_files.OutcomeFile(
            code=outcome.code, reason=outcome.reason, failed_worker=outcome.failed_worker, status=status
        )
        self.outcome = file
        self._faults.reach("before_outcome")
        while True:
            try:
                await asyncio.to_thread(job_files.write_privately, self._directory / job_files.OUTCOME_FILE, file)
                break
            except OSError as error:
                logger.error("the outcome cannot be written: %s", error)
            if self._alone:
                break
            await asyncio.sleep(1.0)
        self._faults.reach("after_outcome")
        logger.info("the job has ended with code %d: %s", outcome.code, outcome.reason)
        return outcome.code


async def _closed(backend: Backend, *, end: bool) -> None:
    """Closes a backend; logs what it raises, since nothing can be done about it."""
    try:
        async with asyncio.timeout(END_SECONDS):
            await backend.close(end=end)
    except Exception:
        logger.exception("the backend was not closed in order")
