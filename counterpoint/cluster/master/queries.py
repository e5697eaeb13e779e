"""What clients may ask a master: the job's status, to stop, and to have more or fewer workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Heartbeat
from counterpoint.cluster.backends.one_worker import LARGEST_CODE
from counterpoint.cluster.manager.ending import words_of
from counterpoint.cluster.manager.events import LONGEST_REASON, ScaleRequested, StopRequested
from counterpoint.cluster.manager.state import JobState, WorkerRecord
from counterpoint.cluster.master.control import ControlError, unknown_role
from counterpoint.cluster.master.orders import log_file
from counterpoint.cluster.master.prime_master import MasterTerm


async def answer(master: MasterTerm, directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Answers one request. Raises `ControlError` for one that makes no sense."""
    if any(isinstance(value, bool) for value in request.values()):
        raise ControlError(f"{str(request)[:200]} has a truth value where none belongs")
    match request:
        case {"ask": "status"}:
            return status(master, directory)
        case {"ask": "stop", "reason": str(reason), "code": int(code)}:
            if not 0 <= code <= LARGEST_CODE:
                raise ControlError(f"{code} is no exit code; expected 0 to {LARGEST_CODE}")
            await master.request(StopRequested(reason[:LONGEST_REASON], code, "", 0.0))
            return {}
        case {"ask": "scale", "role": str(role), "count": int(count)}:
            if role not in (names := [one.name for one in master.spec.roles]):
                raise unknown_role(role, names)
            spec = master.spec.role(role)
            if not spec.fewest <= count <= spec.most:
                raise ControlError(f"role {role!r} may have {spec.fewest} to {spec.most} workers, not {count}")
            await master.request(ScaleRequested(role, count, 0.0))
            return {}
    raise ControlError(f"{str(request)[:200]} is no request; expected `ask` to be status, stop or scale")


def status(master: MasterTerm, directory: Path) -> dict[str, Any]:
    """Returns the state of the job."""
    if not master.is_ready:
        return {
            "job": master.spec.name,
            "stage": "INIT",
            "epoch": master.epoch,
            "trouble": _trouble_of_master(master) or "a new master adopts the job",
            "workers": [],
        }
    return {
        "job": master.spec.name,
        "stage": str(master.manager.stage),
        "epoch": master.epoch,
        "trouble": _trouble_of_master(master) or _failed_task(master.manager.state),
        "workers": [view(master, directory, record) for record in master.manager.state.workers.values()],
    }


def _trouble_of_master(master: MasterTerm) -> str:
    return f"the master does not act: {master.state.trouble}" if master.state.trouble else ""


def _failed_task(state: JobState) -> str:
    """What is to be known of a job that goes on although it can only fail."""
    if state.failed_task is None or state.outcome is not None:
        return ""
    return f"{state.failed_task.reason}; the job fails once its other tasks have ended"


def view(master: MasterTerm, directory: Path, record: WorkerRecord) -> dict[str, Any]:
    """Returns a worker as people see it."""
    beat = master.beats.get(record.name)
    if beat is not None and beat.incarnation != record.incarnation:
        beat = None
    return {
        "worker": record.name,
        "role": record.role,
        "rank": record.rank,
        "stage": str(record.stage),
        "phase": str(record.phase),
        "incarnation": record.incarnation,
        "node": record.node,
        "pid": beat.pid if beat is not None and beat.pid else record.pid,
        "address": record.address,
        "restarts": record.restarts,
        "last_death": record.last_death,
        "status": beat.status if beat is not None else "",
        "trouble": _trouble(master, record, beat),
        "log": str(log_file(master.spec, directory, record.name)),
    }


def _trouble(master: MasterTerm, record: WorkerRecord, beat: Heartbeat | None) -> str:
    ended = master.exits.get(record.name)
    if ended is not None and ended.incarnation == record.incarnation:
        return f"{words_of(ended)}; what follows is decided once the job's state can be written"
    if beat is not None and beat.trouble:
        return beat.trouble
    return "suspected: heartbeats are missing" if record.suspected else ""
