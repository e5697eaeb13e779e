"""A master's end of the keeper of one worker (`transport/process/keeper`), wherever that runs.

A backend says how the keeper is started or found again, and how it is buried: by its socket on this machine
(`counterpoint/cluster/backends/keeper_link.py`), and through an actor on Ray (`counterpoint/cluster/backends/actor_link.py`). All
else is the same: orders, events until they are acknowledged, signs of life both ways, and what a later master finds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import WorkerHeartbeat
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.backends.said import LONGEST_ADDRESS, event_of
from counterpoint.cluster.clock import RunningClock
from counterpoint.cluster.errors import BackendError
from counterpoint.cluster.manager.events import Created, CreateFailed, Event, NodeLost, WorkerExited
from counterpoint.transport.framed_maps import FramedChannel
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.printable import printable
from counterpoint.transport.process.keeper import messages
from counterpoint.transport.process.keeper.messages import MESSAGES

logger = logging.getLogger(__name__)

LEASES_OF_THE_FENCE = 2
"""Leases after which nothing runs any more of a worker whose keeper hears no master."""

LIVES_IN_A_LEASE = 4
LEAST_SILENCE_SECONDS = 3.0
"""A keeper on a busy machine may be late for so long, however short the lease."""

MOST_UNSENT = 2**26
"""Bytes that wait for a keeper that does not read; then it counts as silent."""

NO_PROCESS = 128 + 9
"""Exit code of a worker whose process is not known, or no more."""

Tell = Callable[[Event | WorkerHeartbeat, "Link", int], None]
"""Takes what a keeper tells: an event with its number, to be acknowledged, or a heartbeat."""


class Link(ABC):
    """One connection, for as long as the master or the keeper lives. Make it on the event loop; `run` it in a task."""

    owner = "keeper"
    """The name of the keeper for people."""
    silent_leases = 0.5
    """How much of a lease a keeper may not answer."""

    def __init__(
        self,
        worker: str,
        incarnation: int,
        node: str,
        bundle: str,
        clock: Callable[[], float],
        tell: Tell,
    ) -> None:
        """`clock` dates the events."""
        self.worker, self.incarnation, self.node, self.bundle = worker, incarnation, node, bundle
        self.is_class = False
        self.created = False
        """Whether its process was started, as far as it has said."""
        self.ended = False
        """Whether it has told the worker's end."""
        self.stale_epoch = 0
        """The epoch of the later master that it obeys."""
        self.silent = False
        """Whether it was given up because it did not answer."""
        self.loss = ""
        """Why it was given up."""
        self.node_is_gone = False
        """Whether all that was on its node is lost with it."""
        self.is_left = False
        """Whether this master has disconnected; the keeper goes on."""
        self.log_file: Path | None = None
        """The worker's log, if this master rotates it."""
        self.facts: Mapping[str, Any] | None = None
        self.known = asyncio.Event()
        """Set once it has answered and told what it had kept, or is gone."""
        self.gone = asyncio.Event()
        """Set once nothing of it runs any more."""
        self._clock, self._tell = clock, tell
        self._channel: FramedChannel | None = None
        self.closed = asyncio.Event()
        self._received = 0
        self._unacknowledged: dict[int, bool] = {}
        """The numbers of received messages: whether each may be acknowledged."""
        self._running = RunningClock()
        self._heard = self._lived = self._running.read()

    @abstractmethod
    async def start(self, order: WorkerOrder, epoch: int, lease_seconds: float) -> None:
        """Starts the keeper, and has it start the worker. Raises `OSError`, `BackendError`."""

    @abstractmethod
    async def find(self, epoch: int, lease_seconds: float) -> None:
        """Connects to the keeper of an earlier master. Raises `OSError`, `BackendError` if it is gone."""

    @abstractmethod
    async def bury(self) -> None:
        """Sees to it that nothing of the keeper runs; one that has told the worker's end ends by itself."""

    # --- the connection ---

    def _open(self, connection: socket.socket, epoch: int, lease_seconds: float, **order: Any) -> None:
        """Takes a connection to the keeper, and greets it. Raises `BackendError`."""

        def warn(error: str) -> None:
            logger.warning("the %s of %s sent what is not understood: %s", self.owner, self.worker, error)
            self.close()

        self._heard = self._lived = self._running.read()
        self._channel = FramedChannel(connection, MESSAGES, self._take, warn, self.close, most_unsent=MOST_UNSENT)
        self.send(messages.HELLO, epoch=epoch, lease_seconds=lease_seconds, **order)

    def close(self) -> None:
        """Ends the connection; `run` then buries what is left."""
        if self._channel is not None:
            self._channel.close()
        self.closed.set()

    def lose(self, loss: str) -> None:
        """Ends the connection, for a reason, unless it has ended."""
        if not self.closed.is_set():
            self.loss = loss
            self.close()

    async def run(self) -> None:
        """Returns once the keeper or its worker is gone, and nothing of it runs any more."""
        await self.closed.wait()
        try:
            if not (self.stale_epoch or self.is_left):
                await self.bury()
        except Exception:  # whatever it is, the worker's end is to be told
            logger.exception("something of %s may be left", self.worker)
        finally:
            self.known.set()
            self.gone.set()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message; a keeper that is gone is told nothing, and its worker's end is on its way. Raises `BackendError`."""
        if self.closed.is_set() or self._channel is None:
            return
        try:
            if not self._channel.send({"kind": kind, **fields}):
                self.give_up()  # it does not read
        except BadFrame as error:
            raise BackendError(str(error)) from None

    def live(self, lease_seconds: float) -> None:
        """Shows it life, if that is due; gives it up if it does not answer. By a clock that counts while this process runs."""
        now = self._running.read()
        silence = max(lease_seconds * self.silent_leases, LEAST_SILENCE_SECONDS)
        if self._channel is None:  # it is not there yet, which has a deadline of its own
            return
        if now - self._heard > silence:
            self.give_up()
        elif now - self._lived >= lease_seconds / LIVES_IN_A_LEASE:
            self._lived = now
            self.send(messages.LIFE)

    def give_up(self) -> None:
        """Ends the connection to a keeper that does not answer; `run` then kills it, and all below it."""
        if not self.closed.is_set():
            logger.warning("the %s of %s does not answer; it is killed", self.owner, self.worker)
            self.silent = True
            self.lose(f"its {self.owner} did not answer")

    def disconnect(self) -> None:
        """Closes the connection; the keeper goes on for a lease."""
        self.is_left = True
        self.close()

    def acknowledge(self, number: int) -> None:
        """Tells it that a message need not be repeated, once that is true of all before it, too."""
        if number in self._unacknowledged:
            self._unacknowledged[number] = True
        last = 0
        for earlier in list(self._unacknowledged):
            if not self._unacknowledged[earlier]:
                break
            del self._unacknowledged[earlier]
            last = earlier
        if last:
            self.send(messages.ACKNOWLEDGE, number=last)

    # --- what it says ---

    def _take(self, message: Mapping[str, Any]) -> None:
        self._heard = self._running.read()
        try:
            self._handle(message)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("the %s of %s sent what makes no sense: %r", self.owner, self.worker, error)
            self.close()

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case messages.FACTS:
                self.facts = message
                self.bundle, self.node = str(message["bundle"] or self.bundle), str(message["node"] or self.node)
                self.created = self.created or message["lives"]
            case messages.REFUSED:
                self.stale_epoch = int(message["epoch"])
                self.close()
            case messages.BEAT:
                texts = (printable(message["status"]), printable(message["trouble"]))
                beat = WorkerHeartbeat(self.worker, self.incarnation, *texts, message["pid"], message["alive"])
                self._tell(beat, self, 0)
            case messages.LIFE:
                pass
            case _:
                self._hear(message, int(message["number"]))
        if self.facts is not None and self._received >= self.facts["last"]:
            self.known.set()

    def _hear(self, message: Mapping[str, Any], number: int) -> None:
        """Takes what the keeper tells of its worker."""
        if number <= self._received:
            return
        self._received = number
        self._unacknowledged[number] = False
        event = event_of(message, self.worker, self.incarnation, self.node, self._clock())
        self.created = self.created or isinstance(event, Created)
        self.ended = self.ended or isinstance(event, WorkerExited | CreateFailed)
        if event is None:
            self.acknowledge(number)
        else:
            self._tell(event, self, number)

    def living(self) -> LivingWorker | None:
        """Returns the worker as a new master finds it; None if it has ended."""
        facts = self.facts
        if facts is None or not facts["lives"] or self.ended or self.closed.is_set():
            return None
        address, key = facts["address"][:LONGEST_ADDRESS], facts["server_key"][:LONGEST_ADDRESS]
        who = (self.worker, self.incarnation, self.node, facts["pid"])
        return LivingWorker(*who, facts["ready"], facts["started"], address, key, self.bundle)

    def loss_event(self) -> Event:
        """Returns how the worker has ended, of which the keeper has told nothing."""
        who, reason, at = (self.worker, self.incarnation), self.loss or f"its {self.owner} was killed", self._clock()
        if not self.created:
            return CreateFailed(*who, reason, at)
        if self.node_is_gone:
            return NodeLost(self.node, reason, at)
        return WorkerExited(*who, NO_PROCESS, reason, at, lost=self.silent)


def order_map(order: WorkerOrder, node: str, listen: str, path: str = "") -> dict[str, Any]:
    """Returns an order as a keeper on a node takes it; a worker of a class listens for calls at such an address.

    `path`: the keeper's socket, beside which the epoch of the last master stands.
    """
    given = asdict(order) | {"socket": path, "node": node}
    if order.description:
        given["description"] = dict(order.description) | {"node": node, "listen": listen}
    return given
