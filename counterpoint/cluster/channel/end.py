"""What both ends of a channel share: the conversation with its host, and waiting for what it says.

An end is used from plain threads. It asks in one of its own, by `transport/rpc`, and begins again while the host is away.
`producer.py` and `consumer.py` say what it asks and what follows from the answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.messages import (
    REJECTED,
    TURNS,
    ChannelError,
    ChannelTurn,
    Head,
    Leaving,
    Told,
    Who,
    pack,
    unpack,
)
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.rpc.connection import Connection, RpcError
from counterpoint.transport.rpc.curve import connect_curve
from counterpoint.transport.rpc.loop_thread import LoopThread
from counterpoint.transport.rpc.stream import connect_unix
from counterpoint.transport.wires.endpoint import IPC

logger = logging.getLogger(__name__)

OPEN_SECONDS, CLOSE_SECONDS = 60.0, 1.0
HEARTBEAT_SECONDS, RETRY_SECONDS = 2.0, 0.05
WELCOME_SECONDS, FOREVER_SECONDS = 10.0, 1e6
MAX_ASKS = 16
"""Asks of one end that its host holds."""


def event() -> Future[None]:
    """Returns what a `Patience` waits for; who waits cannot cancel it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


class Patience:
    """How long a call waits in all: `timeout` seconds, None for as long as it takes."""

    def __init__(self, timeout: float | None, late: str) -> None:
        """`late` says what does not happen."""
        self._timeout, self._late = timeout, late
        self._until = None if timeout is None else time.monotonic() + timeout

    def wait(self, event: Future[Any]) -> None:
        """Waits until it is done. Raises `TimeoutError` that says what was late."""
        try:
            event.exception(None if self._until is None else max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"{self._late} within {self._timeout} s") from None


class End:
    """One end's conversation, from `start` to `close`, or until the host rejects it."""

    def __init__(self, config: ChannelConfig, job_directory: Path, who: Who) -> None:
        self._address, self._keys = config.endpoint(job_directory)
        self._config, self._who = config, who
        self._lock = threading.Lock()
        self._failure: ChannelError | None = None
        self._loop: LoopThread | None = None
        self._running: Future[None] | None = None
        self._woken: asyncio.Event | None = None
        self._awake = self._closing = self._in_session = self._failed = False
        self._opened = event()
        """Done at the first session, or when there will be none."""
        self._silence = (
            f"no host of the channel answers at {self._address} (see that a worker hosts it, such as one of a role with worker = "
            "'counterpoint.cluster:HostWorker')"
        )

    def start(self) -> None:
        """Begins to connect; does not wait. Once only."""
        self._loop = LoopThread(f"channel-{self._who.name}")
        self._running = self._loop.run(self._run())

    def open(self, timeout: float = OPEN_SECONDS) -> None:
        """Connects, and waits for the host. Raises `TimeoutError` if none answers, `ChannelError` if it refuses this end."""
        self.start()
        Patience(timeout, self._silence).wait(self._opened)
        self._check()

    def _wake(self) -> None:
        """Has `_turn` called soon. From any thread."""
        if self._loop is not None and not self._awake:
            self._awake = True
            self._loop.post(self._answered)

    def _end(self, failed: bool = False) -> None:
        """Sends what is queued, says goodbye and whether an error ends this end, and frees everything. Safe to call twice."""
        loop, self._loop = self._loop, None
        if loop is None or self._running is None:
            return
        self._failed, self._closing = failed, True
        loop.post(self._answered)
        if self._in_session:
            with suppress(TimeoutError):
                self._running.exception(CLOSE_SECONDS)
        loop.close(CLOSE_SECONDS)

    # --- what an end of a kind does: in the conversation's thread ---

    def _welcomed(self, told: Told) -> None:
        """A session has begun: whatever the host did not confirm has to be sent again."""
        raise NotImplementedError

    def _turn(self) -> tuple[Sequence[Head], Sequence[int], Sequence[Buffer]] | None:
        """Returns what there is to say: orders, what is done, and the orders' frames."""
        raise NotImplementedError

    def _told(self, told: Told, frames: Sequence[Buffer]) -> None:
        """Takes what the host has said. Raises `CodecError`."""
        raise NotImplementedError

    def _fail(self, error: ChannelError) -> None:
        """No session will come."""
        with self._lock:
            self._failure = error
        if not self._opened.done():
            self._opened.set_result(None)

    # --- the conversation ---

    def _check(self) -> None:
        if self._failure is not None:
            raise ChannelError(str(self._failure)) from self._failure

    def _answered(self, answer: asyncio.Future[list[Buffer]] | None = None) -> None:
        if answer is not None and not answer.cancelled():
            answer.exception()  # it may never be looked at
        if self._woken is not None:
            self._woken.set()

    async def _run(self) -> None:
        self._woken, who = asyncio.Event(), f"{self._who.kind} {self._who.name}"
        while not self._closing:
            try:
                connection = await self._connect()
                try:
                    await self._converse(connection)
                finally:
                    connection.close()
            except (RpcError, OSError, CodecError) as error:
                if isinstance(error, RpcError) and error.kind == REJECTED:
                    return self._fail(ChannelError(f"{who} at {self._address}: {error}"))
                if self._in_session and not self._closing:
                    logger.warning("%s: %s; connecting to %s again", who, error, self._address)
            except Exception as error:
                logger.exception("the %s failed", who)
                return self._fail(ChannelError(f"{who} failed: {error!r}"))
            self._in_session = False
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self) -> Connection:
        """Connects to the host. Raises `OSError`."""
        name, most = f"the host of channel {self._config.name}", self._config.max_record_bytes
        if self._keys is None:
            return await connect_unix(self._address.removeprefix(IPC), name, HEARTBEAT_SECONDS, most, MAX_ASKS)
        self._keys.refresh(now=True)
        keys = self._keys.value
        return connect_curve(self._address, keys.server_public.decode(), keys, name, HEARTBEAT_SECONDS, most, MAX_ASKS)

    async def _converse(self, connection: Connection) -> None:
        assert self._woken is not None
        session, asked = 0, deque[asyncio.Future[list[Buffer]]]()

        def ask(leaving: Leaving = "") -> asyncio.Future[list[Buffer]] | None:
            said = self._turn() if session else None
            if said is None and not leaving and len(asked) >= (TURNS if session else 1):
                return None
            heads, done, frames = said or ((), (), ())
            turn = ChannelTurn(self._who, session, [*heads], [*done], leaving)
            seconds = CLOSE_SECONDS if leaving else FOREVER_SECONDS if session else WELCOME_SECONDS
            answer = connection.ask(pack(turn, frames), seconds)
            answer.add_done_callback(self._answered)
            asked.append(answer)
            return answer

        while not self._closing:
            self._awake = False
            self._woken.clear()
            while ask() is not None:
                pass
            await self._woken.wait()
            while asked and asked[0].done():
                told, frames = unpack(asked.popleft().result(), Told)
                if told.session != session:
                    session, self._in_session = told.session, True
                    self._welcomed(told)
                    if not self._opened.done():
                        self._opened.set_result(None)
                self._told(told, frames)
        if session and (answer := ask("failed" if self._failed else "ended")) is not None:
            await answer
