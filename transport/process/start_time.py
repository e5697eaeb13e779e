"""How long a role may take until it is ready: as long as was set, and longer while its processes compute.

A model that is large, or a machine that is busy, makes a start long; what hangs computes nothing. While CPU time grows, the
supervisor is asked for more time (`EXTEND_TIMEOUT_USEC`), up to `LONGEST_STARTS` times what was set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from counterpoint.transport.process.notify import StatusLine, notify

LONGEST_STARTS = 4
"""A start that computes has at most so many times its time: what waits in a loop computes, too."""

LOOK_SECONDS = 10.0
"""Longest time between two looks at the CPU time."""

LEAST_SHARE = 0.05
"""Share of a core that shows progress. Processes that only poll need less."""

EXTENSION_SECONDS = 60.0
"""Seconds that a start has from a look at which it computes."""


class StartTime:
    """The time of one start. Call `look` often, from its beginning on."""

    def __init__(self, setting: str, seconds: float, cpu_seconds: Callable[[], float]) -> None:
        """`setting` names the `seconds`; `cpu_seconds` returns the CPU time that the start has used so far."""
        self._setting, self._seconds, self._cpu_seconds = setting, seconds, cpu_seconds
        self._began = self._looked = time.monotonic()
        self._pause = min(LOOK_SECONDS, seconds / 4)
        self._used = 0.0
        self._until = self._began + seconds
        self._latest = self._began + LONGEST_STARTS * seconds
        self._latest_shown = time.strftime("%H:%M:%S", time.localtime(time.time() + LONGEST_STARTS * seconds))
        self._status = StatusLine()

    def look(self) -> None:
        """Gives the start more time if it computes."""
        now = time.monotonic()
        if now - self._looked < self._pause:
            return
        used = self._cpu_seconds()
        computes = used - self._used >= LEAST_SHARE * (now - self._looked)
        self._looked, self._used = now, used
        if not computes or now >= self._latest:
            return
        seconds = min(EXTENSION_SECONDS, self._latest - now)
        self._until = max(self._until, now + seconds)
        notify(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")
        if now - self._began > self._seconds:
            self._status.show(f"takes longer than {self._setting}, and computes: it has until {self._latest_shown}")

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() > self._until

    def __str__(self) -> str:
        """Returns what a person is told once the time has passed."""
        taken = time.monotonic() - self._began
        is_longer = taken > self._seconds + LOOK_SECONDS
        within = (
            f"{self._setting}, nor in the {taken:.0f} s that it had since it computed" if is_longer else self._setting
        )
        return f"it was not ready within {within}; its CPU time was {self._cpu_seconds():.0f} s"


@contextmanager
def asking_for_time(seconds: float) -> Iterator[None]:
    """Asks the supervisor for more time from a thread while the block, the start of this process, runs and computes."""
    start, ended = StartTime(f"its {seconds:g} s", seconds, time.process_time), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            start.look()

    thread = threading.Thread(target=watch, name="time to start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
