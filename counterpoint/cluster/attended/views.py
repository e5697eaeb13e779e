"""The workers of a job as people see them, kept by the process that shows the job.

Beside what the manager knows it has what only a display needs: since when, and which part of a log belongs to this job.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.cluster.manager.ending import words_of
from counterpoint.cluster.manager.events import ManagerStage, Outcome
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.manager.state import ALIVE, Phase, WorkerRecord
from counterpoint.cluster.master.orders import log_file
from counterpoint.cluster.spec import JobSpec, StartGate, role_of, sub_master_name
from counterpoint.cluster.worker_view import ENDED, State, WorkerView
from counterpoint.transport.files.place import BEGINNING, Place
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.process.child import last_lines
from counterpoint.transport.process.exit_codes import ASKED_TO_END, is_explained

if TYPE_CHECKING:
    from counterpoint.cluster.master.prime_master import MasterTerm

SHOWN_SILENCE_SECONDS = 15.0
"""Silence of a worker, which should send a heartbeat every 5 s, before it is shown."""

STATES = {
    Phase.WAITING: State.WAITING,
    Phase.CREATING: State.STARTING,
    Phase.INITIALIZING: State.STARTING,
    Phase.READY: State.READY,
    Phase.STARTING: State.READY,
    Phase.RUNNING: State.READY,
    Phase.FINISHED: State.READY,
    Phase.STUCK: State.STUCK,
    Phase.RECYCLING: State.RESTARTING,
    Phase.HELD: State.RESTARTING,
    Phase.RESTARTING: State.RESTARTING,
    Phase.STOPPING: State.STOPPING,
    Phase.STOPPED: State.STOPPED,
    Phase.FAILED: State.FAILED,
    Phase.REMOVED: State.STOPPED,
}


@dataclass(slots=True)
class _Seen:
    """What is remembered of one worker."""

    state: State
    since: float
    log: Path
    incarnation: int = 0
    began: int = 0
    """The place in the log where the output of this incarnation begins."""
    log_from: int | None = None
    log_until: int | None = None
    end: Place = BEGINNING
    """The length of its log when it was last looked at, so that a rotation is noticed."""
    last_death: tuple[int, str] = (0, "")
    last_output: str = ""


class Views:
    """The views of one job. `update` them with every change."""

    def __init__(self, spec: JobSpec, directory: Path, log_from: Mapping[str, int] | None = None) -> None:
        """`log_from`: where the output of workers that run already begins, by the names that people see; None if none runs."""
        self._spec = spec
        self._directory = directory
        self._seen: dict[str, _Seen] = {}
        self._log_from = log_from
        self._views = [
            WorkerView(shown_name(spec, name), State.WAITING, time.time(), None, "")
            for role in spec.roles
            for name in role.worker_names
        ]
        self.job = State.WAITING
        """The state of the job as a whole."""
        self.heard: Mapping[str, float] = {}
        """The time when each worker that sends heartbeats sent its last one, by the monotonic clock and the names for
        people."""

    def all(self) -> list[WorkerView]:
        """Returns the workers as they were at the last update, in their order."""
        return list(self._views)

    def update(self, term: MasterTerm) -> None:
        """Looks at every worker."""
        records = term.manager.state.workers.values()
        now = time.monotonic()
        silent = {shown_name(self._spec, record.name): term.silent_for(record.name) for record in records}
        self.heard = {name: now - seconds for name, seconds in silent.items() if seconds > 0.0}
        self._views = [self._view(term, record) for record in records]
        self.job = self._state_of_job(term.manager)

    def _view(self, term: MasterTerm, record: WorkerRecord) -> WorkerView:
        state, silent = _state(term.manager, record), term.silent_for(record.name)
        beat, ended = term.beats.get(record.name), term.exits.get(record.name)
        seen = self._seen.get(record.name)
        if seen is None:
            log = log_file(self._spec, self._directory, record.name)
            seen = self._seen[record.name] = _Seen(State.WAITING, time.time(), log)
            if self._log_from is not None and record.incarnation:  # it was started by an earlier master
                seen.log_from = seen.began = self._log_from.get(shown_name(self._spec, record.name), 0)
                seen.incarnation = record.incarnation
                seen.last_death = (record.incarnation - 1, record.last_death)
        last_death = record.last_death
        over = ended is not None and ended.incarnation == record.incarnation and record.phase in ALIVE
        if ended is not None and over:
            silent = 0.0
            as_asked = state is State.STOPPING and ended.code in ASKED_TO_END | {0}
            if not as_asked:
                state, last_death = State.EXITED, words_of(ended)
        self._follow_log(seen, record, state)
        if state is not seen.state:
            seen.state, seen.since = state, time.time()
        if beat is not None and beat.incarnation != record.incarnation:
            beat = None
        lives = not over and state not in ENDED | {State.RESTARTING, State.WAITING}
        trouble = "" if beat is None else beat.trouble
        if silent >= SHOWN_SILENCE_SECONDS:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
            trouble = f"silent since {since}{f'; {trouble}' if trouble else ''}"  # it may have said why before
        return WorkerView(
            shown_name(self._spec, record.name),
            state,
            seen.since,
            beat.pid or None if beat is not None and lives else None,
            "" if beat is None else beat.status,
            seen.log_from,
            seen.log_until,
            record.restarts,
            last_death,
            seen.last_output,
            trouble if lives else "",
            record.node,
        )

    def _follow_log(self, seen: _Seen, record: WorkerRecord, state: State) -> None:
        end, goes_on = _end_of(seen.log, seen.end)
        size, seen.end = end.offset, end
        if not goes_on or size < (seen.log_from or 0):
            seen.began = 0
            seen.log_from = None if seen.log_from is None else 0
            seen.log_until = None if seen.log_until is None else 0
        if record.incarnation != seen.incarnation:
            seen.incarnation, seen.began, seen.log_until = record.incarnation, size, None
            seen.log_from = size if seen.log_from is None else seen.log_from
        if seen.log_until is None and record.phase in (Phase.STOPPING, Phase.STUCK, Phase.RECYCLING):
            seen.log_until = size
        if seen.last_death != (record.incarnation, record.last_death) and state in (State.RESTARTING, State.FAILED):
            seen.last_death = (record.incarnation, record.last_death)
            lines = [] if is_explained(record.last_death) else last_lines(seen.log, start=seen.began)
            seen.last_output = next((line for line in reversed(lines) if line), "")

    def _state_of_job(self, manager: PrimeManager) -> State:
        if manager.outcome is not None:
            return State.FAILED if manager.outcome.failed_worker else State.STOPPED
        if manager.stage is ManagerStage.STOPPING:
            return State.STOPPING
        if self.job is State.RUNNING:
            return self.job
        starting = any(view.state in (State.WAITING, State.STARTING) for view in self._views)
        return State.STARTING if starting else State.RUNNING


def _state(manager: PrimeManager, record: WorkerRecord) -> State:
    """A worker's state: where the job does not wait for the role, it is ready once its SubMaster has passed it at work."""
    role, state = manager.role_of(record), STATES[record.phase]
    if state is not State.READY or record.rank < 0 or role.sub_master is None or role.start is not StartGate.WORKER:
        return state
    stops = manager.stage in (ManagerStage.STOPPING, ManagerStage.STOPPED)
    return state if stops or manager.state.roles[role.name].checked else State.STARTING


def shown_name(spec: JobSpec, worker: str) -> str:
    """Returns a worker's name for people: that of its role if it is the only one of it, its SubMaster aside."""
    role = spec.role(role_of(worker))
    return role.name if role.most == 1 and worker != sub_master_name(role.name) else worker


def shown_outcome(spec: JobSpec, outcome: Outcome) -> Outcome:
    """Returns the outcome with the workers' names for people, and without the paths of logs, which are quoted beside it."""
    reason = outcome.reason
    for role in spec.roles:
        for worker in role.worker_names:
            reason = reason.replace(f" (log: {role.log_of(worker)})", "")
            reason = re.sub(rf"(?<![\w.-]){re.escape(worker)}(?![\w.-])", shown_name(spec, worker), reason)
    failed = outcome.failed_worker
    return Outcome(outcome.code, reason, None if failed is None else shown_name(spec, failed))


def _end_of(log: Path, before: Place) -> tuple[Place, bool]:
    """Returns where a log ends, and whether it is still the one that ended at `before`.

    One that cannot be read is taken for an empty one: it is for display only.
    """
    try:
        with open_regular(log) as file:
            return Place.at(file.fileno(), os.fstat(file.fileno()).st_size), before.is_in(file.fileno())
    except (OSError, UntrustedFileError):
        return BEGINNING, not before.offset
