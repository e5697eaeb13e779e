"""What a keeper tells of its worker, as the manager's events. No clock, no I/O.

A worker's words are the user's and may be anything: what makes no sense is ignored, and every text is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import LONGEST_REASON, Event
from counterpoint.cluster.spec import role_of, sub_master_name
from counterpoint.transport.printable import clipped, printable
from counterpoint.transport.process.keeper import messages

LONGEST_ADDRESS = 1000
"""Characters of the address, and of the key, with which a worker takes calls."""

LARGEST_CODE = 255
"""The largest exit code. Only the last byte of a larger one would be seen, which may be 0."""


def cut(reason: str) -> str:
    """Returns a reason for people, at its greatest length: a worker may have said it."""
    return clipped(printable(reason), LONGEST_REASON)


def event_of(message: Mapping[str, Any], worker: str, incarnation: int, node: str, at: float) -> Event | None:
    """Returns the event that a keeper's message about its worker is; None if it is none that this worker may cause."""
    match message:
        case {"kind": messages.CREATED, "pid": int(pid)}:
            return events.Created(worker, incarnation, node, pid, at)
        case {"kind": messages.CREATE_FAILED, "reason": str(reason)}:
            return events.CreateFailed(worker, incarnation, cut(reason), at)
        case {"kind": messages.EXITED, "code": int(code), "reason": str(reason), "lost": bool(lost)}:
            return events.WorkerExited(worker, incarnation, code, cut(reason), at, lost)
    match messages.checked(message):
        case {"kind": messages.READY, "address": address, "server_key": key}:
            return events.WorkerReady(worker, incarnation, address[:LONGEST_ADDRESS], key[:LONGEST_ADDRESS], at)
        case {"kind": messages.STARTED}:
            return events.WorkerStarted(worker, incarnation, at)
        case {"kind": messages.FINISHED}:
            return events.WorkFinished(worker, incarnation, at)
        case {"kind": messages.ENDING}:
            return events.EndAnnounced(worker, incarnation, at)
        case {"kind": messages.EXTEND, "seconds": seconds}:
            return events.ExtensionRequested(worker, incarnation, seconds, at)
        case {"kind": messages.CHILDREN_CHECKED, "check": check}:
            return events.ChildrenChecked(worker, incarnation, check, at)
        case {"kind": messages.FAILOVER_DONE, "notice": notice}:
            return events.FailoverDone(worker, incarnation, notice, at)
        case {"kind": messages.REPLACE, "worker": other, "incarnation": its, "reason": reason}:
            return events.ReplaceRequested(worker, incarnation, other, its, cut(reason), at)
        case {"kind": messages.SCALE, "count": count} if worker == sub_master_name(role_of(worker)):
            return events.ScaleRequested(role_of(worker), count, at)
        case {"kind": messages.STOP_JOB, "reason": reason, "code": code}:
            return events.JobStopRequested(cut(reason), code if 0 <= code <= LARGEST_CODE else 1, worker, at)
    return None
