"""A master's connection to one agent: heartbeats, commands that are repeated until answered, and reports in order, each once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.agent.order import LivingWorker
from counterpoint.cluster.agent.protocol import MESSAGES
from counterpoint.cluster.agent.reports import event_of
from counterpoint.cluster.agent.settings import AgentEndpoint
from counterpoint.cluster.backends.base import Heartbeat
from counterpoint.cluster.clock import RunningClock
from counterpoint.cluster.errors import BackendError, StaleMasterError
from counterpoint.cluster.manager.events import Event
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.typed import typed
from counterpoint.transport.wires.endpoint import CurveKeys
from counterpoint.transport.wires.reconnecting import find_peer_soon

logger = logging.getLogger(__name__)

HELLOS_IN_A_LEASE = 4
LEAST_SILENCE_SECONDS = 3.0
"""An agent on a busy machine may be late for so long, however short the lease."""

CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 30.0
REPEAT_SECONDS = 2.0
"""How long a command may be without an answer before it is sent again: a connection may have broken."""

PULSE_SECONDS = 0.5
"""Seconds between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The master, as agents know it."""

    job: str
    epoch: int
    lease_seconds: float
    keys: CurveKeys | None = None
    """Its CURVE keys, for agents that have some. `server_public` is not used: each agent announces its own."""


class Listener:
    """What a link tells its owner; all on the event loop."""

    def on_report(self, link: AgentLink, number: int, event: Event) -> None:
        """A report came."""

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A worker's heartbeat came."""

    def on_stale(self, error: StaleMasterError) -> None:
        """The agent has seen a higher epoch."""

    def on_lost(self, link: AgentLink, reason: str) -> None:
        """The agent is dead or silent; nothing more comes from the link."""


class AgentLink:
    """One connection. `connect` first."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: AgentEndpoint,
        identity: Identity,
        listener: Listener,
        clock: Callable[[], float],
    ) -> None:
        self.endpoint = endpoint
        self.workers: tuple[LivingWorker, ...] = ()
        """What lived on the agent when it last answered a HELLO."""
        self.ending = ""
        """Why the agent ends; it then takes no new worker."""
        self.lost = ""
        """Why the link is over."""
        self._identity, self._listener, self._clock = identity, listener, clock
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE)
        find_peer_soon(self._socket)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # repeated commands are few, and the agent's silence ends the link
        if endpoint.server_key:
            if identity.keys is None:
                raise BackendError(f"the agent of node {endpoint.node} has CURVE keys, and this master has none")
            self._socket.curve_serverkey = endpoint.server_key.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = identity.keys.public, identity.keys.secret
        self._welcomed = asyncio.Event()
        self._commands: dict[int, asyncio.Future[None]] = {}
        self._last_command = 0
        self._received = 0
        self._announced = 0
        """The last report that the agent had made when it first answered."""
        self._caught_up = asyncio.Event()
        self._failure: Exception | None = None
        self._unacknowledged: dict[int, bool] = {}
        """The numbers of received reports: whether each may be acknowledged."""
        self._running = RunningClock()
        self._heard = self._running.read()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usable(self) -> bool:
        """Whether it takes commands for new workers."""
        return not self.lost and not self.ending

    async def connect(self) -> None:
        """Says HELLO. Raises `BackendError` if the agent does not answer, `StaleMasterError` if it has another master."""
        self._socket.connect(self.endpoint.address)
        self._tasks = [asyncio.create_task(part) for part in (self._read(), self._write(), self._beat())]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._welcomed.wait()
        except TimeoutError:
            raise BackendError(
                f"the agent of node {self.endpoint.node} at {self.endpoint.address} did not answer within {CONNECT_SECONDS:g} s"
            ) from None
        self._raise_if_lost()

    async def command(self, kind: str, **fields: Any) -> None:
        """Has the agent do something, which it acknowledged when this returns.

        Raises `BackendError` if it refuses, or is lost; `StaleMasterError` if it has another master.
        """
        self._raise_if_lost()
        self._last_command += 1
        number = self._last_command
        try:
            data = MESSAGES.pack({"kind": kind, "epoch": self._identity.epoch, "id": number, **fields})
        except BadFrame as error:
            raise BackendError(str(error)) from None
        answer = self._commands[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                while not answer.done():
                    self._outgoing.put_nowait(data)
                    await asyncio.wait((answer,), timeout=REPEAT_SECONDS)
            answer.result()
        except TimeoutError:
            raise BackendError(
                f"the agent of node {self.endpoint.node} did not answer {kind} within {COMMAND_SECONDS:g} s"
            ) from None
        finally:
            del self._commands[number]
            answer.cancel()

    async def wait_for_reports(self) -> None:
        """Waits, at most `CONNECT_SECONDS`, until the reports have come that the agent had made when it first answered."""
        with suppress(TimeoutError):  # the rest comes later
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._caught_up.wait()

    def acknowledge(self, number: int) -> None:
        """Tells the agent that a report need not be repeated, once that is true of all before it, too."""
        if number in self._unacknowledged:
            self._unacknowledged[number] = True
        last = 0
        for earlier in list(self._unacknowledged):
            if not self._unacknowledged[earlier]:
                break
            del self._unacknowledged[earlier]
            last = earlier
        if last and not self.lost:
            self._send({"kind": protocol.ACKNOWLEDGE, "number": last})

    def lose(self, reason: str) -> None:
        """Ends the link, since the agent is known to be gone."""
        if not self.lost:
            self.lost = reason
            self._fail(BackendError(f"the agent of node {self.endpoint.node} is lost: {reason}"))
            self._listener.on_lost(self, reason)

    async def close(self) -> None:
        """Frees the socket."""
        self.lost = self.lost or "the link was closed"
        self._fail(BackendError(f"the link to the agent of node {self.endpoint.node} is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    # --- tasks ---

    async def _write(self) -> None:
        while True:
            await self._socket.send(await self._outgoing.get())

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                self._handle(MESSAGES.unpack(data))
            except (BadFrame, KeyError, TypeError) as error:
                logger.warning("the agent of node %s sent what is not understood: %s", self.endpoint.node, error)

    async def _beat(self) -> None:
        """Says HELLO, and finds out that the agent is silent: by a clock that counts only while this process runs."""
        lease = self._identity.lease_seconds
        silence = max(lease / HELLOS_IN_A_LEASE * 2, LEAST_SILENCE_SECONDS)
        said = self._running.read() - lease
        while not self.lost:
            now = self._running.read()
            if now - self._heard > silence and self._welcomed.is_set():
                self.lose(f"it did not answer for {now - self._heard:.1f} s")
                return
            if now - said >= lease / HELLOS_IN_A_LEASE:
                said = now
                hello = {"job": self._identity.job, "lease_seconds": lease, "received": self._received}
                self._send({"kind": protocol.HELLO, **hello})
            await asyncio.sleep(min(PULSE_SECONDS, lease / HELLOS_IN_A_LEASE / 2))

    # --- messages ---

    def _send(self, message: Mapping[str, Any]) -> None:
        self._outgoing.put_nowait(MESSAGES.pack({"epoch": self._identity.epoch, **message}))

    def _handle(self, message: Mapping[str, Any]) -> None:
        self._heard = self._running.read()
        match message["kind"]:
            case protocol.WELCOME:
                self._welcome(message)
            case protocol.DONE:
                self._answer(message["id"], None)
            case protocol.REFUSED:
                self._refused(message)
            case protocol.REPORT:
                self._report(message)
            case protocol.BEAT:
                self._listener.on_heartbeat(typed(message, Heartbeat, "a heartbeat", BadFrame))

    def _welcome(self, message: Mapping[str, Any]) -> None:
        if message["agent"] != self.endpoint.agent:
            self.lose(f"another agent, {message['agent']}, answers at {self.endpoint.address}")
            return
        self.workers = typed(message["workers"], tuple[LivingWorker, ...], "workers", BadFrame)
        self.ending = str(message["ending"])
        if not self._welcomed.is_set():
            self._announced = typed(message["reports"], int, "reports", BadFrame)
            self._note_progress()
            self._welcomed.set()

    def _refused(self, message: Mapping[str, Any]) -> None:
        where = f"the agent of node {self.endpoint.node}"
        if message["epoch"] > self._identity.epoch:
            error = StaleMasterError(
                f"{where} obeys a master of epoch {message['epoch']}; this one has epoch {self._identity.epoch}"
            )
            self.lost = str(error)
            self._fail(error)
            self._listener.on_stale(error)
        elif message["id"]:
            self._answer(message["id"], BackendError(f"{where} refused: {message['reason']}"))
        else:
            self.lose(f"it refused the master: {message['reason']}")

    def _report(self, message: Mapping[str, Any]) -> None:
        number = typed(message["number"], int, "the number of a report", BadFrame)
        if number <= self._received:
            return
        event = event_of(message, self._clock())
        self._received = number
        self._unacknowledged[number] = False
        self._listener.on_report(self, number, event)
        self._note_progress()

    def _note_progress(self) -> None:
        if self._received >= self._announced:
            self._caught_up.set()

    def _answer(self, number: int, error: Exception | None) -> None:
        future = self._commands.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for number in list(self._commands):
            self._answer(number, error)
        self._welcomed.set()
        self._caught_up.set()

    def _raise_if_lost(self) -> None:
        if self._failure is not None:
            raise self._failure
