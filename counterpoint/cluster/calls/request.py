"""A call as the caller's thread has it: what is sent, how its answer becomes the result of its `Call`, and all that are open."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from counterpoint.cluster.calls import messages
from counterpoint.cluster.calls.call import Call
from counterpoint.cluster.calls.codec import CodecError, decode
from counterpoint.cluster.errors import ActorBusy, ActorRestarting, CallError, RemoteError
from counterpoint.cluster.member import Member
from counterpoint.transport.files.atomic import Buffer


class Holder(Protocol):
    """Who has a request: a `Peer`."""

    in_flight: dict[int, Request]

    def forget(self, request: Request) -> None:
        """Drops a call that has ended."""


@dataclass(slots=True, eq=False)
class Request:
    """A call, with what is needed to send it (again)."""

    call: Call[Any]
    number: int
    role: str
    worker: str
    """The worker that is wanted; empty for any."""
    is_fixed: bool
    """Whether no other worker will do."""
    method: str
    frames: Sequence[Buffer]
    deadline: float
    timeout: float
    peer: Holder | None = None
    """The worker that it was sent to, or waits for."""
    busy: set[str] = field(default_factory=set)
    """The workers that did not run it because an earlier method hangs there."""

    def __str__(self) -> str:
        return f"{self.worker or self.role}.{self.method}"

    def message(self, caller: bytes, member: Member) -> list[Buffer]:
        """Returns the frames of the call to that incarnation of that worker."""
        seconds = max(0.0, self.deadline - time.monotonic())
        header = messages.CallHeader(caller, self.number, member.worker, member.incarnation, self.method, seconds)
        return [messages.CALL, header.pack(), *self.frames]

    def settle(self, result: object) -> None:
        """Ends the call, unless it was cancelled meanwhile."""
        self.frames = ()
        with suppress(InvalidStateError):
            self.call.set_result(result)

    def fail(self, error: CallError) -> None:
        """Ends the call with an error, unless it was cancelled meanwhile."""
        self.frames = ()
        with suppress(InvalidStateError):
            self.call.set_exception(error)

    def end(self, peer: str, kind: bytes, header: Sequence[object], value: Sequence[Buffer]) -> None:
        """Ends the call by the answer of `peer`: its kind, what its header holds, and the frames of its value."""
        match kind, header:
            case messages.RESULT, []:
                try:
                    self.settle(decode(value))
                except CodecError as error:
                    self.fail(RemoteError(f"{self}: the result of {peer} cannot be read: {error}", "CodecError"))
            case messages.RAISED, [str(raised), str(message), str(trace)]:
                failure = RemoteError(f"{self}: {peer} raised {message}", raised, trace)
                if trace:
                    failure.add_note(f"The traceback in {peer}:\n{trace}")
                self.fail(failure)
            case messages.REFUSED, [str(reason)]:
                self.fail(ActorRestarting(f"{self}: {peer} is not there, {reason}; the method was not run"))
            case messages.BUSY, [str(reason)]:
                self.fail(ActorBusy(f"{self}: {peer} is busy: {reason}; the method was not run"))
            case _:
                self.fail(RemoteError(f"{self}: the answer of {peer} cannot be read", "CodecError"))


_SPARE = 1024
"""Deadlines of ended calls that are kept beside as many as there are open calls, so that sorting them out is rare."""


class OpenRequests:
    """The calls of a process that have not ended, and which of them reaches its deadline next: for the caller's thread alone."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._requests.values()])

    @property
    def due(self) -> float:
        """The time of the next deadline, by the monotonic clock; an open call's is never earlier."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def add(self, request: Request) -> None:
        """Takes a call."""
        self._requests[request.number] = request
        heapq.heappush(self._deadlines, (request.deadline, request.number))

    def drop(self, request: Request) -> None:
        """Forgets a call that has ended."""
        self._requests.pop(request.number, None)
        if len(self._deadlines) > 2 * len(self._requests) + _SPARE:
            self._deadlines = [(kept.deadline, number) for number, kept in self._requests.items()]
            heapq.heapify(self._deadlines)

    def take_late(self, now: float) -> Iterator[Request]:
        """Yields the calls whose deadline has passed; they are no longer open."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if (request := self._requests.pop(number, None)) is not None:
                yield request
