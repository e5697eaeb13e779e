"""The orchestrator's end on any wire: a `TrainerLink` for each run, around the connection that they share.

All that may take time (encoding, passing thousands of frames to the wire, reconnecting) happens in a thread of each connection,
which alone touches it and the `Conversations`. The event loop only appends to a queue and writes one byte to a pipe; messages
come back by `call_soon_threadsafe`. `docs/performance.md` gives the reasons.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.messages import Ask, Bye, Commit, Hello, Offer, ToOrchestrator
from counterpoint.transport.outages import OpenOutage, Outages
from counterpoint.transport.process.priority import lower_own_priority
from counterpoint.transport.wires.conversations import Conversation, Conversations
from counterpoint.transport.wires.zmq_wire import LINGER_SECONDS, Arrived, Connected, Lost, ZmqConnection

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS = (0.1, 5.0)
_CHANCE = random.SystemRandom()
"""The link's own generator: an environment may have seeded the global one, and counts on it while the thread runs."""
_LONGEST_POLL_SECONDS = 60.0


class TrainerLink:
    """The end of one run, by a connection that others may share.

    Delivery is at least once: `orchestrator.step.sender` resends after a `Ready`, and the trainer drops what it has already.
    """

    def __init__(self, shared: SharedConnection) -> None:
        """Does not connect yet; `start` does."""
        self._shared = shared
        self._inbox: asyncio.Queue[ToOrchestrator | Exception] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._conversation: Conversation | None = None
        self.is_closing = False

    async def start(self, hello: Hello) -> None:
        """Begins to connect; `receive` returns every `Ready`: the first, and one after each reconnect. Once only.

        Raises `ValueError` for what is no id, or that of another run of the connection.
        """
        assert self._conversation is None
        conversation = Conversation(hello, self._hear)
        self._shared.begin(self, conversation)
        self._conversation = conversation

    def durable_up_to(self, step: int) -> None:
        """Sets the step that the `Hello` of the next reconnect names as durable."""
        assert self._conversation is not None
        hello = self._conversation.hello
        self._conversation.hello = replace(hello, durable=max(step, hello.durable))

    @property
    def outage(self) -> OpenOutage | None:
        """Why the trainer is not there for this run; None if it is."""
        is_ready = self._conversation is not None and self._conversation.session is not None
        return None if is_ready else self._shared.outages.of(self._shared.peer)

    async def send(self, message: Offer | Ask | Commit) -> None:
        """Passes a message to the wire; returns once that has it, or it was dropped.

        A batch's arrays are sent by reference and must not change until it is acknowledged. A message of another session
        than that of the connection's newest `Ready` is dropped: its owner sends again what a later `Ready` lacks. Raises
        `ValueError` for a batch that cannot travel, `ConnectionError` after `close` or a failure of the thread.
        """
        assert self._conversation is not None
        if self._ended.is_set() or self.is_closing:
            raise ConnectionError(f"the link to {self._shared.peer} is closed")
        await self._shared.hand_over(self._conversation, message)

    async def receive(self) -> ToOrchestrator:
        """Returns the next message from the trainer. Waits without limit; the caller sets the deadline.

        Raises `ConnectionError` after `close` or a failure of the thread.
        """
        message = await self._inbox.get()
        if isinstance(message, Exception):
            self._inbox.put_nowait(message)  # for every later call
            raise ConnectionError(f"the link to {self._shared.peer} ended: {message}") from message
        return message

    async def close(self) -> None:
        """Sends `Bye`, waits briefly for what is queued, frees everything that no other run needs. Safe to call twice."""
        if self._conversation is None or self._ended.is_set():
            return
        if not self.is_closing:
            self.is_closing = True
            self._shared.hand_over(self._conversation, Bye())
        try:
            async with asyncio.timeout(LINGER_SECONDS + 5.0):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("the thread of the link to %s did not end in time and is abandoned", self._shared.peer)

    def _hear(self, message: ToOrchestrator) -> None:
        self._shared.post(lambda: self._inbox.put_nowait(message))

    def end(self, error: Exception) -> None:
        """Is called by the connection, once this run's part of it has ended."""
        self._ended.set()
        self._inbox.put_nowait(error)


class SharedConnection:
    """A connection to the trainer, its thread, and the links of the runs that share it.

    It lasts from the start of one of them until all are closed. Drops messages of earlier sessions, as their owner sends again
    what a later `Ready` lacks.
    """

    def __init__(self, connection: ZmqConnection, outages: Outages | None = None) -> None:
        """Reports the trainer's outages to `outages`."""
        self._connection = connection
        self.peer = connection.peer
        self.outages = Outages() if outages is None else outages
        self._links: dict[str, TrainerLink] = {}
        """The links that are started and have not ended, by run. The event loop alone uses them, as the thread alone uses
        the conversations."""
        self._outbox: deque[tuple[Conversation, Hello | Offer | Ask | Commit | Bye, asyncio.Future[None]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        """None while no link is open."""

    # --- on the event loop ---

    def link(self) -> TrainerLink:
        """Returns the link of one more run."""
        return TrainerLink(self)

    def begin(self, link: TrainerLink, conversation: Conversation) -> None:
        """Has a run greet the trainer. Raises `ValueError` for what is no id, or that of another link."""
        run_id = conversation.hello.run_id
        if not re.fullmatch(IDENTIFIER_PATTERN, run_id):
            raise ValueError(f"run id {run_id[:80]!r} does not match {IDENTIFIER_PATTERN}")
        if run_id in self._links:
            raise ValueError(f"run {run_id} has a link by this connection already: close that first")
        self._links[run_id] = link
        if self._loop is None:
            self._open()
        self.hand_over(conversation, conversation.hello)

    def hand_over(
        self, conversation: Conversation, message: Hello | Offer | Ask | Commit | Bye
    ) -> asyncio.Future[None]:
        """Queues a message for the thread; the future is done once the wire has it, or it was dropped."""
        assert self._loop is not None
        handed_over = self._loop.create_future()
        self._outbox.append((conversation, message, handed_over))
        self._wake()
        return handed_over

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"\0")
        except BlockingIOError:
            logger.debug("the link's pipe is full, so its thread has been woken already")

    def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._conversations = Conversations(self._connection, self.outages)
        self._failures, self._reopen_at = 0, math.inf
        self._closing, self._last = False, ""
        threading.Thread(target=self._run, name=f"link-{next(iter(self._links))}", daemon=True).start()

    def _end(self, failure: Exception | None) -> None:
        self._loop = None
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        if failure is None:
            self._end_link(self._last)
        else:
            for run_id in list(self._links):
                self._end_link(run_id, failure)
            while self._outbox:
                _settle(self._outbox.popleft()[2], ConnectionError(f"the link ended: {failure}"))
        if self._outbox:  # of links that were started meanwhile
            self._open()
            self._wake()

    def _end_link(self, run_id: str, failure: Exception | None = None) -> None:
        self._links.pop(run_id).end(failure or ConnectionError("closed by this end"))

    # --- in the thread ---

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            lower_own_priority()
            self._serve()
        except Exception as error:
            logger.exception("the link to %s failed", self.peer)
            failure = error
        finally:
            self.post(lambda: self._end(failure))

    def _serve(self) -> None:
        try:
            self._connection.open()
            while not self._closing:
                for event in self._connection.poll(self._wake_reader, self._seconds_to_wait()):
                    self._handle(event)
                if time.monotonic() >= self._reopen_at:
                    self._reopen_at = math.inf
                    self._connection.open()
                self._send_queued()
        finally:
            self._connection.close(LINGER_SECONDS if self._conversations.connected else 0.0)

    def _handle(self, event: Connected | Lost | Arrived) -> None:
        match event:
            case Connected():
                self._conversations.begin()
            case Lost(reason, silent_seconds):
                self._conversations.lose(reason, time.time() - silent_seconds)
                first, longest = _BACKOFF_SECONDS
                delay = min(longest, first * 2**self._failures) * _CHANCE.uniform(0.5, 1.0)
                self._failures = min(self._failures + 1, 16)
                self._reopen_at = time.monotonic() + delay
            case _:
                if self._conversations.hear(event):
                    self._failures = 0

    def _seconds_to_wait(self) -> float:
        return min(_LONGEST_POLL_SECONDS, max(0.0, self._reopen_at - time.monotonic()))

    def _send_queued(self) -> None:
        try:
            os.read(self._wake_reader, 4096)
        except BlockingIOError:
            return  # nothing was queued
        while self._outbox and not self._closing:
            conversation, message, handed_over = self._outbox[0]  # and left there if this fails, for `_end`
            error: Exception | None = None
            try:
                self._pass_on(conversation, message)
            except ValueError as caught:
                error = caught
            self._outbox.popleft()
            self.post(lambda future=handed_over, error=error: _settle(future, error))  # type: ignore[misc]

    def _pass_on(self, conversation: Conversation, message: Hello | Offer | Ask | Commit | Bye) -> None:
        match message:
            case Hello():
                self._conversations.join(conversation)
            case Bye():
                self._conversations.leave(conversation)
                run_id = conversation.hello.run_id
                if self._conversations:
                    self.post(lambda: self._end_link(run_id))
                else:
                    self._closing, self._last = True, run_id
            case _:
                self._conversations.say(conversation, message)

    def post(self, callback: Callable[[], None]) -> None:
        """Has the event loop call something; the thread calls this."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._closing:
                logger.warning("the event loop ended before the link to %s was closed", self.peer)
            self._closing = True


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # its awaiter was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
