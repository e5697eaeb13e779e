"""One worker's process, as whoever owns it tells of it: what it says and how it ends, as the manager's events. No clock, no I/O.

What a worker says is the user's and may be anything: what makes no sense is ignored, and every text is cut.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import LONGEST_REASON
from counterpoint.cluster.spec import role_of, sub_master_name
from counterpoint.transport.printable import clipped, printable
from counterpoint.transport.process.exit_codes import ASKED_TO_END
from counterpoint.transport.process.keeper import messages

LONGEST_ADDRESS = 1000
"""Characters of the address, and of the key, with which a worker takes calls."""

LARGEST_CODE = 255
"""The largest exit code. Only the last byte of a larger one would be seen, which may be 0."""

CUT_OFF = 128 + signal.SIGKILL
"""Exit code of a worker that ended because its owner ends, whatever it said: whether its work was complete, nobody knows."""

BY_ANOTHER_HAND = ASKED_TO_END | {128 + signal.SIGKILL}
"""The codes of a process that an operator or the kernel ended."""

Tell = Callable[[type[events.Event], Mapping[str, Any]], None]
"""Takes an event's class, and its fields but `at`."""


def cut(reason: str) -> str:
    """Returns a reason for people, at its greatest length: a worker may have said it."""
    return clipped(printable(reason), LONGEST_REASON)


@dataclass(slots=True)
class OneWorker:
    """The process of one incarnation."""

    order: WorkerOrder
    node: str
    tell: Tell
    pid: int = 0
    ready: bool = False
    started: bool = False
    address: str = ""
    server_key: str = ""
    failure: str = ""
    """The reason that the process gave for its end."""
    finished: bool = False
    """Whether it said that its work is complete."""
    asked: bool = False
    """Whether a master asked it to end."""
    killed: bool = False
    cut_off: str = ""
    """Why its owner, for reasons of its own, asked it to end before it was finished or a master asked."""

    def spawned(self, pid: int) -> None:
        """It runs."""
        self.pid = pid
        self._report(events.Created, node=self.node, pid=pid)
        if not self.order.description and not self.order.notifies:
            self._ready("", "")

    def not_spawned(self, reason: str) -> None:
        """It could not be started."""
        self._report(events.CreateFailed, reason=cut(reason))

    def answer(self, order: Mapping[str, Any]) -> bool:
        """Answers an order that needs no word of the process; False for one that is to be passed on to it."""
        kind, is_command = order["kind"], not self.order.description
        if kind == messages.START and (self.started or is_command):  # a command's work began with its process
            self.started = True
            self._report(events.WorkerStarted)
            return True
        if kind == messages.FAILOVER and is_command:
            self._report(events.FailoverDone, notice=order["notice"])
        return is_command

    def hear(self, message: Mapping[str, Any]) -> None:
        """Handles what the process said."""
        if not all(map(_is_plain, message.values())):
            return
        own, incarnation = self.order.worker, self.order.incarnation
        match message:
            case {"kind": messages.READY, **rest}:
                self._ready(str(rest.get("address", "")), str(rest.get("server_key", "")))
            case {"kind": messages.STARTED}:
                self.started = True
                self._report(events.WorkerStarted)
            case {"kind": messages.FINISHED}:
                self.finished = True
                self._report(events.WorkFinished)
            case {"kind": messages.FAILED, "reason": str(reason)}:
                self.failure = cut(reason)
            case {"kind": messages.ENDING}:
                self._report(events.EndAnnounced)
            case {"kind": messages.EXTEND, "seconds": float(seconds)}:
                self._report(events.ExtensionRequested, seconds=seconds)
            case {"kind": messages.CHILDREN_CHECKED, "check": int(check)}:
                self._report(events.ChildrenChecked, check=check)
            case {"kind": messages.FAILOVER_DONE, "notice": int(notice)}:
                self._report(events.FailoverDone, notice=notice)
            case {"kind": messages.REPLACE, "worker": str(other), "incarnation": int(its), "reason": str(reason)}:
                by = {"by": own, "by_incarnation": incarnation}
                self.tell(events.ReplaceRequested, {**by, "worker": other, "incarnation": its, "reason": cut(reason)})
            case {"kind": messages.SCALE, "count": int(count)} if own == sub_master_name(role_of(own)):
                self.tell(events.ScaleRequested, {"role": role_of(own), "count": count})
            case {"kind": messages.STOP_JOB, "reason": str(reason), "code": int(code)}:
                code = code if 0 <= code <= LARGEST_CODE else 1
                self.tell(events.StopRequested, {"reason": cut(reason), "code": code, "by": own})

    def exited(self, code: int) -> None:
        """It has ended, and so has everything below it."""
        by_another = code in BY_ANOTHER_HAND and not self.order.description and not self.killed
        reason = "" if by_another else self.failure  # what a command said then was survived
        lost = bool(self.cut_off) and (code in ASKED_TO_END | {0} or self.killed)
        if lost:  # a master would take a task that was cut off for a complete one
            code, reason = CUT_OFF, reason or cut(f"it was asked to end: {self.cut_off}")
        self.pid = 0
        self._report(events.WorkerExited, code=code, reason=reason, lost=lost)

    def living(self) -> LivingWorker | None:
        """Returns what a new master is told of it; None if it has no process."""
        order = self.order
        if not self.pid:
            return None
        return LivingWorker(
            order.worker,
            order.incarnation,
            self.node,
            self.pid,
            self.ready,
            self.started,
            self.address,
            self.server_key,
            order.bundle,
        )

    def _ready(self, address: str, server_key: str) -> None:
        if self.ready:
            return
        self.ready, self.address, self.server_key = True, address[:LONGEST_ADDRESS], server_key[:LONGEST_ADDRESS]
        self._report(events.WorkerReady, address=self.address, server_key=self.server_key)

    def _report(self, event: type[events.Event], **fields: Any) -> None:
        self.tell(event, {"worker": self.order.worker, "incarnation": self.order.incarnation, **fields})


def _is_plain(value: object) -> bool:
    """Whether a worker may say it: no message has a truth value, and an infinite number cannot be kept."""
    return not isinstance(value, bool) and (not isinstance(value, float) or math.isfinite(value))
