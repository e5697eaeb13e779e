"""What clients may ask a master: the job's status, to stop, and to have more or fewer workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.said import LARGEST_CODE
from counterpoint.cluster.job_status import JobStatus, worker_status
from counterpoint.cluster.manager.events import LONGEST_REASON, JobStopRequested, ScaleRequested
from counterpoint.cluster.master.control import ControlError, unknown_role
from counterpoint.cluster.master.orders import log_file
from counterpoint.cluster.master.prime_master import MasterTerm


async def answer(master: MasterTerm, directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Answers one request. Raises `ControlError` for one that makes no sense."""
    if any(isinstance(value, bool) for value in request.values()):
        raise ControlError(f"{str(request)[:200]} has a truth value where none belongs")
    match request:
        case {"ask": "status"}:
            return status(master, directory).as_json()
        case {"ask": "stop", "reason": str(reason), "code": int(code)}:
            if not 0 <= code <= LARGEST_CODE:
                raise ControlError(f"{code} is no exit code; expected 0 to {LARGEST_CODE}")
            await master.request(JobStopRequested(reason[:LONGEST_REASON], code, "", 0.0))
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


def status(master: MasterTerm, directory: Path) -> JobStatus:
    """Returns the state of the job."""
    trouble = f"the master does not act: {master.state.trouble}" if master.state.trouble else ""
    if not master.is_ready:
        return JobStatus(master.spec.name, "INIT", master.epoch, trouble or "a new master adopts the job")
    state = master.manager.state
    if not trouble and state.failed_task is not None and state.outcome is None:
        trouble = f"{state.failed_task.reason}; the job fails once its other tasks have ended"
    workers = tuple(
        worker_status(record, log_file(master.spec, directory, name), master.beats.get(name), master.exits.get(name))
        for name, record in state.workers.items()
    )
    return JobStatus(master.spec.name, str(master.manager.stage), master.epoch, trouble, workers)
