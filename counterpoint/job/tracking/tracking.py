"""Keeps a process for each sink: starts it, kills one that hangs, starts a dead one again, and drops one that keeps failing.

Each sink has a process of its own, so none can hold up another, and none can touch training: they only read the job's files. One
that dies or hangs is started again after a pause that doubles; one that fails `ATTEMPTS` times without having sent anything in
between is dropped, with a message. `counterpoint track` can send later what it lacks.

A job runs all this as one worker with `essential = false`. The sinks are not workers themselves: `counterpoint track` also
serves a job that has ended, where nothing else supervises; and a role has no rule by which failures count only until a row is
taken, nor one by which a task that is given up leaves the other tasks alone.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import PIPE

from counterpoint.job.tracking.sink_process import SinkSpec
from counterpoint.transport.process.child import Child, ChildError

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


class Tracking:
    """The sinks of one job, each kept by a thread."""

    def __init__(self, specs: Sequence[SinkSpec], limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._ending, self._abandoned = threading.Event(), threading.Event()
        self._sinks = [_Kept(spec, self._limits, self._ending, self._abandoned) for spec in specs]

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
        threads = [threading.Thread(target=sink.keep, name=sink.spec.name, daemon=True) for sink in self._sinks]
        for thread in threads:
            thread.start()
        try:
            while not over():
                time.sleep(POLL_SECONDS)
                watch(self._trouble())
            self._ending.set()
            until = math.inf
            while time.monotonic() < until and any(thread.is_alive() for thread in threads):
                if hurry():
                    until = min(until, time.monotonic() + self._limits.finish_seconds)
                time.sleep(POLL_SECONDS)
                watch(self._trouble())
        finally:
            self._abandoned.set()
            self._ending.set()
            for thread in threads:
                thread.join()
        for sink in self._sinks:
            if sink.state == "running":
                logger.warning("%s did not get everything; `%s` sends what it lacks", sink.spec.name, sink.command)
        return [sink.spec.name for sink in self._sinks if sink.state != "done"]

    def _trouble(self) -> str:
        """Returns what is wrong, for people."""
        return "; ".join(
            f"{sink.spec.name} {'gets nothing any more: it ' if sink.state == 'dropped' else ''}{sink.reason}"
            for sink in self._sinks
            if sink.state == "dropped" or sink.failures
        )


class _Kept:
    """One sink, whose process a thread keeps. Other threads read its attributes."""

    def __init__(self, spec: SinkSpec, limits: Limits, ending: threading.Event, abandoned: threading.Event) -> None:
        """`ending`: what is left is to be sent. `abandoned`: the process is to be killed."""
        self.spec = spec
        self.failures = 0
        """Failures in a row, without a row sent in between."""
        self.reason = ""
        """Why its process failed last."""
        self.state = "running"
        """`running`, `done` or `dropped`."""
        self.command = f"counterpoint track {spec.job} --to {spec.name}"
        """The command that sends what the sink lacks."""
        self._limits, self._ending, self._abandoned = limits, ending, abandoned

    def keep(self) -> None:
        """Keeps a process until it has sent everything, or is dropped. After `ending` begins, it is started once more at most."""
        name, limits = self.spec.name, self._limits
        while not self._abandoned.is_set():
            is_last = self._ending.is_set()
            self.reason = self._play()
            if self._abandoned.is_set():
                return
            if not self.reason:
                self.state = "done"
                return
            self.failures += 1
            if self.failures >= limits.attempts:
                self.state = "dropped"
                logger.error(
                    "%s %s, %d times without having taken a row; it gets nothing any more. Its messages are above. Training "
                    "goes on. Once it works, `%s` sends what it lacks",
                    name,
                    self.reason,
                    self.failures,
                    self.command,
                )
                return
            if is_last:
                logger.warning("%s %s", name, self.reason)
                return
            grown = min(limits.first_pause_seconds * 2 ** (self.failures - 1), LONGEST_PAUSE_SECONDS)
            pause = 0.0 if self._ending.is_set() else grown
            logger.warning("%s %s; it is started again in %g s", name, self.reason, pause)
            self._ending.wait(pause)

    def _play(self) -> str:
        """Runs a process to its end; returns why it failed, or an empty text."""
        command = [sys.executable, "-P", "-m", "counterpoint.job.tracking.sink_process", self.spec.to_json()]
        try:
            process = Child(self.spec.name, command, stdin=PIPE, stdout=PIPE)
        except OSError as error:
            return f"could not be started: {error}"
        limit = self._limits.start_seconds
        with process:
            while True:
                try:
                    reports = process.line(limit, lambda: self._is_asked(process))
                except ChildError:
                    if self._is_asked(process):
                        if self._abandoned.is_set():
                            return "was killed"
                        process.stdin.close()  # a signal could come before it is able to handle it
                    elif (code := process.code) is None:
                        return f"hung for {limit:g} s and was killed"
                    else:
                        return f"ended with code {code}" if code else ""
                    continue
                limit = self._limits.stall_seconds
                if int(reports.split()[-1]):
                    self.failures = 0

    def _is_asked(self, process: Child) -> bool:
        """Whether it is to end, and has not been told."""
        return self._abandoned.is_set() or (self._ending.is_set() and not process.stdin.closed)
