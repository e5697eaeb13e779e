"""The hosts of an environment, as the orchestrator has them: other machines whose workers play its rollouts (`host.py`).

A host connects by TCP with a CURVE key. Nothing of a peer without an authorized key is read. For the pool a host is one worker
that stands for several.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from counterpoint.environments.config import EnvironmentConfig, HostsConfig
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.errors import WorkerError
from counterpoint.environments.workers.protocol import Message, ProtocolError
from counterpoint.environments.workers.supply import SOON_SECONDS, Worker
from counterpoint.environments.workers.wire import BatchingWire
from counterpoint.transport.configuration.toml_file import without_places
from counterpoint.transport.printable import printable
from counterpoint.transport.wires.listener_keys import WatchedListenerKeys

logger = logging.getLogger(__name__)

VERSION = 1
"""The version of the messages: both ends need the same."""
TICK_SECONDS = 0.25
ALIVE_TICKS = 4
"""A host is sent a sign of life so often; that it cannot be sent shows a broken connection."""
LOST_SECONDS = 20.0
"""A host, or an orchestrator, that is silent for so long is lost."""
HEARTBEAT_SECONDS = 3.0
"""ZMQ's interval; it notices within three of these that a machine is gone."""
MOST_WORKERS = 1024
"""The workers of one host."""
UNREAD_FRAMES = 256
"""The frames of one host that wait to be read."""
_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+|\*):\d{1,5}")


def identity_of(
    config: EnvironmentConfig, seed: int, examples: int, group_scoring: bool, fingerprint: str | None
) -> dict[str, str]:
    """Returns what has to be the same at both ends, each as JSON. Keys and tokens may lie elsewhere."""
    same: dict[str, Any] = {
        "protocol": VERSION, "name": config.name, "kind": config.kind,
        "args": without_places(config.args),
        "rollout_timeout_seconds": config.rollout_timeout_seconds, "seed": seed,
        "number of examples": examples, "group_scoring": group_scoring, "fingerprint of the data": fingerprint,
    }  # fmt: skip
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in same.items()}


@dataclass(slots=True)
class Host(Worker):
    """A host that has joined. `width` is the number of its workers that are ready."""

    name: str = ""
    dropped: Callable[[Host], None] | None = None

    def __str__(self) -> str:
        return f"its host {self.name}"

    def kill(self, reason: str) -> None:
        """Drops it, once: its sessions fail, and it has to join again."""
        if not self.killed:
            self.killed = reason
            if self.dropped is not None:
                self.dropped(self)


class Hosts:
    """Listens for hosts, from `start` to `close`; does nothing for an environment without `hosts`.

    `handle` takes a host's messages about sessions, `lost` fails those of one that is gone, `more` is called when there are more
    workers, `fewer` again and again while there is none.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        handle: Callable[[Worker, Message], None],
        lost: Callable[[Worker, WorkerError], None],
        more: Callable[[], None],
        fewer: Callable[[], None],
    ) -> None:
        self.wire: BatchingWire | None = None
        self._config = config
        self._where = f"environment {config.name!r}"
        self._handle = handle
        self._lost = lost
        self._more = more
        self._fewer = fewer
        self._joined: dict[bytes, Host] = {}
        self._last_loss = ""
        self._failed_handshakes = 0

    def __iter__(self) -> Iterator[Host]:
        return iter(self._joined.values())

    @property
    def width(self) -> int:
        """The number of workers of all hosts that are ready."""
        return sum(host.width for host in self)

    def missing(self) -> str:
        """Returns why no host has a worker, for a person; empty if one has."""
        if self.width or self._config.hosts is None:
            return ""
        if self._joined:
            return "its hosts have no worker that is ready"
        last = f"; the last one to leave: {self._last_loss}" if self._last_loss else ""
        return f"no host has joined at {self._config.hosts.address} (counterpoint env serve){last}"

    def missing_for_long(self) -> str:
        """Does as `missing`; empty also while one may come back soon."""
        reason = self.missing()
        if not reason or self._loop.time() - self._none_since < SOON_SECONDS:
            return ""
        return f"{self._where}: {reason}"

    def start(self, identity: dict[str, str], spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Listens. Raises `ValueError` for keys or an address that cannot be used."""
        hosts = self._config.hosts
        self._loop = asyncio.get_running_loop()
        self._none_since = self._loop.time()
        if hosts is None:
            return
        self._identity = identity
        self._listen(hosts)
        spawn(self._watch())

    def close(self) -> None:
        """Tells the hosts to leave, and stops to listen."""
        if self.wire is None:
            return
        for peer, host in list(self._joined.items()):
            self.wire.send(peer, [protocol.LEAVE])
            host.killed = "is no longer needed"
            self._forget(host)
        self._monitor_socket.disable_monitor()
        self._monitor.close()
        self.wire.close(linger_seconds=1.0)
        self._authenticator.stop()
        self._context.term()
        self.wire = None

    # --- the socket ---

    def _listen(self, hosts: HostsConfig) -> None:
        where = f"{self._where}: hosts"
        if _ADDRESS.fullmatch(hosts.address) is None:
            raise ValueError(f"{where}.address: {hosts.address!r} is not tcp://HOST:PORT")
        keys = WatchedListenerKeys(hosts, where)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", keys)
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.value.own.public, keys.value.own.secret
        socket.router_mandatory = True
        socket.rcvhwm, socket.sndhwm = UNREAD_FRAMES, 0
        bound_and_beating(socket, hosts.address)
        failed = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        self._monitor_socket, self._monitor = socket, socket.get_monitor_socket(failed)
        self.wire = BatchingWire(socket, self._received, self._malformed, self._unreachable)
        try:
            socket.bind(hosts.address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{where}.address: cannot listen on {hosts.address}: {error.strerror}") from error

    async def _watch(self) -> None:
        ticks, due = 0, self._loop.time()
        while True:
            due += TICK_SECONDS
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self.wire is None:
                return
            ticks += 1
            self._count_refused()
            if self._loop.time() - due >= TICK_SECONDS:  # this loop was blocked, and has the hosts' signs to read
                due = self._loop.time()
                continue
            for host in list(self):
                self._look_at(host, ticks)
            if not self.width:
                self._fewer()

    def _look_at(self, host: Host, ticks: int) -> None:
        host.messages = 0
        host.silent_ticks += 1
        if host.silent_ticks * TICK_SECONDS > LOST_SECONDS:
            host.kill(f"is lost: it gave no sign for {LOST_SECONDS:g} s")
        elif ticks % ALIVE_TICKS == 0 and self.wire is not None and host.peer is not None:
            self.wire.send(host.peer, [protocol.ALIVE])

    def _count_refused(self) -> None:
        """Logs peers without an authorized key, now and then: there may be many."""
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._failed_handshakes += 1
            if self._failed_handshakes & (self._failed_handshakes - 1) == 0:  # 1, 2, 4, 8 ...
                logger.warning(
                    "%s: refused a peer without an authorized key; %d so far", self._where, self._failed_handshakes
                )

    # --- messages ---

    def _received(self, peer: bytes, message: Message) -> None:
        host = self._joined.get(peer)
        if host is None:
            self._greeted(peer, message)
            return
        try:
            if message[0] == protocol.ROOM and protocol.is_message(message, int):
                self._has_room(host, message[1])
            elif message[0] in (protocol.HELLO, protocol.READY, protocol.UNABLE):
                raise ProtocolError("a message that only a worker of the orchestrator's machine sends")
            else:
                self._handle(host, message)
        except ProtocolError as error:
            host.kill(f"was dropped: it sent what no host sends; {error}")

    def _greeted(self, peer: bytes, message: Message) -> None:
        """Takes a host that says what it has. One that was dropped meanwhile is told to join again."""
        assert self.wire is not None
        if message[0] != protocol.JOIN or not protocol.is_message(message, str, dict):
            self.wire.send(peer, [protocol.LEAVE])
            return
        name, theirs = printable(message[1][:64]), message[2]
        for what, ours in self._identity.items():
            said = theirs.get(what)
            if said != ours:
                shown = f"{said!r:.300}" if said is None or isinstance(said, str) else f"a {type(said).__name__}"
                reason = f"its {what} is {shown} at the host and {ours!r:.300} at the orchestrator"
                logger.warning("%s: refused the host %s: %s", self._where, name, reason)
                self.wire.send(peer, [protocol.REFUSED, reason])
                return
        self._joined[peer] = Host(
            len(self._joined), peer=peer, ready=True, width=0, since=self._loop.time(), name=name, dropped=self._drop
        )
        self.wire.send(peer, [protocol.ALIVE])
        logger.info("%s: the host %s has joined", self._where, name)

    def _has_room(self, host: Host, workers: int) -> None:
        if not 0 <= workers <= MOST_WORKERS:
            raise ProtocolError(f"{workers} workers; expected 0 to {MOST_WORKERS}")
        had, before = self.width, host.width
        host.width = workers
        if had and not self.width:
            self._none_since = self._loop.time()
        if workers > before:
            self._more()

    def _malformed(self, peer: bytes, error: str) -> None:
        if (host := self._joined.get(peer)) is not None:
            host.kill(f"was dropped: it sent what no host sends; {error}")

    def _unreachable(self, peer: bytes) -> None:
        if (host := self._joined.get(peer)) is not None:
            host.kill("is lost: its connection broke")

    def _drop(self, host: Host) -> None:
        logger.error("%s: %s %s; %d of its rollouts fail with it", self._where, host, host.killed, len(host.sessions))
        if self.wire is not None and host.peer is not None:
            self.wire.send(host.peer, [protocol.LEAVE])
        self._forget(host)

    def _forget(self, host: Host) -> None:
        assert host.peer is not None
        had = self.width
        self._joined.pop(host.peer, None)
        if had and not self.width:
            self._none_since = self._loop.time()
        self._last_loss = f"{host} {host.killed}"
        self._lost(host, WorkerError(self._last_loss))
        host.sessions, host.ready = {}, False


def bound_and_beating(socket: zmq.Socket[bytes], address: str) -> None:
    """Bounds the frames of a socket of either end, and has ZMQ notice a machine that is gone."""
    beat = int(HEARTBEAT_SECONDS * 1000)
    socket.maxmsgsize = protocol.MAX_FRAME_BYTES  # a peer whose frame claims more is dropped, before memory is taken
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = beat, 3 * beat, 3 * beat
    socket.handshake_ivl = 3 * beat
    socket.ipv6 = address.startswith("tcp://[")
    socket.linger = 0
