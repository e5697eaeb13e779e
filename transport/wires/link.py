"""The orchestrator's end on any wire: `TrainerLink` around a `Connection`, which implements the wire.

All that may take time (encoding, passing thousands of frames to the wire, reconnecting) happens in one thread of the link's
own, which alone touches the connection. The event loop only appends to a queue and writes one byte to a pipe; messages come
back by `call_soon_threadsafe`. `docs/performance.md` gives the reasons.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from counterpoint.transport import codec
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.messages import (
    Acknowledged,
    Bye,
    Commit,
    Evicted,
    Hello,
    HelloRefused,
    Offer,
    Ready,
    Rejected,
    ToOrchestrator,
    Waiting,
)
from counterpoint.transport.outages import Kind, Outage, Outages
from counterpoint.transport.process.priority import lower_own_priority

logger = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""How long a closing end waits for what is queued. The rest is in the durable record, and is sent again."""

_BACKOFF_SECONDS = (0.1, 5.0)
_CHANCE = random.SystemRandom()
"""Not the global generator, which an environment may have seeded and counts on while the link's thread runs."""
_LONGEST_POLL_SECONDS = 60.0
_DISPLACEMENTS = 3
"""How often a link that was replaced connects again before another batch has come through. Its own earlier `Hello`, read late,
may have replaced it. If another orchestrator of the run did, the link gives up after these attempts."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The trainer's end answers; a `Hello` will reach it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The trainer's end is gone, or another trainer answers. Messages already written may be lost."""

    reason: str
    silent_seconds: float = 0.0
    """How long it had not been heard of when this was noticed, as far as the wire knows."""


Arrived = list[Buffer]
"""The frames of one message."""


class Connection(Protocol):
    """A wire, as the link's thread uses it."""

    peer: str
    """The other end and its address, for people."""

    def open(self) -> None:
        """Begins to connect anew.

        Messages written before are not sent, and none of an earlier connection is returned. Waits for a peer that is not
        there yet.
        """

    def poll(self, wake: int, timeout: float) -> Sequence[Connected | Lost | Arrived]:
        """Returns the events since the last call, in order; none between `Lost` and `open`.

        Returns after `timeout` seconds, or early when descriptor `wake` becomes readable.
        """

    def write(self, frames: Sequence[Buffer]) -> None:
        """Queues one message by reference. Never blocks on the peer."""

    def close(self, linger: float) -> None:
        """Waits at most `linger` seconds for what is queued, then frees everything."""


class ThreadedLink:
    """`TrainerLink` (see `transport.wires.base`) over a connection.

    Sends `Hello` after every connect. Drops messages of earlier sessions, as their owner sends again what a later `Ready`
    lacks.
    """

    def __init__(self, connection: Connection, outages: Outages | None = None) -> None:
        """`outages` gets the trainer's."""
        self._connection = connection
        self._outages = Outages() if outages is None else outages
        self._inbox: asyncio.Queue[ToOrchestrator | Exception] = asyncio.Queue()
        self._outbox: deque[tuple[Offer | Commit, asyncio.Future[None]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._closing = False
        self._connected = False
        self._awaits_answer = False
        """Whether nothing has come by this connection since `Hello` was sent."""
        self._has_left = False
        """Whether the trainer's last message was BYE, which says more about its absence than what the wire sees."""
        self._session: int | None = None
        self._next_step = 0
        """The next step by the last READY."""
        self._failures = self._displaced = 0
        self._reopen_at: float | None = None

    # --- on the event loop ---

    async def start(self, hello: Hello) -> None:
        """See `TrainerLink`. Once only."""
        assert self._loop is None
        self._loop = asyncio.get_running_loop()
        self._hello = hello
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        threading.Thread(target=self._run, name=f"link-{hello.run_id}", daemon=True).start()

    def durable_up_to(self, step: int) -> None:
        """See `TrainerLink`."""
        self._hello = replace(self._hello, durable=max(step, self._hello.durable))

    @property
    def outage(self) -> Outage | None:
        """See `TrainerLink`."""
        return self._outages.of(self._connection.peer)

    async def send(self, message: Offer | Commit) -> None:
        """See `TrainerLink`. Returns once the wire has the message, or it was dropped.

        Raises `ValueError` for a batch that cannot travel, `ConnectionError` when the link was closed or its thread failed.
        """
        assert self._loop is not None
        if self._ended.is_set() or self._closing:
            raise ConnectionError(f"the link to {self._connection.peer} is closed")
        handed_over = self._loop.create_future()
        self._outbox.append((message, handed_over))
        self._wake()
        await handed_over

    async def receive(self) -> ToOrchestrator:
        """See `TrainerLink`. Raises `ConnectionError` when the link was closed or its thread failed."""
        message = await self._inbox.get()
        if isinstance(message, Exception):
            self._inbox.put_nowait(message)  # for every later call
            raise ConnectionError(f"the link to {self._connection.peer} ended: {message}") from message
        return message

    async def close(self) -> None:
        """See `TrainerLink`."""
        if self._loop is None or self._ended.is_set():
            return
        self._closing = True
        self._wake()
        try:
            async with asyncio.timeout(LINGER_SECONDS + 5.0):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("the thread of the link to %s did not end in time and is abandoned", self._connection.peer)

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"\0")
        except BlockingIOError:
            logger.debug("the link's pipe is full, so its thread has been woken already")

    def _end(self, error: Exception) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._inbox.put_nowait(error)
        while self._outbox:
            _settle(self._outbox.popleft()[1], ConnectionError(f"the link ended: {error}"))

    # --- in the thread ---

    def _run(self) -> None:
        end: Exception = ConnectionError("closed by this end")
        try:
            lower_own_priority()
            self._serve()
        except Exception as error:
            logger.exception("the link to %s failed", self._connection.peer)
            end = error
        finally:
            self._post(lambda: self._end(end))

    def _serve(self) -> None:
        try:
            self._connection.open()
            self._is_out("is not connected", "it was not reached yet", level=logging.INFO)
            while not self._closing:
                for event in self._connection.poll(self._wake_reader, self._seconds_to_wait()):
                    if self._is_displaced(event):
                        self._reconnect()
                        break  # later events are of the old connection
                    self._handle(event)
                self._reopen_if_due()
                self._send_queued()
            self._send_queued()
            if self._connected:
                self._connection.write(codec.encode_message(Bye()))
        finally:
            self._connection.close(LINGER_SECONDS if self._connected else 0.0)

    def _handle(self, event: Connected | Lost | Arrived) -> None:
        match event:
            case Connected():
                self._connected, self._has_left, self._awaits_answer = True, False, True
                self._connection.write(codec.encode_message(self._hello))
                self._is_out("has not answered HELLO", "it is connected, and answers between two steps")
            case Lost(reason, silent_seconds):
                self._connected, self._session = False, None
                first, longest = _BACKOFF_SECONDS
                delay = min(longest, first * 2**self._failures) * _CHANCE.uniform(0.5, 1.0)
                self._failures = min(self._failures + 1, 16)
                self._reopen_at = time.monotonic() + delay
                if not self._has_left:
                    self._is_out("is not connected", reason, since=time.time() - silent_seconds, level=logging.WARNING)
            case _:
                self._take(event)

    def _is_displaced(self, event: Connected | Lost | Arrived) -> bool:
        """Whether the trainer no longer accepts this connection, to which it had sent READY."""
        if self._session is None or self._displaced == _DISPLACEMENTS or not isinstance(event, list):
            return False
        try:
            message = codec.decode_message(event)
        except codec.CodecError:
            return False
        return isinstance(message, Rejected) and message.session is None

    def _reconnect(self) -> None:
        self._displaced += 1
        self._connected, self._session = False, None
        logger.warning("%s took another connection for this run's newest; connecting anew", self._connection.peer)
        self._connection.open()

    def _take(self, frames: Arrived) -> None:
        try:
            message = codec.decode_message(frames)
        except codec.CodecError as error:
            logger.warning("dropped a message from %s: %s", self._connection.peer, error)
            if self._awaits_answer:
                self._is_out("is of another version, or no trainer", f"its answer to HELLO cannot be read: {error}")
            return
        if isinstance(message, Rejected) and self._awaits_answer:
            message = HelloRefused(message.step, message.reason)
        self._awaits_answer = False
        if isinstance(message, Hello | Commit):
            kind = type(message).__name__.upper()
            logger.warning("dropped a %s from %s: it is no trainer", kind, self._connection.peer)
            return
        if isinstance(message, Ready):
            self._session, self._next_step = message.session, message.next_step
        elif isinstance(message, Acknowledged) and message.step >= self._next_step:
            self._displaced = 0  # a batch of this session has come through
        elif isinstance(message, Evicted | Bye):
            self._session = None
        if isinstance(message, Bye):
            self._has_left = True
            self._is_out("has left", message.reason or "it gave no reason", level=logging.WARNING)
        if isinstance(message, Ready | Waiting | Evicted):
            self._failures = 0
            self._outages.end(self._connection.peer)
        self._post(lambda: self._inbox.put_nowait(message))

    def _is_out(self, what: str, reason: str, *, since: float | None = None, level: int | None = None) -> None:
        self._outages.begin(Kind.TRAINER, self._connection.peer, what, reason, since=since, level=level)

    def _reopen_if_due(self) -> None:
        if self._reopen_at is not None and time.monotonic() >= self._reopen_at:
            self._reopen_at = None
            self._connection.open()

    def _seconds_to_wait(self) -> float:
        return _LONGEST_POLL_SECONDS if self._reopen_at is None else max(0.0, self._reopen_at - time.monotonic())

    def _send_queued(self) -> None:
        try:
            os.read(self._wake_reader, 4096)
        except BlockingIOError:
            return  # nothing was queued
        while self._outbox:
            message, handed_over = self._outbox.popleft()
            error: Exception | None = None
            try:
                self._write(message)
            except ValueError as caught:
                error = caught
            self._post(lambda future=handed_over, error=error: _settle(future, error))  # type: ignore[misc]

    def _write(self, message: Offer | Commit) -> None:
        frames = codec.encode_message(message) if isinstance(message, Commit) else codec.encode_offer(message)
        if message.session == self._session:
            self._connection.write(frames)
        else:
            logger.debug("dropped a message of an earlier session with %s", self._connection.peer)

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._closing:
                logger.warning("the event loop ended before the link to %s was closed", self._connection.peer)
            self._closing = True


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # its awaiter was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
