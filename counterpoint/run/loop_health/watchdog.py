"""Names every wait, and logs what is awaited when there is no progress.

`awaiting(what, where)` registers a wait during its block. The watchdog is a thread, so that it also notices a blocked loop.
Without progress it logs the scheduler's reasons and every wait with its age; of a blocked loop it logs the Python stack. It sends
heartbeats to the supervisor, or to systemd, only while the loop runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta

from counterpoint.run.loop_health.stacks import place_of, stack_of
from counterpoint.transport.outages import Outages
from counterpoint.transport.process.notify import Heartbeat

logger = logging.getLogger(__name__)

FAILING = "its rollouts fail"
"""How the words begin about a run that makes no progress for that reason."""

TROUBLE_SHARE = 0.25
"""Share of `stall_warning_seconds` without progress after which a trouble is reported to the supervisor."""

USUAL_SECONDS = 600.0
"""How long a time without progress that came to its end counts as usual for the run, such as that of steps of 40 s."""

_REPORTED_WAITS = 12
"""Waits in one report; hundreds of rollouts may wait for the same thing."""


class awaiting:
    """Registers `what` (a noun: "the trainer's READY") and `where` (an address, a path) as awaited during the block.

    It is the wait itself, since every turn makes one.
    """

    __slots__ = ("since", "what", "where")

    def __init__(self, what: str, where: str = "") -> None:
        self.what, self.where = what, where

    def __enter__(self) -> None:
        self.since = time.monotonic()
        """The beginning of the wait, on the monotonic clock, in seconds."""
        _waits[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del _waits[id(self)]


_waits: dict[int, awaiting] = {}


def waits() -> list[awaiting]:
    """Returns the present waits, the oldest first."""
    return sorted(_waits.copy().values(), key=lambda wait: wait.since)


def describe_waits() -> str:
    """Returns the waits as one line for people, the oldest first."""
    now, current = time.monotonic(), waits()
    lines = [
        f"{wait.what}{f' ({wait.where})' if wait.where else ''} for {now - wait.since:.1f} s"
        for wait in current[:_REPORTED_WAITS]
    ]
    if len(current) > _REPORTED_WAITS:
        lines.append(f"and {len(current) - _REPORTED_WAITS} more")
    return "; ".join(lines) or "nothing of its own (what an environment's code waits for is not known)"


class StallError(RuntimeError):
    """No progress for `stall_timeout_seconds`."""


class Watchdog:
    """Watches progress from a thread. `describe` is called on the loop and returns what the scheduler waits for."""

    def __init__(
        self,
        warning_seconds: float,
        timeout_seconds: float | None,
        describe: Callable[[], str],
        outages: Outages | None = None,
    ) -> None:
        """`outages` say more about a lack of progress than what happens to wait for their end."""
        self._outages = Outages() if outages is None else outages
        self._warning_seconds = warning_seconds
        self._timeout_seconds = timeout_seconds
        self._describe = describe
        self.failing = ""
        """The failure of most rollouts since the last progress; empty for none."""
        self._heartbeat = Heartbeat()
        self._stop = threading.Event()
        self._last_beat = self._last_progress = time.monotonic()
        self._longest = 0.0
        """The longest time without progress, in seconds, of those that ended lately."""
        self._longest_at = self._last_progress
        self._reported_stall = self._reported_block = -float("inf")
        self._loop_thread = threading.get_ident()
        self._seen_at = -float("inf"), ""
        """The last beat before the newest block, and the line at which that block was first seen."""

    def beat(self) -> None:
        """Records that the loop runs. Called on it several times a second."""
        self._last_beat = time.monotonic()

    def progress(self) -> None:
        """Records progress of the run."""
        now = time.monotonic()
        idle, self._last_progress, self.failing = now - self._last_progress, now, ""
        if idle >= self._longest or now - self._longest_at > USUAL_SECONDS:
            self._longest, self._longest_at = idle, now

    async def run(self) -> None:
        """Watches until cancelled. Raises `StallError` after `timeout_seconds` without progress."""
        loop, stalled = asyncio.get_running_loop(), asyncio.Event()
        self.beat()
        self.progress()
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, stalled), name="watchdog", daemon=True).start()
        try:
            await stalled.wait()
            raise StallError(
                f"no progress for {self._timeout_seconds} s (stall_timeout_seconds); {self._out}awaited: {describe_waits()}; "
                f"the scheduler: {self._describe()}"
            )
        finally:
            self._stop.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, stalled: asyncio.Event) -> None:
        feed_seconds = self._heartbeat.period
        period = min(1.0, self._warning_seconds / 4, feed_seconds or 1.0)
        while not self._stop.wait(period):
            now = time.monotonic()
            silent, idle = now - self._last_beat, now - self._last_progress
            if feed_seconds is not None and silent < feed_seconds:
                self._heartbeat.beat()
            self._heartbeat.report(self._trouble(silent, idle))
            if silent >= self._warning_seconds:
                self._report_block(now, silent)
            elif idle >= self._warning_seconds and now - self._reported_stall >= self._warning_seconds:
                self._reported_stall = now
                _on_loop(loop, self._report_stall)
            if self._timeout_seconds is not None and idle >= self._timeout_seconds:
                if silent < self._timeout_seconds:
                    _on_loop(loop, stalled.set)
                else:
                    # A blocked loop cannot raise. What is on disk is complete; exit as after a SIGKILL.
                    sys.stderr.write(f"error: the event loop has been blocked for {silent:.0f} s; giving up\n")
                    sys.stderr.flush()
                    os._exit(1)

    def _trouble(self, silent: float, idle: float) -> str:
        """Returns the trouble to show in the job's status, earlier than the log reports it; empty for none.

        Where nothing is known to be wrong, a time that is not twice as long as others before it is no trouble.
        """
        if max(silent, idle) < self._warning_seconds * TROUBLE_SHARE:
            return ""
        since = (datetime.now() - timedelta(seconds=max(silent, idle))).strftime("%H:%M:%S")
        if silent >= self._warning_seconds * TROUBLE_SHARE:
            return f"its event loop has been blocked since {since}{self._blocked_at()}"
        if out := self._outages.describe():
            if self._outages.are_expected:  # the status says what is waited for
                return ""
            return f"no progress since {since}; {out}"
        if failing := self.failing:  # then the rollout that happens to run is of no interest
            return f"no progress since {since}; {FAILING}: {failing}"
        if idle < min(2 * self._longest, self._warning_seconds):
            return ""
        awaited = waits()
        what = (
            f"; it waits for {awaited[0].what}{f' ({awaited[0].where})' if awaited[0].where else ''}" if awaited else ""
        )
        return f"no progress since {since}{what}"

    def _blocked_at(self) -> str:
        """Returns the line at which the blocked loop was first seen; later looks at the same block return the same line."""
        if self._seen_at[0] != self._last_beat:
            place = place_of(stack_of(sys._current_frames().get(self._loop_thread)))
            self._seen_at = self._last_beat, f" at {place.function} ({place.file}:{place.line})" if place.line else ""
        return self._seen_at[1]

    def _report_stall(self) -> None:
        idle = time.monotonic() - self._last_progress
        if idle < self._warning_seconds:
            return
        logger.warning(
            "no progress for %.0f s. %sAwaited: %s. The scheduler: %s",
            idle,
            self._out,
            describe_waits(),
            self._describe(),
        )

    @property
    def _out(self) -> str:
        """The outages, as the beginning of a sentence; empty for none."""
        out = self._outages.describe()
        return f"Out: {out}. " if out else ""

    def _report_block(self, now: float, silent: float) -> None:
        if now - self._reported_block < self._warning_seconds:
            return
        self._reported_block = now
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else "(the loop's thread is gone)"
        logger.error("the event loop has been blocked for %.1f s by:\n%s", silent, stack)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Schedules `function` on the loop from the watchdog's thread. Ignores a loop that has just closed."""
    if not loop.is_closed():
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the loop closed before %s could run on it", function)
