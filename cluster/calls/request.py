"""One call as the caller's thread has it: what is sent, and how its answer becomes the result of its `Call`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.calls import messages
from cluster.calls.call import Call
from cluster.calls.codec import CodecError, decode
from cluster.errors import ActorBusy, ActorRestarting, CallError, RemoteError
from cluster.member import Member
from transport.files.atomic import Buffer


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
