"""The master's process: takes the mastership, runs one term after the other until the job has ended, and says how it ended.

A term ends early when the mastership is lost. If another master has it, this process ends (`LOST`). If the storage failed, so
that nobody may have it, this process waits for the storage, and keeps the agents informed meanwhile: the workers go on. An
exception in a term, a bug of ours, begins another one that stops the job in order; a second one ends everything at once.

A process that is `alone` in the job's directory does not wait for the storage once a signal asks it to end: a last term reads
the journal, stops the job in order, and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from counterpoint.cluster import job_files
from counterpoint.cluster.backends.base import Backend
from counterpoint.cluster.errors import CapacityError, ClusterError
from counterpoint.cluster.manager.events import LONGEST_REASON, Outcome, StopRequested
from counterpoint.cluster.master import queries
from counterpoint.cluster.master.backend_choice import open_backend
from counterpoint.cluster.master.control import ControlServer
from counterpoint.cluster.master.durable import MastershipLost
from counterpoint.cluster.master.faults import Faults
from counterpoint.cluster.master.mastership import Identity, MasterHeld, Mastership, acquire, terms_of
from counterpoint.cluster.master.observer import Observer
from counterpoint.cluster.master.orders import Orders
from counterpoint.cluster.master.prime_master import MasterTerm
from counterpoint.cluster.master.standby import Standby
from counterpoint.sweep.open_store import open_proven
from counterpoint.sweep.store import Store, StoreError
from counterpoint.transport.process.hangup import Hangups

logger = logging.getLogger(__name__)

LOST = 75
"""Exit code of a master that another one has replaced."""

HELD = 76
"""Exit code when the job has another master, and this one was not to wait."""

CANNOT_RUN = 2
"""Exit code when there is no job in the directory, or it cannot be read."""

STOPS = {
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGINT: "interrupted by Ctrl-C",
    signal.SIGHUP: "the terminal was closed (SIGHUP)",
}
"""Signals that stop the job in order, and the reason that each gives it."""

WRITE_SECONDS = 5.0
"""How long a process that is alone and was asked to end waits for a journal that cannot be written."""

END_SECONDS = 60.0
"""Longest time to end the agents after the job."""


class MasterProcess:
    """The terms of one process."""

    def __init__(
        self,
        directory: Path,
        job: job_files.JobFile,
        store: Store,
        *,
        is_standby: bool = False,
        standby: Standby | None = None,
        observer: Observer | None = None,
        stop_first: StopRequested | None = None,
        alone: bool = False,
        on_reload: Callable[[], object] | None = None,
    ) -> None:
        """Stops the job in order, before anything else happens, with `stop_first`.

        `on_reload` is called, in a thread, for a SIGHUP that comes from no closed terminal; without it, each SIGHUP stops the
        job. `alone`: a lock of the caller keeps every other master away, on any machine.
        """
        self._directory, self._job, self._store = directory, job, store
        self._patience = float("inf") if is_standby else 2 * job.spec.lease_seconds + 10.0
        self._standby = standby
        self._give_up = threading.Event()
        self._faults = Faults()
        self._master: MasterTerm | None = None
        self._control: ControlServer | None = None
        self._stop_first = stop_first
        self._observer = observer
        self._alone = alone
        self._on_reload = on_reload
        self._failures = 0
        self.outcome: job_files.OutcomeFile | None = None
        """How the job ended, if this process knows it."""
        self.signalled: StopRequested | None = None
        """What the first signal asked for."""

    async def run(self) -> int:
        """Runs terms until the job has ended, or another master has it; returns the exit code."""
        loop = asyncio.get_running_loop()
        # SIGINT is handled also where a shell has it ignored, as it does for what a script runs in the background.
        handled = set(STOPS)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started by nohup: meant to outlive its terminal
            handled.remove(signal.SIGHUP)
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        hangups: Hangups | None = None
        if self._on_reload is not None and signal.SIGHUP in handled:
            hangups = Hangups(lambda: loop.call_soon_threadsafe(self._on_signal, signal.SIGHUP), self._on_reload)
            loop.add_signal_handler(signal.SIGHUP, hangups.note)
        former: Backend | None = None
        epoch = 0
        try:
            while True:
                if former is not None and self._is_not_to_wait:
                    await _closed(former, end=False)
                    former = None
                    return await self._last_term(epoch)
                try:
                    mastership = await asyncio.to_thread(self._acquire, epoch)
                except (StoreError, MasterHeld):
                    if former is None or not self._is_not_to_wait:
                        raise
                    continue
                if former is not None:
                    await _closed(former, end=False)
                    former = None
                epoch = mastership.epoch
                try:
                    if (ended := self._read_outcome()) is not None:
                        return ended.code
                    result = await self._term(mastership)
                finally:
                    await asyncio.to_thread(mastership.give_back)
                if isinstance(result, job_files.OutcomeFile):
                    return result.code
                former = result
        except MasterHeld as error:
            if (ended := self._read_outcome()) is not None:
                return ended.code
            logger.warning("%s", error)
            return LOST if epoch else HELD
        finally:
            if former is not None:
                await _closed(former, end=False)
            if self._control is not None:
                await self._control.close()
            self._master = None
            if self._standby is not None:
                self._standby.stop_watching()
            for number in handled:
                loop.remove_signal_handler(number)
            if hangups is not None:
                await asyncio.to_thread(hangups.close)

    def _acquire(self, former_epoch: int) -> Mastership:
        """Takes the mastership. Blocks. Raises `MasterHeld`, `StoreError`."""

        def predecessor() -> tuple[int, Identity] | None:
            known = job_files.read_master(self._directory)
            if known is None:
                return None
            return known.epoch, Identity(known.machine, known.pid, known.started)

        return acquire(
            self._store,
            terms_of(self._job.spec.lease_seconds, self._store),
            patience=float("inf") if former_epoch else self._patience,
            give_up=self._give_up,
            predecessor=predecessor,
            former_epoch=former_epoch,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        """Stops the job in order; a second signal kills it. A master that waits only ends."""
        request = StopRequested(STOPS[number], 128 + number, "", 0.0)
        self.signalled = self.signalled or request
        self._give_up.set()
        if self._master is not None:
            self._master.emit(request)
            if self._alone:
                asyncio.get_running_loop().call_later(WRITE_SECONDS, self._lose_if_stuck, self._master)

    @property
    def _is_not_to_wait(self) -> bool:
        """Whether the job is to be stopped although the storage fails."""
        return self._alone and self.signalled is not None

    def _lose_if_stuck(self, master: MasterTerm) -> None:
        """Ends a term that waits for its journal although it was asked to end; a write may fail later than this first looks."""
        if master.durable.trouble:
            master.lose(master.durable.trouble)
        elif self._master is master:
            asyncio.get_running_loop().call_later(WRITE_SECONDS, self._lose_if_stuck, master)

    def _read_outcome(self) -> job_files.OutcomeFile | None:
        self.outcome = job_files.read_outcome(self._directory)
        return self.outcome

    # --- one term ---

    async def _term(self, mastership: Mastership) -> job_files.OutcomeFile | Backend | None:
        """Runs one term. Returns the job's outcome, or the backend that goes on to inform the agents, or None."""
        me = Identity.of_this_process()
        epoch = mastership.epoch
        logger.info("master of %s with epoch %d, process %d", self._job.spec.name, epoch, me.pid)
        with contextlib.suppress(OSError):  # a full disk; it only makes a takeover quicker
            file = job_files.MasterFile(epoch=epoch, machine=me.machine, pid=me.pid, started=me.started)
            job_files.write_privately(self._directory / job_files.MASTER_FILE, file)
        backend = open_backend(self._job.backend, self._job.spec, self._directory, epoch, self._job.options)
        master = MasterTerm(
            Orders(self._job.spec, self._directory, self._job.path),
            self._store,
            backend,
            epoch,
            (lambda: None) if self._alone else (lambda: mastership.lost),
            self._faults,
            self._observer,
        )
        if self._master is None and self.signalled is not None:  # it came before there was a master to tell
            master.emit(self.signalled)
        self._master = master
        loop = asyncio.get_running_loop()
        if not self._alone:  # else nobody can have taken it, and the term waits for its journal as it is
            mastership.on_lost(lambda: loop.call_soon_threadsafe(master.lose, mastership.lost or "lost"))
        await self._listen()
        if self._standby is not None:
            self._standby.watch()
        try:
            outcome = await master.run(self._stop_first)
        except MastershipLost as error:
            logger.error("the mastership with epoch %d is lost: %s", epoch, error)
            master.durable.trouble = f"the mastership is lost: {error}"
            return backend
        except CapacityError as error:
            outcome = Outcome(1, f"the job cannot start: {error}")
        except Exception as error:
            logger.exception("the master failed")
            self._failures += 1
            log = "the output of this command" if self._alone else f"{self._directory}/{job_files.MASTER_LOG}"
            reason = f"the master failed: {error!r}"[: LONGEST_REASON - 200] + f"; see {log}"
            if self._failures < 2 and not isinstance(error, ClusterError):
                self._stop_first = StopRequested(reason, 1, "", 0.0)
                await _closed(backend, end=False)
                return None
            outcome = Outcome(1, reason)
            # Perhaps it failed for that reason; how the job ends is another's to say.
            if mastership.lost is not None and not self._alone:
                await _closed(backend, end=False)
                return None
        return await self._end(backend, master, outcome)

    async def _last_term(self, epoch: int) -> int:
        """Stops the job in order without a word in the journal, which cannot be written; returns the exit code.

        The agents obey only if no later master was there. What was decided and not journalled had not begun.
        """
        logger.warning("the job is stopped although its journal cannot be written")
        backend = open_backend(self._job.backend, self._job.spec, self._directory, epoch, self._job.options)
        orders = Orders(self._job.spec, self._directory, self._job.path)
        own = epoch + 1  # in this process's memory alone: what it decides follows what it decided as the last master
        master = MasterTerm(
            orders, self._store, backend, own, faults=self._faults, observer=self._observer, writes=False
        )
        self._master = master
        try:
            outcome = await master.run(self.signalled)
        except MastershipLost as error:
            logger.error("another master has taken over: %s", error)
            await _closed(backend, end=False)
            return LOST
        except BaseException:
            await _closed(backend, end=False)
            raise
        return (await self._end(backend, master, outcome)).code

    async def _listen(self) -> None:
        if self._control is None:
            self._control = ControlServer(job_files.control_path(self._directory), self._answer)
            await self._control.start()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._master is not None
        return await queries.answer(self._master, self._directory, request)

    async def _end(self, backend: Backend, master: MasterTerm, outcome: Outcome) -> job_files.OutcomeFile:
        """Ends what is left of the job, and writes how it ended: whoever is not alone needs to know."""
        await _closed(backend, end=True)
        if self._standby is not None:
            await self._standby.end()
        status = queries.status(master, self._directory)
        status["stage"] = "STOPPED"
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
        return file


async def _closed(backend: Backend, *, end: bool) -> None:
    """Closes a backend; logs what it raises, since nothing can be done about it."""
    try:
        async with asyncio.timeout(END_SECONDS):
            await backend.close(end=end)
    except Exception:
        logger.exception("the backend was not closed in order")


def main(arguments: Sequence[str]) -> int:
    """Runs the master of the job in a directory; returns the exit code: the job's, `LOST`, `HELD` or `CANNOT_RUN`."""
    parser = argparse.ArgumentParser(
        "python -m counterpoint.cluster.master", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("directory", type=Path, help="the job's directory, which `submit` made")
    parser.add_argument(
        "--standby", action="store_true", help="wait as long as another master lives, and then take over"
    )
    parser.add_argument("--keep-standby", action="store_true", help="keep a further process that waits to take over")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s")
    directory = given.directory.resolve()
    try:
        job = job_files.read_job(directory)
        store = open_proven(job.journal or str(directory / job_files.JOURNAL))
        standby = Standby(directory) if given.keep_standby else None
        process = MasterProcess(directory, job, store, is_standby=given.standby, standby=standby)
        return asyncio.run(process.run())
    except (ClusterError, StoreError, ValueError, ImportError) as error:
        logger.error("%s", error)
        return CANNOT_RUN
