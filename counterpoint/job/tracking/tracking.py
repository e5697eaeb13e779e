"""Keeps a process for each sink: starts it, kills one that hangs, starts a dead one again, and drops one that keeps failing.

Each sink has a process of its own, so none can hold up another, and none can touch training: they only read the job's files. One
that dies or hangs is started again after a pause that doubles; one that fails `ATTEMPTS` times without having sent anything in
between is dropped, with a message. What it lacks can be sent later (`counterpoint track`).

A job runs all this as one worker with `essential = false`. The sinks are not workers themselves: `counterpoint track` also
serves a job that has ended, where nothing else supervises; and a role has no rule by which failures count only until a row is
taken, nor one by which a task that is given up leaves the other tasks alone.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from subprocess import PIPE

from counterpoint.job.tracking.sink_process import SinkSpec
from counterpoint.transport.process.child import Child

logger = logging.getLogger(__name__)

ATTEMPTS = 20
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0

START_SECONDS = 300.0
"""How long a sink may take to its first pass: libraries are imported, W&B is asked, and the machine may be busy."""

STALL_SECONDS = 120.0
"""A sink that makes no pass for so long hangs."""

FINISH_SECONDS = 60.0
"""How long the sinks may take in the end to send what is left."""

POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient `Tracking` is."""

    attempts: int = ATTEMPTS
    first_pause_seconds: float = FIRST_PAUSE_SECONDS
    start_seconds: float = START_SECONDS
    stall_seconds: float = STALL_SECONDS
    finish_seconds: float = FINISH_SECONDS


@dataclass(slots=True)
class _Process:
    """One sink's process, or its absence."""

    spec: SinkSpec
    process: Child | None = None
    beats: int = -1
    """The descriptor at which its reports are read."""
    heard: float = 0.0
    began: bool = False
    """Whether it has reported since its process was started."""
    sent: int = 0
    failures: int = 0
    """Failures in a row, without a row sent in between."""
    next_start: float = 0.0
    hung: bool = False
    state: str = "running"
    """`running`, `done` or `dropped`."""
    reason: str = field(default="")


class Tracking:
    """The sinks of one job. Used by one thread."""

    def __init__(self, specs: Sequence[SinkSpec], limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._sinks = [_Process(spec) for spec in specs]
        self._selector = selectors.DefaultSelector()
        self._ending = False

    def run(
        self,
        over: Callable[[], bool],
        watch: Callable[[str], None] = lambda trouble: None,
        hurry: Callable[[], bool] = lambda: True,
    ) -> list[str]:
        """Runs until `over`, and sends what is left then. Returns the names of the sinks that were dropped or not finished.

        `watch` is called about four times a second, with what is wrong or with an empty text. Without `hurry` the end takes as
        long as the sinks make progress, with it `finish_seconds`.
        """
        try:
            while not over():
                self._pass(time.monotonic())
                watch(self._trouble())
            self._finish(watch, hurry)
        finally:
            for sink in self._sinks:
                self._end(sink)
            self._selector.close()
        return [sink.spec.name for sink in self._sinks if sink.state != "done"]

    def _pass(self, now: float) -> None:
        for sink in self._sinks:
            if sink.process is None and sink.state == "running" and not self._ending and now >= sink.next_start:
                self._start(sink, now)
        for key, _ in self._selector.select(POLL_SECONDS):
            self._hear(key.data, time.monotonic())
        for sink in self._sinks:
            if sink.process is not None:
                self._look_after(sink, time.monotonic())

    def _start(self, sink: _Process, now: float) -> None:
        beats, given = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(beats, False)
        command = [
            sys.executable,
            "-P",
            "-m",
            "counterpoint.job.tracking.sink_process",
            str(given),
            sink.spec.to_json(),
        ]
        try:
            sink.process = Child(sink.spec.name, command, pass_fds=(given,), stdin=PIPE)
        except OSError as error:
            os.close(beats)
            self._failed(sink, f"could not be started: {error}", now)
            return
        finally:
            os.close(given)
        sink.beats, sink.heard, sink.began, sink.sent, sink.hung = beats, now, False, 0, False
        self._selector.register(beats, selectors.EVENT_READ, sink)

    def _hear(self, sink: _Process, now: float) -> None:
        try:
            data = os.read(sink.beats, 65536)
        except BlockingIOError:
            return
        if not data:  # it has ended; `_look_after` reads its code
            if sink.beats in self._selector.get_map():
                self._selector.unregister(sink.beats)
            return
        sink.heard, sink.began = now, True
        sent = int(data.split()[-1]) if data.endswith(b"\n") else 0
        if sent > sink.sent:
            sink.sent, sink.failures = sent, 0

    def _look_after(self, sink: _Process, now: float) -> None:
        assert sink.process is not None
        code = sink.process.code
        if code is None:
            limit = self._limits.stall_seconds if sink.began else self._limits.start_seconds
            if now - sink.heard > limit and not sink.hung:
                sink.hung = True
                sink.process.kill_soon()
            return
        self._hear(sink, now)  # what it reported last
        self._forget(sink)
        if code == 0:
            sink.state = "done"
            return
        limit = self._limits.stall_seconds if sink.began else self._limits.start_seconds
        self._failed(sink, f"hung for {limit:g} s and was killed" if sink.hung else f"ended with code {code}", now)

    def _failed(self, sink: _Process, reason: str, now: float) -> None:
        sink.failures += 1
        sink.reason = reason
        name, limits = sink.spec.name, self._limits
        if sink.failures >= limits.attempts:
            sink.state = "dropped"
            logger.error(
                "%s %s, %d times without having taken a row; it gets nothing any more. Its messages are above. Training goes "
                "on. Once it works, `%s` sends what it lacks",
                name,
                reason,
                sink.failures,
                _command_of(sink.spec),
            )
            return
        if self._ending:
            logger.warning("%s %s", name, reason)
            return
        pause = min(limits.first_pause_seconds * 2 ** (sink.failures - 1), LONGEST_PAUSE_SECONDS)
        sink.next_start = now + pause
        logger.warning("%s %s; it is started again in %g s", name, reason, pause)

    def _finish(self, watch: Callable[[str], None], hurry: Callable[[], bool]) -> None:
        """Asks all to send what is left. One that waits to be tried again is tried for the last time."""
        until, self._ending = math.inf, True
        for sink in self._sinks:
            if sink.process is None and sink.state == "running":
                self._start(sink, time.monotonic())
            if sink.process is not None:
                sink.process.stdin.close()  # a signal could come before it is able to handle it
        while time.monotonic() < until and any(sink.process is not None for sink in self._sinks):
            if hurry():
                until = min(until, time.monotonic() + self._limits.finish_seconds)
            self._pass(time.monotonic())
            watch(self._trouble())
        for sink in self._sinks:
            if sink.state == "running":
                logger.warning(
                    "%s did not get everything; `%s` sends what it lacks", sink.spec.name, _command_of(sink.spec)
                )

    def _trouble(self) -> str:
        """What is wrong, for people."""
        words = [
            f"{sink.spec.name} {'gets nothing any more: it ' if sink.state == 'dropped' else ''}{sink.reason}"
            for sink in self._sinks
            if sink.state == "dropped" or sink.failures
        ]
        return "; ".join(words)

    def _end(self, sink: _Process) -> None:
        if sink.process is not None:
            sink.process.kill()
            self._forget(sink)

    def _forget(self, sink: _Process) -> None:
        if sink.beats in self._selector.get_map():
            self._selector.unregister(sink.beats)
        if sink.process is not None:
            sink.process.close()
        os.close(sink.beats)
        sink.process, sink.beats = None, -1


def _command_of(spec: SinkSpec) -> str:
    """Returns the command that sends what a sink lacks."""
    return f"counterpoint track {spec.job} --to {spec.name}"
