"""What an agent decides: whom it obeys, which worker's process runs, what it reports, and when it ends. No clock, no I/O.

Its promises, which `tests/cluster/agent/test_table.py` holds against arbitrary events:

- There are never two living processes of one worker: a later incarnation is started once the earlier one has ended.
- A command of a lower epoch than the highest that it has seen is refused; every other one may be repeated.
- A report is sent again to every master until one has acknowledged it.
- Without a master for a lease the agent stops its workers in order, kills them after one more lease, and ends. It never goes
  back on that, and it looks at the clock before it obeys: what was frozen for longer than a lease obeys nobody.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.agent.instructions import (
    Answer,
    Dismiss,
    Finish,
    Instruction,
    Kill,
    Send,
    Spawn,
    Tell,
    Terminate,
)
from counterpoint.cluster.agent.order import LivingWorker, WorkerOrder
from counterpoint.cluster.agent.protocol import malformed
from counterpoint.cluster.agent.reports import Report, Reports, cut
from counterpoint.cluster.manager import events
from counterpoint.cluster.spec import role_of, sub_master_name
from counterpoint.transport.process.exit_codes import ASKED_TO_END
from counterpoint.transport.unpacked import shown

KILL_SECONDS = 10.0
"""How long an ending agent waits for processes that were killed."""

LONGEST_ADDRESS = 1000
"""Characters of the address, and of the key, with which a worker takes calls."""

LARGEST_CODE = 255
"""The largest exit code. Only the last byte of a larger one would be seen, which may be 0."""

NO_PROCESS = 128 + 9
"""Exit code of a worker whose process is not known, or no more."""

CUT_OFF = 128 + 9
"""Exit code of a worker that ended because its agent ends, whatever it said: whether its work was complete, nobody knows."""

BY_ANOTHER_HAND = ASKED_TO_END | {128 + signal.SIGKILL}
"""The codes of a process that an operator or the kernel ended."""

ENDED_AS_ASKED = ASKED_TO_END | {0}
"""The codes with which a process ends that was asked to."""

_ORDER = TypeAdapter(WorkerOrder)


@dataclass(slots=True)
class _Entry:
    """The living, or starting, process of a worker."""

    order: WorkerOrder
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
    cut_off: bool = False
    """Whether the agent asked it to end, for reasons of its own, before it was finished or a master asked."""
    killed: bool = False
    deadline: float | None = None
    """The time when an ending agent kills it, or gives up on it if it was killed."""
    successor: WorkerOrder | None = None
    """The later incarnation, which starts once this one has ended."""


@dataclass(slots=True)
class Table:
    """The state machine of one agent. Times are seconds by one clock that counts while the machine sleeps."""

    agent: str
    """The agent's own id."""
    node: str
    job: str
    lease_seconds: float
    heard: float
    """The time when a master was last heard of; at first the present."""
    epoch: int = 0
    """The highest epoch seen."""
    listen: str = "ipc"
    """The address at which the agent listens, and its workers for calls (`AgentSettings.listen`)."""
    peer: Any = None
    """The address of the master of that epoch."""
    ending: str = ""
    """Why the agent ends; empty while it does not."""
    reports: Reports = field(default_factory=Reports)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _highest: dict[str, int] = field(default_factory=dict)
    """The highest incarnation of each worker that was created, or that was asked to end before it was."""
    _members: dict[str, Any] = field(default_factory=dict)
    _finished: bool = False

    # --- from a master ---

    def receive(self, peer: Any, message: Mapping[str, Any], now: float) -> list[Instruction]:
        """Handles a message of the master at `peer`."""
        done = self.tick(now)
        kind, epoch = message["kind"], message.get("epoch")
        if reason := malformed(message):
            return [*done, self._refuse(message, reason)]
        assert isinstance(epoch, int)
        if kind == protocol.HELLO and message["job"] != self.job:
            return [
                *done,
                self._refuse(message, f"this agent belongs to job {self.job!r}, not {shown(message['job'])}"),
            ]
        if epoch < self.epoch or (kind != protocol.HELLO and (epoch != self.epoch or self.peer is None)):
            return [*done, self._refuse(message, f"the epoch is {epoch}; a master of epoch {self.epoch} was here")]
        self.heard = now
        if kind == protocol.HELLO:
            if epoch > self.epoch and self.peer is not None:
                earlier = {"kind": protocol.REFUSED, "id": 0, "reason": "another master is here", "epoch": epoch}
                done.append(Dismiss(self.peer, earlier))
            self.epoch, self.peer, self.lease_seconds = epoch, peer, float(message["lease_seconds"])
            return [*done, Answer(self._welcome()), *map(_tell, self.reports.after(message["received"]))]
        if kind == protocol.ACKNOWLEDGE:
            self.reports.acknowledge(message["number"])
            return done
        obeyed = self._obey(kind, message, now)
        if isinstance(obeyed, str):
            return [*done, self._refuse(message, obeyed)]
        return [*done, Answer({"kind": protocol.DONE, "id": message["id"]}), *obeyed]

    def _obey(self, kind: str, message: Mapping[str, Any], now: float) -> list[Instruction] | str:
        """Carries out a command; returns why not if it is refused."""
        match kind:
            case protocol.CREATE:
                return self._create(message)
            case protocol.ORDER:
                return self._order(message["worker"], message["incarnation"], message["order"])
            case protocol.STOP | protocol.KILL:
                return self._stop(message["worker"], message["incarnation"], kill=kind == protocol.KILL)
            case protocol.PUBLISH:
                return self._publish(message["members"])
            case _:
                return self.end("its master ended it", now, kill=True)

    def _refuse(self, message: Mapping[str, Any], reason: str) -> Answer:
        number = message.get("id")
        return Answer(
            {"kind": protocol.REFUSED, "id": number if isinstance(number, int) else 0, "reason": reason}
            | {"epoch": self.epoch}
        )

    def _welcome(self) -> dict[str, Any]:
        return {
            "kind": protocol.WELCOME,
            "agent": self.agent,
            "node": self.node,
            "workers": [asdict(living) for living in self.living()],
            "reports": self.reports.last_kept,
            "ending": self.ending,
        }

    def _create(self, message: Mapping[str, Any]) -> list[Instruction] | str:
        try:
            order = _ORDER.validate_python({key: message[key] for key in message.keys() - {"kind", "epoch", "id"}})
        except ValidationError as error:
            return f"the order is malformed: {error.errors(include_url=False, include_input=False)}"
        highest = self._highest.get(order.worker, 0)
        if order.incarnation < highest:
            return f"incarnation {order.incarnation} of {order.worker} is over; {highest} was here"
        if self.ending:
            return f"the agent ends: {self.ending}"
        entry = self._entries.get(order.worker)
        if order.incarnation == highest:  # again
            waits = entry is not None and highest in (
                entry.order.incarnation,
                getattr(entry.successor, "incarnation", 0),
            )
            return [] if waits else self._no_process(order.worker, order.incarnation)
        self._highest[order.worker] = order.incarnation
        self.reports.forget_before(order.worker, order.incarnation)
        if entry is None:
            self._entries[order.worker] = _Entry(order)
            return [Spawn(order)]
        entry.successor = order
        return self._kill(entry)

    def _order(self, worker: str, incarnation: int, order: Mapping[str, Any]) -> list[Instruction] | str:
        entry = self._living(worker, incarnation)
        if entry is None:
            return self._no_process(worker, incarnation)
        kind = order.get("kind")
        if kind == protocol.START and entry.started:
            return self._report(entry, events.WorkerStarted)
        if entry.order.description:
            return [Send(worker, order)]
        if kind == protocol.START:  # a command's work began with its process
            entry.started = True
            return self._report(entry, events.WorkerStarted)
        if kind == protocol.FAILOVER and isinstance(order.get("notice"), int):
            return self._report(entry, events.FailoverDone, notice=order["notice"])
        return f"{worker} is a command, which knows no {shown(kind)}"

    def _stop(self, worker: str, incarnation: int, *, kill: bool) -> list[Instruction] | str:
        entry = self._entries.get(worker)
        if entry is not None and entry.successor is not None and entry.successor.incarnation == incarnation:
            entry.successor = None
            return self._no_process(worker, incarnation)
        entry = self._living(worker, incarnation)
        if entry is None:
            return self._no_process(worker, incarnation)
        return self._kill(entry) if kill else self._terminate(entry)

    def _no_process(self, worker: str, incarnation: int) -> list[Instruction]:
        """Reports that there is no such process, and sees to it that there will be none."""
        highest = self._highest.get(worker, 0)
        self._highest[worker] = max(highest, incarnation)
        if incarnation < highest or any(
            self.reports.pending(worker, incarnation, event) for event in (events.WorkerExited, events.CreateFailed)
        ):
            return []
        fields = {
            "worker": worker,
            "incarnation": incarnation,
            "code": NO_PROCESS,
            "reason": "it has no process",
            "lost": False,
        }
        return self._add(worker, incarnation, events.WorkerExited, **fields)

    def _terminate(self, entry: _Entry) -> list[Instruction]:
        """Asks it to end, again if it was asked before: the first request may have come before it could listen."""
        entry.asked = True
        return [Terminate(entry.order.worker)] if entry.pid and not entry.killed else []

    def _kill(self, entry: _Entry) -> list[Instruction]:
        entry.killed = True
        return [Kill(entry.order.worker)] if entry.pid else []

    def _publish(self, members: Sequence[Any]) -> list[Instruction] | str:
        if not all(isinstance(member, dict) and isinstance(member.get("worker"), str) for member in members):
            return "members are maps with a `worker`"
        self._members |= {member["worker"]: member for member in members}
        return [
            Send(worker, {"kind": protocol.MEMBERS, "members": list(members)})
            for worker, entry in self._entries.items()
            if entry.pid and entry.order.description
        ]

    # --- from the workers' processes ---

    def spawned(self, worker: str, pid: int) -> list[Instruction]:
        """The process that `Spawn` asked for runs."""
        entry = self._entries[worker]
        entry.pid = pid
        done = self._report(entry, events.Created, node=self.node, pid=pid)
        if entry.order.description:
            description = dict(entry.order.description) | {"node": self.node, "listen": self.listen}
            done.append(Send(worker, {"kind": protocol.DESCRIPTION, "description": description}))
            if self._members:
                done.append(Send(worker, {"kind": protocol.MEMBERS, "members": list(self._members.values())}))
        elif not entry.order.notifies:
            done += self._ready(entry, "", "")
        if entry.killed:
            done.append(Kill(worker))
        elif entry.asked:
            done.append(Terminate(worker))
        return done

    def spawn_failed(self, worker: str, reason: str) -> list[Instruction]:
        """The process that `Spawn` asked for could not be started."""
        entry = self._entries[worker]
        done = self._report(entry, events.CreateFailed, reason=cut(reason))
        return [*done, *self._gone(entry)]

    def hear(self, worker: str, incarnation: int, message: Mapping[str, Any]) -> list[Instruction]:
        """Handles what a worker's process said; one that is over, or says what makes no sense, is ignored."""
        entry = self._living(worker, incarnation)
        if entry is None or not all(map(_is_plain, message.values())):
            return []
        match message:
            case {"kind": protocol.READY, **rest}:
                return self._ready(entry, str(rest.get("address", "")), str(rest.get("server_key", "")))
            case {"kind": protocol.STARTED}:
                entry.started = True
                return self._report(entry, events.WorkerStarted)
            case {"kind": protocol.FINISHED}:
                entry.finished = True
                return self._report(entry, events.WorkFinished)
            case {"kind": protocol.FAILED, "reason": str(reason)}:
                entry.failure = cut(reason)
            case {"kind": protocol.ENDING}:
                return self._report(entry, events.EndAnnounced)
            case {"kind": protocol.EXTEND, "seconds": float(seconds)}:
                return self._report(entry, events.ExtensionRequested, seconds=seconds)
            case {"kind": protocol.CHILDREN_CHECKED, "check": int(check)}:
                return self._report(entry, events.ChildrenChecked, check=check)
            case {"kind": protocol.FAILOVER_DONE, "notice": int(notice)}:
                return self._report(entry, events.FailoverDone, notice=notice)
            case {"kind": protocol.REPLACE, "worker": str(other), "incarnation": int(its), "reason": str(reason)}:
                who = {"by": worker, "by_incarnation": incarnation, "worker": other, "incarnation": its}
                return self._add(worker, incarnation, events.ReplaceRequested, **who, reason=cut(reason))
            case {"kind": protocol.SCALE, "count": int(count)} if worker == sub_master_name(role_of(worker)):
                return self._add(worker, incarnation, events.ScaleRequested, role=role_of(worker), count=count)
            case {"kind": protocol.STOP_JOB, "reason": str(reason), "code": int(code)}:
                fields = {"reason": cut(reason), "code": code if 0 <= code <= LARGEST_CODE else 1, "by": worker}
                return self._add(worker, incarnation, events.StopRequested, **fields)
        return []

    def _ready(self, entry: _Entry, address: str, server_key: str) -> list[Instruction]:
        if entry.ready:
            return []
        address, server_key = address[:LONGEST_ADDRESS], server_key[:LONGEST_ADDRESS]
        entry.ready, entry.address, entry.server_key = True, address, server_key
        return self._report(entry, events.WorkerReady, address=address, server_key=server_key)

    def exited(self, worker: str, code: int) -> list[Instruction]:
        """The worker's process has ended, and everything below it has."""
        entry = self._entries[worker]
        by_another = code in BY_ANOTHER_HAND and not entry.order.description and not entry.killed
        reason = "" if by_another else entry.failure  # what a command said then was survived
        lost = entry.cut_off and (code in ENDED_AS_ASKED or entry.killed)
        if lost:  # a master would take a task that was cut off for a complete one
            code, reason = CUT_OFF, reason or cut(f"its agent asked it to end: {self.ending}")
        done = self._report(entry, events.WorkerExited, code=code, reason=reason, lost=lost)
        return [*done, *self._gone(entry)]

    def _gone(self, entry: _Entry) -> list[Instruction]:
        del self._entries[entry.order.worker]
        if entry.successor is None:
            return self._finish_if_idle()
        self._entries[entry.order.worker] = _Entry(entry.successor)
        return [Spawn(entry.successor)]

    # --- the end ---

    def tick(self, now: float) -> list[Instruction]:
        """Looks at the clock; call it several times in a lease."""
        done: list[Instruction] = []
        silent = now - self.heard
        if not self.ending and silent > self.lease_seconds:
            done += self.end(f"no master for {silent:.1f} s; the lease is {self.lease_seconds:g} s", now, self.heard)
        if not self.ending:
            return done
        for entry in list(self._entries.values()):
            if entry.deadline is not None and entry.deadline <= now:
                if entry.killed:  # it cannot be killed; the guardian, too, tries for ever
                    self._entries.pop(entry.order.worker)
                else:
                    entry.deadline = now + KILL_SECONDS
                    done += self._kill(entry)
        return [*done, *self._finish_if_idle()]

    def end(self, reason: str, now: float, since: float | None = None, *, kill: bool = False) -> list[Instruction]:
        """Ends the agent after its workers: asked to end, then killed, at once with `kill`.

        `since` is when the master was last heard of if that is the reason: then all is over two leases after it.
        """
        done: list[Instruction] = []
        if not self.ending:
            self.ending = reason
            done.append(Tell(self._welcome()))
        for entry in self._entries.values():
            entry.successor = None
            if kill:
                entry.deadline = now + KILL_SECONDS
                done += self._kill(entry)
            elif entry.deadline is None:
                entry.deadline = now + entry.order.stop_timeout_seconds
                if since is not None:
                    entry.deadline = min(entry.deadline, since + 2 * self.lease_seconds)
                entry.cut_off = not (entry.finished or entry.asked)
                done += self._terminate(entry)
        return [*done, *self._finish_if_idle()]

    def _finish_if_idle(self) -> list[Instruction]:
        if not self.ending or self._entries or self._finished:
            return []
        self._finished = True
        return [Finish(self.ending)]

    # --- what there is ---

    def living(self) -> list[LivingWorker]:
        """Returns the workers that have a process."""
        return [
            LivingWorker(
                entry.order.worker,
                entry.order.incarnation,
                self.node,
                entry.pid,
                entry.ready,
                entry.started,
                entry.address,
                entry.server_key,
                entry.order.bundle,
            )
            for entry in self._entries.values()
            if entry.pid
        ]

    def _living(self, worker: str, incarnation: int) -> _Entry | None:
        entry = self._entries.get(worker)
        return entry if entry is not None and entry.order.incarnation == incarnation else None

    def _report(self, entry: _Entry, event: type[events.Event], **fields: Any) -> list[Instruction]:
        order = entry.order
        own = {"worker": order.worker, "incarnation": order.incarnation}
        return self._add(order.worker, order.incarnation, event, **own, **fields)

    def _add(self, about: str, of: int, event: type[events.Event], **fields: Any) -> list[Instruction]:
        report = self.reports.add(about, of, event, fields)
        return [] if report is None else [_tell(report)]


def _is_plain(value: object) -> bool:
    """Whether a worker may say it: no message has a truth value, and an infinite number cannot be journalled."""
    return not isinstance(value, bool) and (not isinstance(value, float) or math.isfinite(value))


def _tell(report: Report) -> Tell:
    return Tell(
        {"kind": protocol.REPORT, "number": report.number, "event": report.event, "fields": dict(report.fields)}
    )
