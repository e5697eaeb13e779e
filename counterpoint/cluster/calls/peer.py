"""What a caller's thread knows of one worker: whether it takes calls, and those that it has. `caller.py` acts on it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

from counterpoint.cluster.calls.connection import Connection
from counterpoint.cluster.calls.request import Request
from counterpoint.cluster.member import Member, Stage

_BACKOFF_SECONDS = (0.05, 1.0)
_JITTER = random.Random()
"""Its own, as another thread must not disturb the sequence that a test has seeded."""


class Condition(Enum):
    """Whether a worker takes calls."""

    CONNECTED = "connected"
    CONNECTING = "connecting"
    """Its address is new; calls wait for the connection, for two heartbeats at most."""
    RESTARTING = "restarting"
    """It has no address now, or does not answer there."""
    GONE = "gone"
    """It will not take calls any more."""


class Peer:
    """One worker of a role that this process calls, over all its incarnations."""

    def __init__(self, role: str, member: Member) -> None:
        self.role, self.member = role, member
        self.connection: Connection | None = None
        self.waiting: list[Request] = []
        """Calls that wait until it is connected."""
        self.in_flight: dict[int, Request] = {}
        self._trouble = ""
        self.due = math.inf
        """The time to connect again, or, with a connection, to give up waiting for it."""
        self._is_connected = False
        self._is_reachable = True
        self.has_left = False
        self._failures = 0

    def __str__(self) -> str:
        return f"{self.member.worker} (incarnation {self.member.incarnation})"

    @property
    def condition(self) -> Condition:
        """Whether it takes calls."""
        if self.has_left or (not self.member.address and self.member.stage in (Stage.FINISH, Stage.FAILED)):
            return Condition.GONE
        if self._is_connected:
            return Condition.CONNECTED
        return Condition.CONNECTING if self.connection is not None and self._is_reachable else Condition.RESTARTING

    @property
    def trouble(self) -> str:
        """Why it takes no calls now, for people."""
        if self._trouble:
            return self._trouble
        is_up = self.member.stage in (Stage.READY, Stage.RUNNING)
        return "it has no method marked @remote" if is_up else f"it is {self.member.stage}"

    @property
    def takes_calls(self) -> bool:
        """Whether a call may be given to it."""
        return self._is_connected or self.condition == Condition.CONNECTING

    @property
    def is_to_connect(self) -> bool:
        """Whether it has an address, and no connection."""
        return bool(self.member.address) and not self.has_left and self.connection is None

    def is_ready(self, ready: set[Any]) -> bool:
        """Whether one of its sockets is among those."""
        return self.connection is not None and (self.connection.socket in ready or self.connection.monitor in ready)

    def follow(self, member: Member | None) -> None:
        """Takes what the members' list says of it; None if it is not in there."""
        self.has_left = member is None
        if member is not None:
            if (member.incarnation, member.address) != (self.member.incarnation, self.member.address):
                self._is_reachable, self._failures, self.due = True, 0, math.inf
                self._trouble = ""
            self.member = member

    def begin(self, connection: Connection, seconds: float) -> None:
        """Takes a new connection, which has so many seconds to be made if it is the first to this incarnation."""
        self.connection = connection
        self.due = time.monotonic() + seconds if self._is_reachable else math.inf

    def connected(self) -> None:
        """Notes that the worker answers."""
        self._is_connected = self._is_reachable = True
        self._failures, self.due = 0, math.inf

    def give_up_connecting(self) -> None:
        """Notes that the worker did not answer in time. The connection goes on trying."""
        self._is_reachable, self.due = False, math.inf
        self._trouble = f"{self.member.address} does not answer"

    def lose(self, reason: str) -> list[Request]:
        """Notes that the connection was lost; returns the calls that were in flight."""
        first, longest = _BACKOFF_SECONDS
        delay = min(longest, first * 2**self._failures) * _JITTER.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 16)
        self._is_connected = self._is_reachable = False
        self.due, self._trouble = time.monotonic() + delay, reason
        lost, self.in_flight = [*self.in_flight.values()], {}
        return lost

    def take_waiting(self) -> list[Request]:
        """Returns the calls that waited for the connection, which wait no more."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def forget(self, request: Request) -> None:
        """Drops a call that has ended."""
        self.in_flight.pop(request.number, None)
        if request in self.waiting:
            self.waiting.remove(request)


def next_in_turn(peers: Sequence[Peer], turn: int) -> Peer | None:
    """Returns a worker of a role for a call that any may take: one that takes calls, else one that may again."""
    taking = [peer for peer in peers if peer.takes_calls]
    best = taking or [peer for peer in peers if peer.condition == Condition.RESTARTING] or peers
    return best[turn % len(best)] if best else None
