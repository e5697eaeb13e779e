"""The work of an environment's workers: gives each session to the least loaded one, and passes messages on.

Nothing that a worker sends is trusted: a message that cannot be ends the worker, and concerns its own sessions only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from counterpoint.environments.base import EnvironmentContext, Model, WorkerError
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.protocol import Message, ProtocolError
from counterpoint.environments.workers.session import RemoteSession
from counterpoint.environments.workers.supply import Supply, WorkerPlace
from counterpoint.environments.workers.watcher import Watcher
from counterpoint.environments.workers.wire import BatchingWire
from counterpoint.transport.wires.endpoint import IPC, socket_path

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
KILL_SECONDS = 15.0
MOST_MESSAGES = 4_000
"""The messages of one worker between two looks at it, calls of the model left out."""
UNREAD_FRAMES = 64
"""The frames of one worker that wait to be read."""


class WorkerPool:
    """Runs on one event loop, from `start` to `close`."""

    def __init__(self, config: EnvironmentConfig, examples: int, group_scoring: bool) -> None:
        """Every worker has to have that number of examples, and `group_scoring`."""
        self._config = config
        self._expected = (examples, group_scoring)
        self._supply = Supply(config, self._lost, lambda error: self._end_if_none())
        self._watcher = Watcher(config, self._supply, self._drain)
        self._peers: dict[bytes, WorkerPlace] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._number = 0
        self._wire: BatchingWire | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def workers(self) -> list[WorkerPlace]:
        """All, ready or not."""
        return self._supply.workers

    # --- life ---

    async def start(self, context: EnvironmentContext) -> None:
        """Starts the workers; returns when one is ready. Raises `ValueError` when none can be started."""
        self._loop = asyncio.get_running_loop()
        context.directory.mkdir(parents=True, exist_ok=True)
        self._supply.start(context, self._listen(context.directory.resolve()))
        self._watcher.start()
        while not any(_takes_rollouts(worker) for worker in self.workers):
            if self._supply.failure:
                raise ValueError(self._supply.failure)
            self._supply.changed.clear()
            await self._supply.changed.wait()

    async def close(self) -> None:
        """Asks the workers to leave, kills those that do not, and leaves nothing."""
        self._supply.stop()
        if self._wire is not None and self._context is not None:
            for worker in self.workers:
                if worker.ready:
                    self._send(worker, [protocol.LEAVE])
                elif worker.process is not None:
                    worker.process.kill()
            self._end_waiting(WorkerError(f"{self._supply.where} is closed"))
            if not await self._supply.all_ended(LEAVE_SECONDS):
                for worker in self.workers:
                    if worker.process is not None:
                        worker.process.kill()
                if not await self._supply.all_ended(KILL_SECONDS):
                    logger.error("%s: workers that were killed have not ended", self._supply.where)
            self._wire.close()
            self._context.term()
            self._socket_file.unlink(missing_ok=True)
        self._supply.close()

    def _listen(self, directory: Path) -> str:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.router_mandatory = True  # else a message to a peer that is gone is dropped silently
        # A peer whose frame claims more is dropped, before memory is taken.
        socket.maxmsgsize = protocol.MAX_FRAME_BYTES
        socket.rcvhwm, socket.sndhwm = UNREAD_FRAMES, 0  # what is sent is bounded by the sessions and their calls
        self._socket_file = socket_path(directory, "workers.sock")
        self._wire = BatchingWire(socket, self._received, self._malformed)
        socket.bind(f"{IPC}{self._socket_file}")
        self._socket_file.chmod(0o600)
        return f"{IPC}{self._socket_file}"

    # --- sessions ---

    async def play(
        self, model: Model | None, deadline: float, message: Callable[[int], Message], nbytes: int = 0
    ) -> tuple[RemoteSession, Message]:
        """Plays a session at the least loaded worker, once one has room; returns its `DONE`.

        `message` makes its first message. Cancels the session in the worker if the caller is cancelled. Raises `WorkerError`.
        """
        while (worker := self._least_loaded()) is None:
            if reason := self._why_none():
                raise WorkerError(reason)
            await self._wait_for_room()
        self._number += 1
        session = RemoteSession(self._number, model, deadline, lambda answer, size: self._send(worker, answer, size))
        worker.sessions[session.number] = session
        self._send(worker, message(session.number), nbytes)
        try:
            return session, await session.play()
        finally:
            if not session.ended:
                self._send(worker, [protocol.CANCEL, session.number])

    def _least_loaded(self) -> WorkerPlace | None:
        found: WorkerPlace | None = None
        load = (True, self._config.worker_sessions)
        for worker in self.workers:
            if _takes_rollouts(worker):
                its = (self._watcher.is_silent(worker), len(worker.sessions))
                if its < load and its[1] < self._config.worker_sessions:
                    found, load = worker, its
        return found

    def _why_none(self) -> str:
        """Returns why no worker is there or to be expected soon; empty if one is."""
        return self._supply.failure or self._supply.all_down()

    async def _wait_for_room(self) -> None:
        place: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._room()  # the room is another's
            raise

    def _room(self) -> None:
        """Wakes one that waits for room."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return

    def _end_if_none(self) -> None:
        if reason := self._why_none():
            self._end_waiting(WorkerError(reason))

    def _end_waiting(self, error: WorkerError) -> None:
        waiting, self._waiting = self._waiting, deque()
        for place in waiting:
            if not place.done():
                place.set_exception(error)

    def _drain(self, worker: WorkerPlace, reason: str) -> None:
        worker.draining = reason
        if not worker.sessions:
            self._send(worker, [protocol.LEAVE])

    def _lost(self, worker: WorkerPlace, error: WorkerError) -> None:
        if worker.peer is not None:
            self._peers.pop(worker.peer, None)
        for session in worker.sessions.values():
            session.fail(error)

    # --- messages ---

    def _send(self, worker: WorkerPlace, message: Message, nbytes: int = 0) -> None:
        if worker.peer is not None and self._wire is not None:
            self._wire.send(worker.peer, message, nbytes)

    def _received(self, peer: bytes, message: Message) -> None:
        worker = self._peers.get(peer)
        if worker is None:
            self._greeted(peer, message)
            return
        try:
            self._handle(worker, message)
        except ProtocolError as error:
            self._malformed(peer, str(error))

    def _malformed(self, peer: bytes, error: str) -> None:
        worker = self._peers.get(peer)
        if worker is not None:
            worker.kill(f"was killed: it sent what no worker sends; {error}")

    def _greeted(self, peer: bytes, message: Message) -> None:
        """Takes a worker's first message. Anybody else is ignored."""
        if message[0] != protocol.HELLO or not protocol.is_message(message, bytes, int):
            return
        for worker in self.workers:
            expected = worker.token.encode()
            if worker.process is not None and worker.peer is None and secrets.compare_digest(expected, message[1]):
                worker.peer, worker.process.pid = peer, message[2]
                self._peers[peer] = worker
                return

    def _handle(self, worker: WorkerPlace, message: Message) -> None:
        if worker.killed:
            return
        self._watcher.heard(worker)
        kind = message[0]
        worker.messages += kind not in (protocol.GENERATE, protocol.PARSE)
        if worker.messages > MOST_MESSAGES:
            raise ProtocolError(f"more than {MOST_MESSAGES} messages at once")
        if kind == protocol.BEAT and protocol.is_message(message, float):
            self._watcher.beat(worker, message[1])
        elif kind in _OF_SESSIONS and protocol.is_message(message, *_OF_SESSIONS[kind]):
            self._of_session(worker, message)
        elif kind == protocol.READY and protocol.is_message(message, int, bool) and not worker.ready:
            self._is_ready(worker, message[1], message[2])
        elif kind == protocol.UNABLE and protocol.is_message(message, str):
            self._supply.cannot_start(worker, message[1])
        else:
            raise ProtocolError(f"a message of kind {kind!r:.20} that cannot be")

    def _of_session(self, worker: WorkerPlace, message: Message) -> None:
        session = worker.sessions.get(message[1])
        if session is None:
            raise ProtocolError("a message about a session that it does not have")
        session.received(message)
        if session.ended:
            del worker.sessions[session.number]
            if message[2] is None:
                worker.deaths = 0
            if worker.draining and not worker.sessions:
                self._send(worker, [protocol.LEAVE])
            self._room()

    def _is_ready(self, worker: WorkerPlace, examples: int, group_scoring: bool) -> None:
        if (examples, group_scoring) != self._expected:
            worker.kill(
                f"was killed: it has {examples} examples and group_scoring = {group_scoring}; when the environment was loaded "
                "first it had {} and {}".format(*self._expected)
            )
            return
        self._supply.is_ready(worker)
        for _ in range(min(len(self._waiting), self._config.worker_sessions)):
            self._room()

    # --- metrics ---

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of the workers, and resets the largest lag and the number of restarts."""
        restarts, self._supply.restarts = self._supply.restarts, 0
        prefix = f"environment/{self._config.name}"
        return {
            f"{prefix}/lag/max": self._watcher.take_lag(),
            f"{prefix}/restarts": restarts,
            f"{prefix}/sessions": sum(len(worker.sessions) for worker in self.workers),
            f"{prefix}/workers": sum(worker.ready for worker in self.workers),
        }


def _takes_rollouts(worker: WorkerPlace) -> bool:
    return worker.ready and not worker.draining and not worker.killed


_OF_SESSIONS: dict[int, tuple[type | tuple[type, ...], ...]] = {
    protocol.GENERATE: (int, int, str, int, (dict, type(None)), bytes),
    protocol.PARSE: (int, int, int, list, bool),
    protocol.ABANDON: (int, int),
    protocol.DONE: (int, (str, type(None)), (list, type(None)), list, bool, (str, type(None))),
}
