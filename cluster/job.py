"""Runs the workers of one job to their end: the shell around `cluster.lifecycle`, with real processes, signals and a clock.

Every event arrives in one place, `_apply`: a child's death (SIGCHLD), a worker's notification, a deadline, SIGTERM or
Ctrl-C. No process is left behind: each worker's guardian kills the processes that the worker leaves, and this process, a
subreaper itself, kills those that a killed guardian leaves.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cluster import launch
from cluster.clock import RunningClock
from cluster.events import (
    ENDED,
    BecameReady,
    Begin,
    EndAnnounced,
    Event,
    Exited,
    ExtensionRequested,
    GuestsChanged,
    HeartbeatReceived,
    Kill,
    Outcome,
    Spawn,
    SpawnFailed,
    State,
    StopRequested,
    Terminate,
    Tick,
    Worker,
)
from cluster.lifecycle import Lifecycle
from cluster.log_rotation import rotate_if_full
from cluster.process import Process

logger = logging.getLogger(__name__)

PULSE_SECONDS = 1.0
"""Longest time between two reads of the clock."""

SHOWN_SILENCE_SECONDS = 15.0
"""Silence of a worker, which should send a heartbeat every 5 s, before it is shown."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell's."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The state of a worker, for display."""

    name: str
    state: State
    since: float
    """When it entered that state, `time.time()`."""
    pid: int | None
    """Of the command itself; None before it is known and after its end."""
    status: str
    """The last `STATUS=` it sent."""
    log_from: int | None = None
    """Where its output begins in its log, in bytes, restarts included; None before it is started."""
    log_until: int | None = None
    """Where its output ended when it was sent SIGTERM; None unless it was."""
    restarts: int = 0
    """How often it was started again."""
    last_death: str = ""
    """How it died last, in words; empty unless it did."""
    last_output: str = ""
    """The last line of its output when it died last."""
    trouble: str = ""
    """What is wrong with it while it lives, in words: a problem that it reports, or its silence. Empty if nothing is wrong."""


class Job:
    """Supervises workers. One at a time in a process, since it reaps every child and, at the end, kills every descendant.

    It must run in the main thread, on asyncio's own loop (uvloop keeps SIGCHLD to itself).
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        on_change: Callable[[Job], None] = lambda job: None,
        guests: Callable[[], Sequence[str]] = lambda: (),
        stay: bool = False,
    ) -> None:
        """Takes the workers in their order, and callbacks.

        `on_change` is called, on the loop, after anything that `views` shows has changed. `guests` returns the names of the
        job's guests; it is called before the services are stopped because all tasks have ended. With `stay` they never are.
        An exception of either callback is logged and does not end the job.
        """
        self.lifecycle = Lifecycle(workers, stay)
        self._on_change = on_change
        self._guests = guests
        self._log_from: dict[str, int] = {}
        self._last_output: dict[str, str] = {}
        self._processes: dict[str, Process] = {}
        self._since = dict.fromkeys(self.lifecycle.workers, time.time())
        self._timer: asyncio.TimerHandle | None = None
        self._clock = RunningClock()
        self._logged_failures: set[str] = set()

    @property
    def state(self) -> State:
        """The state of the job as a whole."""
        return self.lifecycle.state

    def views(self) -> list[WorkerView]:
        """Returns the workers as they are, in their order."""
        return [self._view(name) for name in self.lifecycle.workers]

    def _view(self, name: str) -> WorkerView:
        process, state = self._processes.get(name), self.lifecycle.states[name]
        known = process.main_pid if process is not None and state not in ENDED | {State.RESTARTING} else None
        return WorkerView(
            name,
            state,
            self._since[name],
            known,
            process.status if process is not None else "",
            self._log_from.get(name),
            process.log_until if process is not None else None,
            self.lifecycle.restarts[name],
            self.lifecycle.last_deaths[name],
            self._last_output.get(name, ""),
            self._trouble(name),
        )

    def _trouble(self, name: str) -> str:
        if self.lifecycle.states[name] in ENDED | {State.RESTARTING} or name not in self._processes:
            return ""
        silent = self.lifecycle.silent_for(name, self._clock.read())
        if silent < SHOWN_SILENCE_SECONDS:
            return self._processes[name].trouble
        return f"silent since {time.strftime('%H:%M:%S', time.localtime(time.time() - silent))}"

    async def run(self) -> Outcome:
        """Starts the workers and returns when all of them have ended. No process is left, whatever happens."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Outcome] = self._loop.create_future()
        launch.become_subreaper()
        self._loop.set_exception_handler(self._on_callback_failure)
        handled = self._install_signal_handlers()
        try:
            self._apply(Begin(self._clock.read()))
            return await self._finished
        finally:
            self._loop.set_exception_handler(None)
            for number in handled:
                self._loop.remove_signal_handler(number)
            if self._timer:
                self._timer.cancel()
            launch.kill_descendants()
            for process in self._processes.values():
                self._forget(process)

    def stop(self, reason: str, code: int) -> None:
        """Stops the job in order; a second call kills it.

        `code` is the job's exit code if the workers stop cleanly before its work is complete.
        """
        self._apply(StopRequested(reason, code, self._clock.read()))

    def check_guests(self) -> None:
        """Notices guests that have come or gone. Call it regularly.

        When the last guest leaves, a job whose tasks have ended ends.
        """
        guests = self.observe(lambda: tuple(self._guests()), otherwise=self.lifecycle.guests)
        if guests is not None and guests != self.lifecycle.guests and self.lifecycle.outcome is None:
            self._apply(GuestsChanged(guests, self._clock.read()))

    def rotate_full_logs(self) -> None:
        """Keeps the workers' output bounded. Call it regularly."""
        for name, process in self._processes.items():
            log_file = process.worker.log_file
            if self.observe(partial(rotate_if_full, log_file), otherwise=False):
                process.log_from, self._log_from[name] = 0, 0
                process.log_until = None if process.log_until is None else 0

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

    def _install_signal_handlers(self) -> list[signal.Signals]:
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGCHLD: self._collect_exits,
            signal.SIGINT: lambda: self.stop("interrupted by Ctrl-C", INTERRUPTED),
            signal.SIGTERM: lambda: self.stop("stopped by SIGTERM", 128 + signal.SIGTERM),
            signal.SIGHUP: lambda: self.stop("the terminal was closed (SIGHUP)", 128 + signal.SIGHUP),
        }
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started by nohup: meant to outlive its terminal
            del handlers[signal.SIGHUP]
        for number, handler in handlers.items():
            self._loop.add_signal_handler(number, handler)
        return list(handlers)

    def _on_callback_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Stops the job in order after an exception in a callback, which is a bug of ours.

        The job might otherwise wait for ever. If stopping fails, too, everything is killed.
        """
        loop.default_exception_handler(context)
        error = context.get("exception") or RuntimeError(context["message"])
        try:
            self.stop(f"the supervisor failed: {error!r}", 1)
        except Exception as further:  # noqa: BLE001 - it is raised where the job is awaited
            if not self._finished.done():
                self._finished.set_exception(further)

    def _apply(self, event: Event) -> None:
        """Handles one event, and those that it causes at once."""
        events = [event]
        while events:
            events += self._handle(events.pop(0))
        self._set_timer()
        if self.lifecycle.outcome is not None and not self._finished.done():
            self._finished.set_result(self.lifecycle.outcome)
        self._changed()

    def _changed(self) -> None:
        self.observe(lambda: self._on_change(self), otherwise=None)

    def _handle(self, event: Event) -> list[Event]:
        """Carries out the instructions for an event; returns the events that this caused at once."""
        before = dict(self.lifecycle.states)
        instructions = self.lifecycle.handle(event)
        for name, state in self.lifecycle.states.items():
            if state is not before[name]:
                self._since[name] = time.time()
        failures: list[Event] = []
        for instruction in instructions:
            match instruction:
                case Spawn(name, again):
                    try:
                        self._spawn(name, again)
                    except OSError as error:
                        failures.append(SpawnFailed(name, str(error), self._clock.read()))
                case Terminate(name) if name in self._processes:  # else its start has just failed
                    self._processes[name].terminate()
                case Kill(name) if name in self._processes:
                    self._processes[name].kill()
        return failures

    def _spawn(self, name: str, again: bool) -> None:
        """Starts the worker. Raises `OSError` as `Process` does."""
        if name in self._processes:
            self._forget(self._processes.pop(name))
            launch.kill_orphans([process.guardian_pid for process in self._processes.values()])
        process = Process(self.lifecycle.workers[name], again)
        self._processes[name] = process
        self._log_from.setdefault(name, process.log_from)
        self._loop.add_reader(process.notifications.fileno(), self._read_notifications, name)

    def _forget(self, process: Process) -> None:
        self._loop.remove_reader(process.notifications.fileno())
        process.close()

    def _read_notifications(self, name: str) -> None:
        received, at = self._processes[name].read_notifications(), self._clock.read()
        if "WATCHDOG" in received:
            self._apply(HeartbeatReceived(name, at))
        if "READY" in received:
            self._apply(BecameReady(name, at))
        if "STOPPING" in received:
            self._apply(EndAnnounced(name, at))
        if (seconds := self._processes[name].take_extension()) > 0:
            self._apply(ExtensionRequested(name, seconds, at))
        self._changed()

    def _collect_exits(self) -> None:
        """Reaps every child. One that is no guardian is an orphan of a killed guardian, and is ignored."""
        names = {process.guardian_pid: name for name, process in self._processes.items()}
        for pid, code in launch.reap():
            if pid in names:
                self.check_guests()
                process = self._processes[names[pid]]
                process.read_notifications()  # what is still queued
                if code != 0:
                    self._last_output[names[pid]] = self.observe(process.last_output, otherwise="")
                self._apply(Exited(names[pid], code, self._clock.read()))

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        deadline, now = self.lifecycle.deadline, self._clock.read()
        delay = PULSE_SECONDS if deadline is None else max(0.0, min(PULSE_SECONDS, deadline - now))
        self._timer = self._loop.call_later(delay, self._on_time)

    def _on_time(self) -> None:
        """Applies a `Tick` if the deadline has passed; reads the clock."""
        deadline, now = self.lifecycle.deadline, self._clock.read()
        if deadline is not None and deadline <= now:
            self._apply(Tick(now))
        else:
            self._set_timer()
