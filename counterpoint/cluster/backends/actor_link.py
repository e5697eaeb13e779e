"""A master's end of a keeper on Ray: the bytes of its connection go through the keeper's actor (`ray_actor.py`).

What an actor is asked may be repeated, and is where it was unavailable: each call says where in the stream it is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from counterpoint.cluster.backends.link import LIVES_IN_A_LEASE, Link, Tell, order_map
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.backends.ray_places import ActorName
from counterpoint.cluster.clock import RunningClock
from counterpoint.cluster.errors import BackendError

logger = logging.getLogger(__name__)

START_SECONDS = 90.0
"""Longest time from the creation of an actor to its first answer."""

ADOPT_SECONDS = 20.0
"""Longest time for an actor of an earlier master to answer."""

PULSE_SECONDS = 0.5
"""Seconds between two looks at the clock while an actor's answer is waited for."""

CHUNK = 2**20
"""Bytes that are sent to an actor at once."""


class ActorLink(Link):
    """A link to a keeper below an actor."""

    owner = "actor"
    silent_leases = 0.75

    def __init__(
        self,
        name: ActorName,
        epoch: int,
        reach: Callable[[], Awaitable[Any]],
        bury: Callable[[ActorLink], Awaitable[None]],
        clock: Callable[[], float],
        tell: Tell,
    ) -> None:
        """`reach` makes or finds the actor, and returns its handle; `bury` is `Link.bury`. The rest is as of `Link`."""
        super().__init__(name.worker, name.incarnation, "", name.bundle, clock, tell)
        self.name = name
        self._epoch, self._reach, self._bury = epoch, reach, bury
        self._actor: Any = None
        self._relaying: asyncio.Task[None] | None = None

    async def start(self, order: WorkerOrder, epoch: int, lease_seconds: float) -> None:
        """See `Link.start`."""
        self.is_class = bool(order.description)
        said = await self._connect(START_SECONDS, order.log_file)
        given = order_map(order, self.node, f"tcp://{said['address']}")
        self._open(self._tunnel(lease_seconds), epoch, lease_seconds, order=given)

    async def find(self, epoch: int, lease_seconds: float) -> None:
        """See `Link.find`."""
        await self._connect(ADOPT_SECONDS, "")
        self._open(self._tunnel(lease_seconds), epoch, lease_seconds)

    async def bury(self) -> None:
        """See `Link.bury`."""
        await self._bury(self)

    def close(self) -> None:
        """See `Link.close`."""
        super().close()
        if self._relaying is not None:
            self._relaying.cancel()

    async def _connect(self, seconds: float, log_file: str) -> Mapping[str, Any]:
        """Has the actor connect to its keeper, which is started if there is a log for it. Raises `BackendError`."""
        self._actor = await self._reach()
        said = await self._ask("connect", log_file, seconds=seconds)
        self.node = said["node"]
        if said["over"]:
            raise BackendError("its keeper has ended")
        return said

    def _tunnel(self, lease_seconds: float) -> socket.socket:
        """Returns a connection to the keeper."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._relaying = asyncio.create_task(self._relay(ours, lease_seconds / LIVES_IN_A_LEASE))
        return theirs

    async def _relay(self, ours: socket.socket, pulse: float) -> None:
        """Relays until the keeper's connection ends, or its actor is lost: then ours ends, after what was received."""
        with ours:
            both = [asyncio.create_task(self._write(ours)), asyncio.create_task(self._read(ours, pulse))]
            try:
                for done in (await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))[0]:
                    done.result()
            except BackendError as error:
                self.loss = self.loss or str(error)
            except Exception as error:
                logger.exception("the bytes of %s cannot be relayed", self.worker)
                self.loss = self.loss or f"its bytes cannot be relayed: {error!r}"
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    async def _read(self, ours: socket.socket, pulse: float) -> None:
        received, is_over = 0, False
        while not is_over:
            said = await self._ask("read", received, pulse)
            await asyncio.get_running_loop().sock_sendall(ours, said["data"])
            received += len(said["data"])
            is_over = said["over"]

    async def _write(self, ours: socket.socket) -> None:
        sent = 0
        while data := await asyncio.get_running_loop().sock_recv(ours, CHUNK):
            await self._ask("write", sent, data)
            sent += len(data)

    async def _ask(self, method: str, *arguments: Any, seconds: float = math.inf) -> Mapping[str, Any]:
        """Returns an actor's answer. What cannot be delivered is sent again.

        Raises `BackendError` if the actor is lost, has another master, or does not answer in time, by a clock that counts only
        while this process runs.
        """
        import ray

        if (call := getattr(self._actor, method, None)) is None:
            raise BackendError("its actor is of another version")
        clock = RunningClock()
        while clock.read() < seconds:
            answer = _answer_of(call.remote(self._epoch, *arguments))
            while not answer.done() and clock.read() < seconds:
                await asyncio.wait({answer}, timeout=PULSE_SECONDS)
                if self.closed.is_set():
                    raise BackendError(self.loss or "it was given up")
            if not answer.done():
                break
            error = answer.exception()
            if isinstance(error, ray.exceptions.ActorUnavailableError):  # perhaps it is dead; that is told, too
                await asyncio.sleep(PULSE_SECONDS)
                continue
            if isinstance(error, ray.exceptions.RayActorError):
                raise BackendError("its actor died")
            if error is not None:
                raise BackendError(f"its actor failed: {_first_line(error)}")
            said: Mapping[str, Any] = answer.result()
            if stale := said.get("stale"):
                self.stale_epoch = stale
                raise BackendError(f"its actor obeys a master of epoch {stale}")
            return said
        raise BackendError(f"its actor did not answer {method} within {seconds:g} s")


def _answer_of(reference: Any) -> asyncio.Future[Any]:
    """What becomes the result of a call of Ray, on this event loop; nobody may wait for it any more."""
    answer = asyncio.wrap_future(reference.future())
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return answer


def _first_line(error: BaseException) -> str:
    """The first line of what the actor raised, or of Ray's own message."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
