"""One list of outages: who does not do what this process needs of it, since when, and the newest reason.

Whoever notices an outage begins it, begins it again with each further reason, and ends it. The log gets the beginning, each
reason that is new, a reminder at growing intervals, and the end. What is out at the level INFO is expected, such as a peer that
still starts: the log has it once it has lasted for `EXPECTED_SECONDS`. In an orchestrator `fleet.json` (with it
`counterpoint status` and the page), the watchdog, systemd's status and the metrics show what `current` returns; in a trainer its
status and metrics do.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from counterpoint.transport.printable import clipped

logger = logging.getLogger(__name__)

MAX_REASON = 300
"""The most characters of a reason."""

REMIND_SECONDS = (2.0, 60.0)
"""The first and the longest time between two reminders."""

EXPECTED_SECONDS = 30.0
"""The seconds after which a reminder names an outage that is expected at a start."""

_OLD_SECONDS = 12 * 3600
"""A moment longer ago than this needs its date."""

_DESCRIBED = 8
"""The most outages in one line of the log."""

_REMEMBERED_REASONS = 16
"""The most reasons of one outage that are logged; further ones are shown in reminders alone."""


class OutageKind(StrEnum):
    """What the outage is of."""

    SERVER = "server"
    TRAINER = "trainer"
    ORCHESTRATOR = "orchestrator"


@dataclass(frozen=True, slots=True)
class OpenOutage:
    """One outage that lasts."""

    kind: OutageKind
    who: str
    """Kind and address, for people: "the trainer at ipc:///a/b"."""
    what: str
    """What it does not do, as the rest of a sentence, such as "is not connected"."""
    since: float
    """Unix seconds: when `who` was last known to be well, or when the outage was noticed."""
    reason: str
    """The newest reason of the outage."""

    def __str__(self) -> str:
        """Returns a sentence that stays the same while nothing changes."""
        return f"{self.who} {self.what} since {self.clock}: {self.reason}"

    @property
    def clock(self) -> str:
        """The time since when the outage lasts, for people."""
        is_old = time.time() - self.since > _OLD_SECONDS
        return time.strftime("%Y-%m-%d %H:%M:%S" if is_old else "%H:%M:%S", time.localtime(self.since))


class Outages:
    """The outages that a process sees at present. For any thread. `on_change` is called when one begins, changes or ends."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._current: dict[str, OpenOutage] = {}
        self._logged: dict[str, set[str]] = {}
        """The reasons, by `who`, that the log has, without their numbers."""
        self._levels: dict[str, int] = {}
        self._interval, self._due = 0.0, float("inf")
        """The time between two reminders, and when the next one is due, on the monotonic clock."""

    def begin(
        self,
        kind: OutageKind,
        who: str,
        what: str,
        reason: str,
        *,
        since: float | None = None,
        level: int | None = None,
    ) -> OpenOutage:
        """Notes an outage, or what is new of one that lasts, and returns it.

        `since` is when `who` was last known to be well, in unix seconds; None: now. One that lasts keeps its own, if that is
        earlier. `level` is that of the log; None: the one that it has, or ERROR.
        """
        reason = clipped(" ".join(reason.split()), MAX_REASON)
        since = time.time() if since is None else since
        with self._lock:
            former = self._current.get(who)
            if former is not None:
                since = min(since, former.since)
            outage = self._current[who] = OpenOutage(kind, who, what, since, reason)
            level = self._levels[who] = self._levels.get(who, logging.ERROR) if level is None else level
            is_new = self._is_new(outage)
            expected = level <= logging.INFO
            if is_new and not (expected and self._due < float("inf")):
                self._remind_from(EXPECTED_SECONDS if expected else REMIND_SECONDS[0])
        if is_new:
            logger.log(
                logging.DEBUG if expected else level, "%s", f"{who} {what}: {reason}" if former is None else f"{outage}"
            )
        if former is None or replace(former, since=since) != outage:
            self._on_change()
        return outage

    def end(self, who: str) -> None:
        """Notes that `who` is well again, or of no interest any more; nothing if it was not out."""
        with self._lock:
            outage = self._current.pop(who, None)
            self._logged.pop(who, None)
            level = self._levels.pop(who, logging.INFO)
            if not self._current:
                self._due = float("inf")
        if outage is not None:
            if level > logging.INFO:
                logger.info("The outage is over: %s", outage)
            self._on_change()

    def of(self, who: str) -> OpenOutage | None:
        """Returns the outage of `who`; None if there is none."""
        return self._current.get(who)

    def current(self) -> list[OpenOutage]:
        """Returns the outages, the oldest first."""
        with self._lock:
            return sorted(self._current.values(), key=lambda outage: outage.since)

    @property
    def are_expected(self) -> bool:
        """Whether all that is out is expected, such as what still starts."""
        return all(level <= logging.INFO for level in self._levels.copy().values())

    def describe(self) -> str:
        """Returns the outages in one line for people, the oldest first; empty for none.

        What is expected is waited for; why it is not there is of interest once it has lasted.
        """
        current = self.current()
        more = [f"and {len(current) - _DESCRIBED} more"] if len(current) > _DESCRIBED else []
        return "; ".join([*map(self._in_words, current[:_DESCRIBED]), *more])

    def _in_words(self, outage: OpenOutage) -> str:
        if self._levels.get(outage.who, logging.ERROR) > logging.INFO:
            return str(outage)
        words = f"waiting for {outage.who} since {outage.clock}"
        return words if time.time() - outage.since < EXPECTED_SECONDS else f"{words}: {outage.reason}"

    def remind(self) -> None:
        """Logs the outages that last, if it is time. Call it about once a second."""
        with self._lock:
            if time.monotonic() < self._due:
                return
            self._remind_from(min(2 * self._interval, REMIND_SECONDS[1]))
            level = max(self._levels.values(), default=logging.INFO)
        logger.log(level, "still out: %s", self.describe())
        self._on_change()  # what is expected has its reason by now

    def _is_new(self, outage: OpenOutage) -> bool:
        """Whether the log lacks this reason; whoever retries is likely to report a number that differs each time."""
        logged = self._logged.setdefault(outage.who, set())
        words = f"{outage.what}: {re.sub(r'[0-9.]+', '0', outage.reason)}"
        if words in logged or len(logged) >= _REMEMBERED_REASONS:
            return False
        logged.add(words)
        return True

    def _remind_from(self, interval: float) -> None:
        self._interval, self._due = interval, time.monotonic() + interval
