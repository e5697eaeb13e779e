"""The trainer's end on any wire: `BatchReceiver` around a `Listener`, which implements the wire.

It keeps which sender is which run and the session of each run, and returns only complete and valid messages of known
senders. A message of an earlier session is dropped; any other is counted, logged with its sender, answered with `Rejected`,
and dropped. A `Hello` that may not take the place of its run's connection is answered with `Evicted`. No message of a peer
affects another peer.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from counterpoint.transport import codec
from counterpoint.transport.codec import CodecError
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.messages import Bye, Commit, Evicted, Hello, Ready, Rejected, ToOrchestrator, Waiting
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.link import LINGER_SECONDS

logger = logging.getLogger(__name__)

_REFUSALS_A_CALL = 256
"""Refused messages that one call of `receive` reads beyond its timeout."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message as the wire delivered it."""

    sender: bytes
    """The address for an answer; empty when none can be sent."""
    origin: str
    """The sender's address, for people."""
    frames: list[Buffer] | CodecError
    """Its frames, or why the wire could not read them."""


class Listener(Protocol):
    """A wire, as the receiver uses it."""

    def poll(self, timeout: float) -> Arrival | None:
        """Returns the next message, or None after at most `timeout` seconds."""

    def write(self, sender: bytes, frames: Sequence[Buffer]) -> bool:
        """Queues one message; False when that sender is gone. Never blocks on it."""

    def close(self, linger: float) -> None:
        """Waits at most `linger` seconds for what is queued, then frees everything. Safe to call twice."""


class Receiver:
    """`BatchReceiver` (see `transport.wires.base`) over a listener. For one thread."""

    def __init__(
        self,
        listener: Listener,
        max_batch_bytes: int,
        refusal: Callable[[Hello], str | None] = lambda hello: None,
    ) -> None:
        """`refusal` returns why a `Hello` must not take the place of its run's connection, None if it may."""
        self._listener = listener
        self._max_batch_bytes = max_batch_bytes
        self._refusal = refusal
        self._runs: dict[bytes, str] = {}
        self._senders: dict[str, bytes] = {}
        self._sessions: dict[str, int] = {}
        """The session of each run's last `Ready`; no entry where none is open."""
        self._rejected = 0
        self._invalid_batches: dict[str, str] = {}
        self._peer_log = RateLimitedLog(logger)

    @property
    def rejected(self) -> int:
        """See `BatchReceiver`."""
        return self._rejected

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Commit | Bye] | None:
        """See `BatchReceiver`."""
        deadline = time.monotonic() + timeout
        refusals = 0
        while refusals < _REFUSALS_A_CALL or time.monotonic() < deadline:
            arrival = self._listener.poll(max(0.0, deadline - time.monotonic()))
            if arrival is None:
                return None
            try:
                if (message := self._check(arrival)) is not None:
                    return message
            except CodecError as error:
                self._reject(arrival, error)
            refusals += 1
        return None

    def take_invalid_batches(self) -> dict[str, str]:
        """See `BatchReceiver`."""
        taken, self._invalid_batches = self._invalid_batches, {}
        return taken

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        """See `BatchReceiver`. After `Evicted` or `Bye` the run has to send `Hello` again."""
        sender = self._senders.get(run_id)
        connected = sender is not None and self._listener.write(sender, codec.encode_message(message))
        if not connected:
            self._peer_log.note(logging.INFO, f"run {run_id} is not connected; {type(message).__name__} is not sent")
        if isinstance(message, Evicted | Bye):
            self._forget(run_id)
        elif isinstance(message, Waiting):
            self._sessions.pop(run_id, None)
        elif isinstance(message, Ready):
            self._sessions[run_id] = message.session
        return connected

    def close(self) -> None:
        """See `BatchReceiver`."""
        for run_id in list(self._senders):
            self.send(run_id, Bye("the trainer ends"))
        self._listener.close(LINGER_SECONDS)

    def _check(self, arrival: Arrival) -> tuple[str, Hello | Batch | Commit | Bye] | None:
        """Returns a valid message, with its run; None for one of an earlier session.

        Raises `CodecError` for any other.
        """
        if isinstance(arrival.frames, CodecError):
            raise arrival.frames
        run_id = self._runs.get(arrival.sender)
        if arrival.frames and arrival.frames[0] == codec.BATCH:
            if run_id is None:
                raise CodecError("a batch from a sender that has not sent HELLO, or whose run has since connected anew")
            session, frames = codec.split_offer(arrival.frames)
            return (run_id, self._decode(run_id, frames)) if self._is_present(run_id, session) else None
        match codec.decode_message(arrival.frames):
            case Hello() as hello:
                return (hello.run_id, hello) if self._greet(arrival, hello) else None
            case Commit() as commit if run_id is not None:
                return (run_id, commit) if self._is_present(run_id, commit.session) else None
            case Bye() as bye if run_id is not None:
                self._forget(run_id)
                return run_id, bye
            case other:
                raise CodecError(
                    f"a {type(other).__name__} is not for the trainer, or from a sender that has not sent HELLO"
                )

    def _decode(self, run_id: str, frames: Sequence[Buffer]) -> Batch:
        try:
            batch = codec.decode(frames, self._max_batch_bytes)
        except CodecError as error:
            where = f"step {error.step}: " if error.step is not None else ""
            self._invalid_batches[run_id] = f"{where}{error}"
            raise
        if batch.run_id != run_id:
            raise CodecError(f"a batch of run {batch.run_id!r} from the sender of run {run_id!r}", batch.step)
        return batch

    def _is_present(self, run_id: str, session: int) -> bool:
        if session == self._sessions.get(run_id):
            return True
        self._peer_log.note(logging.INFO, f"dropped a message of an earlier session of run {run_id}")
        return False

    def _greet(self, arrival: Arrival, hello: Hello) -> bool:
        """Makes the sender that of its run; returns False if it is sent away, and nothing changes."""
        if not re.fullmatch(IDENTIFIER_PATTERN, hello.run_id):
            raise CodecError(f"run id {hello.run_id[:80]!r} does not match {IDENTIFIER_PATTERN}")
        if (reason := self._refusal(hello)) is not None:
            self._rejected += 1
            self._peer_log.note(logging.WARNING, f"sent away an orchestrator of run {hello.run_id}: {reason}")
            self._listener.write(arrival.sender, codec.encode_message(Evicted(reason)))
            return False
        self._forget(hello.run_id)
        if (other := self._runs.get(arrival.sender)) is not None:
            self._forget(other)
        self._runs[arrival.sender] = hello.run_id
        self._senders[hello.run_id] = arrival.sender
        self._peer_log.note(logging.INFO, f"run {hello.run_id} connected from {arrival.origin}")
        return True

    def _forget(self, run_id: str) -> None:
        self._sessions.pop(run_id, None)
        sender = self._senders.pop(run_id, None)
        if sender is not None:
            del self._runs[sender]

    def _reject(self, arrival: Arrival, error: CodecError) -> None:
        self._rejected += 1
        run_id = self._runs.get(arrival.sender)
        who = f"run {run_id}" if run_id is not None else "an unknown sender"
        self._peer_log.note(logging.WARNING, f"refused a message from {who} ({arrival.origin}): {error}")
        if arrival.sender:
            session = self._sessions.get(run_id) if run_id is not None else None  # None: it has to send HELLO again
            self._listener.write(arrival.sender, codec.encode_message(Rejected(error.step, str(error), session)))
