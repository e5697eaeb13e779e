"""What a keeper decides: whom it obeys, what it tells, and when its worker ends. No clock, no I/O; the standard library alone.

Its promises, which `tests/transport/process/keeper/test_decisions.py` holds against arbitrary events:

- It starts one process, once.
- A master of a lower epoch than the highest that it has heard is refused, and the master before a new one is told so.
- What the worker said is told to every master, in order, until one has acknowledged it; what is kept is bounded.
- Without a master for a lease it stops its worker in order, kills it after one more lease, and ends. It never goes back on that,
  and it looks at the clock before it obeys: what was frozen for longer than a lease obeys nobody.
- It ends when a master has acknowledged the worker's end, or nobody is there to do so; never while the worker lives.

There are no data classes: `dataclasses` alone would double the time that a keeper takes to start.
"""

from __future__ import annotations

import signal
from collections.abc import Hashable, Mapping

from counterpoint.transport.process.keeper import messages
from counterpoint.transport.process.keeper.messages import checked

TYPE_CHECKING = False  # as type checkers know it; to import `typing` takes 5 ms
if TYPE_CHECKING:
    from typing import Any

    Instruction = tuple[Any, ...]

UNORDERED_SECONDS = 10.0
"""How long a keeper waits for the master that started it to say which worker it is for."""

MOST_REQUESTS = 32
"""Unacknowledged requests of one worker to replace others."""

CUT_OFF = 128 + signal.SIGKILL
"""Exit code of a worker that ended because its keeper ends, whatever it said: whether its work was complete, nobody knows."""

ENDED_AS_ASKED = frozenset({0, 128 + signal.SIGINT, 128 + signal.SIGTERM})
"""The codes with which a process ends that was asked to."""

BY_ANOTHER_HAND = (ENDED_AS_ASKED - {0}) | {128 + signal.SIGKILL}
"""The codes of a process that an operator or the kernel ended."""

START, SEND, TERMINATE, KILL, TELL, DISMISS, FINISH = "start", "send", "terminate", "kill", "tell", "dismiss", "finish"
"""What is to be done, the first word of each instruction:

START and the order: start the process; `started` or `not_started` follows. SEND and a message: to the process of a class.
TERMINATE: send it SIGTERM. KILL: it and everything below it. TELL and a message: to the master. DISMISS, a peer and a message:
send that, and close the connection. FINISH: end.
"""


class Keeping:
    """The state of one keeper. Times are seconds by one clock that counts while the machine sleeps."""

    def __init__(self, now: float) -> None:
        self.epoch = 0
        """The highest epoch heard."""
        self.lease_seconds = UNORDERED_SECONDS
        self.heard = now
        """The time when a master was last heard of; at first the present."""
        self.master: Hashable = None
        """The connection of the master of that epoch."""
        self.order: Mapping[str, Any] = {}
        """What the worker is, once a master has said so."""
        self.lives = False
        """Whether the process runs."""
        self.ending = ""
        """Why the keeper ends its worker; empty while it does not."""
        self.pid = 0
        self.status = ""
        """What the process of a class last said of itself."""
        self._ready: Mapping[str, Any] = {}
        self._started = self._finished = self._asked = self._cut_off = self._killed = self._is_over = False
        self._deadline = 0.0
        """When an ending keeper kills its worker."""
        self._failure = ""
        self._kept: dict[int, dict[str, Any]] = {}
        self._last = self._told = 0
        """The numbers of the last message, and of the last that the present master was told."""

    # --- from masters ---

    def receive(self, peer: Hashable, message: Mapping[str, Any], now: float) -> list[Instruction]:
        """Handles what a peer sent: a master, or somebody who wants to become one."""
        done = self.tick(now)
        kind = message["kind"]
        if kind == messages.HELLO:
            return done + self._hello(peer, message, now)
        if peer != self.master:
            return [*done, self._refusal(peer)]
        self.heard = now
        match message:
            case {"kind": messages.LIFE}:
                done.append((TELL, {"kind": messages.LIFE}))
            case {"kind": messages.ACKNOWLEDGE, "number": int(number)}:
                done += self._acknowledged(number)
            case {"kind": messages.STOP} if self.lives:
                self._asked = True
                done.append(self._termination())
            case {"kind": messages.KILL} if self.lives:
                self._killed = True
                done.append((KILL,))
            case {"kind": messages.END}:
                done += self.end("its master ended it")
            case {"kind": messages.SEND, "message": dict(order)} if self.lives:
                done += self._send(order)
        return done

    def _hello(self, peer: Hashable, message: Mapping[str, Any], now: float) -> list[Instruction]:
        epoch: Any = message.get("epoch")
        lease: Any = message.get("lease_seconds")
        order = message.get("order", {})
        if not (type(epoch) is int and type(lease) in (int, float) and lease > 0 and isinstance(order, dict)):
            return [self._refusal(peer)]
        if epoch < self.epoch:
            return [self._refusal(peer)]
        done: list[Instruction] = []
        earlier, self.epoch = self.master, epoch
        if earlier is not None and earlier != peer:
            done.append(self._refusal(earlier))
        self.master, self.lease_seconds, self.heard, self._told = peer, lease, now, 0
        if not self.order and not self.ending:
            if not order:
                self.ending = "the master that started it was gone before it had said what for"
                return [*done, self._refusal(peer), *self._finish()]
            self.order = order
            done.append((START, order))
        return [*done, (TELL, self.facts())]

    def _refusal(self, peer: Hashable) -> Instruction:
        return (DISMISS, peer, {"kind": messages.REFUSED, "epoch": self.epoch})

    def gone(self, peer: Hashable) -> None:
        """A connection has ended."""
        if peer == self.master:
            self.master = None

    def _send(self, order: Mapping[str, Any]) -> list[Instruction]:
        kind = order.get("kind")
        if kind == messages.START and self._started:
            self._keep({"kind": messages.STARTED})
        elif self.order["description"]:
            return [(SEND, order)]
        elif kind == messages.START:  # a command's work began with its process
            self.hear({"kind": messages.STARTED})
        elif kind == messages.FAILOVER:
            self.hear({"kind": messages.FAILOVER_DONE, "notice": order.get("notice")})
        return []

    def _acknowledged(self, number: int) -> list[Instruction]:
        for kept in [kept for kept in self._kept if kept <= number]:
            del self._kept[kept]
        over = self.order and not self.lives and not self._kept and self._last
        return self._finish() if over else []

    def _termination(self) -> Instruction:
        """Asks it to end, again if it was asked before: the first request may have come before it could listen."""
        return (SEND, {"kind": messages.STOP}) if self.order["description"] else (TERMINATE,)

    @property
    def is_ready(self) -> bool:
        """Whether the process has said that it is ready."""
        return bool(self._ready)

    def facts(self) -> dict[str, Any]:
        """Returns what a master needs to know of the worker, beside what it is told."""
        names = ("worker", "incarnation", "bundle", "node")
        return {
            "kind": messages.FACTS,
            **{name: self.order.get(name) for name in names},
            "lives": self.lives,
            "pid": self.pid,
            "ready": self.is_ready,
            "started": self._started,
            "address": self._ready.get("address", ""),
            "server_key": self._ready.get("server_key", ""),
            "ending": self.ending,
            "last": self._last if self._kept else 0,
        }

    # --- for masters ---

    def next_message(self) -> dict[str, Any] | None:
        """Returns the next message that the present master was not told; None if there is none."""
        if self.master is None:
            return None
        for number, message in self._kept.items():
            if number > self._told:
                self._told = number
                return {**message, "number": number}
        return None

    def _keep(self, message: dict[str, Any]) -> None:
        """Keeps a message for the master: the last of its kind, or some requests. Unless the same is kept already."""
        kind = message["kind"]
        same = [number for number, kept in self._kept.items() if kept["kind"] == kind]
        if any(self._kept[number] == message for number in same):
            if kind != messages.STARTED:
                return
        elif kind in (messages.REPLACE, messages.STOP_JOB):
            if len(same) >= (MOST_REQUESTS if kind == messages.REPLACE else 1):
                return
            same = []
        for number in same:
            del self._kept[number]  # a later one of the kind says more
        self._last += 1
        self._kept[self._last] = message

    # --- from the worker ---

    def started(self, pid: int) -> list[Instruction]:
        """The process that START asked for runs."""
        self.lives, self.pid = True, pid
        self._keep({"kind": messages.CREATED, "pid": pid})
        if not (self.order["description"] or self.order["notifies"]):
            self.hear({"kind": messages.READY, "address": "", "server_key": ""})
        return self._end_if_late()

    def not_started(self, reason: str) -> list[Instruction]:
        """The process that START asked for could not be started."""
        self._keep({"kind": messages.CREATE_FAILED, "reason": reason})
        return self._finish() if self.ending else []

    def hear(self, message: Mapping[str, Any]) -> bool:
        """Handles what the process said, or its notifications; returns whether it made sense. A heartbeat is the shell's."""
        said = checked(message)
        if said is None or not self.lives:
            return False
        match said["kind"]:
            case messages.ALIVE:
                self.status = said["status"]
                return True
            case messages.FAILED:
                self._failure = said["reason"]
                return True
            case messages.READY:
                if self._ready:
                    return True
                self._ready = said
            case messages.STARTED:
                self._started = True
            case messages.FINISHED:
                self._finished = True
        self._keep(said)
        return True

    def fail(self, reason: str) -> list[Instruction]:
        """Has the worker killed, for a reason."""
        self._failure, self._killed = reason, True
        return [(KILL,)] if self.lives else []

    def end(self, reason: str) -> list[Instruction]:
        """Has the worker killed, and ends without waiting for anybody."""
        self.ending, self._killed = self.ending or reason, True
        return [(KILL,)] if self.lives else self._finish()

    def exited(self, code: int) -> list[Instruction]:
        """The process has ended, and everything below it has."""
        self.lives = False
        by_another = code in BY_ANOTHER_HAND and not self.order["description"] and not self._killed
        reason = "" if by_another else self._failure  # what a command said then was survived
        lost = self._cut_off and (code in ENDED_AS_ASKED or self._killed)
        if lost:  # a master would take a task that was cut off for a complete one
            code, reason = CUT_OFF, reason or f"its keeper asked it to end: {self.ending}"
        self._keep({"kind": messages.EXITED, "code": code, "reason": reason, "lost": lost})
        return self._finish() if self.ending else []

    # --- the end ---

    def tick(self, now: float) -> list[Instruction]:
        """Looks at the clock; call it several times in a lease."""
        silent = now - self.heard
        if not self.ending and silent > self.lease_seconds:
            self.ending = f"no master for {silent:.1f} s; the lease is {self.lease_seconds:g} s"
            self._deadline = self.heard + 2 * self.lease_seconds
            if self.order:
                self._deadline = min(self._deadline, now + self.order["stop_timeout_seconds"])
            return self._end_if_late()
        if self.ending and self.lives and not self._killed and now >= self._deadline:
            self._killed = True
            return [(KILL,)]
        return []

    def _end_if_late(self) -> list[Instruction]:
        if not self.ending:
            return []
        if not self.lives:
            return self._finish()
        self._cut_off = not (self._finished or self._asked)
        return [self._termination()]

    def _finish(self) -> list[Instruction]:
        if self._is_over:
            return []
        self._is_over = True
        return [(FINISH,)]
