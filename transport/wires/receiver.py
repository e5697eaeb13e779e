"""The trainer's end: `BatchReceiver` around the socket that listens.

It keeps the sender and the session of each run, and returns only complete and valid messages that name a run of their sender,
which may have many. A message of an earlier session is dropped; any other is counted, logged with its sender, answered with
`Rejected`, and dropped. A `Hello` that may not take the place of its run's connection is answered with `Evicted`. No message
affects another peer, or another run of the same one.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence

from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.messages import Ask, Bye, Commit, Evicted, Hello, Ready, Rejected, ToOrchestrator, Waiting
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.zmq_wire import LINGER_SECONDS, Arrival, ZmqListener

logger = logging.getLogger(__name__)

_REFUSALS_A_CALL = 256
"""Refused messages that one call of `receive` reads beyond its timeout."""


class Receiver:
    """A `BatchReceiver` (see `transport.wires.base`) over a listener; one thread may use it."""

    def __init__(
        self,
        listener: ZmqListener,
        max_batch_bytes: int,
        refusal: Callable[[Hello], str | None] = lambda hello: None,
    ) -> None:
        """`refusal` returns why a `Hello` must not take the place of its run's connection, None if it may."""
        self._listener = listener
        self._max_batch_bytes = max_batch_bytes
        self._refusal = refusal
        self._senders: dict[str, bytes] = {}
        """Who has sent the newest `Hello` of each run, by run."""
        self._sessions: dict[str, int] = {}
        """The session of each run's last `Ready`; no entry where none is open."""
        self._rejected = 0
        self._invalid_batches: dict[str, str] = {}
        self._peer_log = RateLimitedLog(logger)

    @property
    def rejected(self) -> int:
        """See `BatchReceiver`."""
        return self._rejected

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Ask | Commit | Bye] | None:
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
        connected = sender is not None and self._listener.write(sender, codec.encode_message(message, run_id))
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

    def _check(self, arrival: Arrival) -> tuple[str, Hello | Batch | Ask | Commit | Bye] | None:
        """Returns a valid message, with its run; None for one of an earlier session.

        Raises `CodecError` for any other.
        """
        if isinstance(arrival.frames, CodecError):
            raise arrival.frames
        run_id = codec.run_of(arrival.frames)
        is_known = self._senders.get(run_id) == arrival.sender
        if arrival.frames and arrival.frames[0] == codec.BATCH:
            if not is_known:
                raise CodecError("a batch from a sender that has not sent HELLO, or whose run has since connected anew")
            session, frames = codec.split_offer(arrival.frames)
            return (run_id, self._decode(run_id, frames)) if self._is_present(run_id, session) else None
        if arrival.frames and arrival.frames[0] == codec.ITEM:
            if not is_known:
                raise CodecError("an item from a sender that has not sent HELLO, or whose run has since connected anew")
            ask = codec.decode_ask(arrival.frames, self._max_batch_bytes)
            return (run_id, ask) if self._is_present(run_id, ask.session) else None
        match codec.decode_message(arrival.frames):
            case Hello() as hello:
                return (hello.run_id, hello) if self._greet(arrival, hello) else None
            case Commit() as commit if is_known:
                return (run_id, commit) if self._is_present(run_id, commit.session) else None
            case Bye() as bye if is_known:
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
            self._listener.write(arrival.sender, codec.encode_message(Evicted(reason), hello.run_id))
            return False
        self._forget(hello.run_id)
        self._senders[hello.run_id] = arrival.sender
        self._peer_log.note(logging.INFO, f"run {hello.run_id} connected from {arrival.origin}")
        return True

    def _forget(self, run_id: str) -> None:
        self._sessions.pop(run_id, None)
        self._senders.pop(run_id, None)

    def _reject(self, arrival: Arrival, error: CodecError) -> None:
        self._rejected += 1
        named = "" if isinstance(arrival.frames, CodecError) else codec.run_of(arrival.frames)
        is_known = self._senders.get(named) == arrival.sender
        who = f"run {named}" if is_known else "an unknown sender"
        self._peer_log.note(logging.WARNING, f"refused a message from {who} ({arrival.origin}): {error}")
        if arrival.sender:
            session = self._sessions.get(named) if is_known else None  # None: the run has to send HELLO again
            self._listener.write(arrival.sender, codec.encode_message(Rejected(error.step, str(error), session), named))
