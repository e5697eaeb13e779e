"""A host: it runs an environment's workers on this machine, and plays rollouts for an orchestrator on another (`hosts.py`).

Its workers are those of `pool.py`, which starts, watches and bounds them as it does at the orchestrator. The host passes each
session on to one of them, and its calls of the model back. It survives the orchestrator: it joins the next one.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import signal
import time
from contextlib import suppress
from pathlib import Path

import uvloop
import zmq
from pydantic import model_validator
from zmq.utils.monitor import recv_monitor_message

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.registry import load_environment
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.hosts import LOST_SECONDS, bound_and_beating, identity_of
from counterpoint.environments.workers.player import Player
from counterpoint.environments.workers.protocol import Message
from counterpoint.environments.workers.proxy import WorkerEnvironment
from counterpoint.environments.workers.wire import BatchingWire
from counterpoint.environments.workers.worker import BEAT_SECONDS
from counterpoint.transport.config import Config
from counterpoint.transport.wires.endpoint import CurveKeys, watched_keys
from counterpoint.transport.wires.reconnecting import find_peer_soon

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Before the host joins again."""


class HostConfig(Config):
    """What a host needs to know, as the file of `counterpoint env serve`."""

    address: str
    """`tcp://HOST:PORT` of the orchestrator."""

    server_public_key_file: Path
    """The orchestrator's CURVE public key."""

    secret_key_file: Path
    """The host's CURVE secret key. Its public key is among the orchestrator's authorized ones."""

    model: Path
    """A directory with the model's tokenizer and chat template."""

    directory: Path
    """For the workers' logs and sockets."""

    seed: int = 0
    """As in the run."""

    environment: EnvironmentConfig
    """As in the run, with the `workers` and limits of this machine, and without `hosts`."""

    @model_validator(mode="after")
    def _has_workers(self) -> HostConfig:
        if self.environment.workers < 1 or self.environment.hosts is not None:
            raise ValueError("environment: a host needs workers = 1 or more, and no hosts of its own")
        return self


class RefusedError(ValueError):
    """The orchestrator does not take this host."""


def run(config: HostConfig) -> None:
    """Does as `serve`, until SIGTERM or SIGINT."""

    async def until_told() -> None:
        serving = asyncio.create_task(serve(config))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_told())


async def serve(config: HostConfig) -> None:
    """Runs the workers, and plays for one orchestrator after the other until it is cancelled.

    Raises `ValueError` for an environment that does not load or start, and `RefusedError` when the two ends differ.
    """
    keys = watched_keys(config, "host")
    assert keys is not None, "the files are required"
    loaded = await asyncio.to_thread(load_environment, config.environment)
    assert isinstance(loaded, WorkerEnvironment)
    name, directory = config.environment.name, config.directory.resolve()
    context = EnvironmentContext(name, directory / name, config.model, config.seed)
    last = ""
    async with started(loaded, context):
        while True:
            await asyncio.to_thread(keys.refresh, now=True)
            ended = await Connection(config, keys.value, loaded).run()
            if ended != last:
                logger.warning("environment %r: %s: %s; the host tries again", name, config.address, ended)
            last = ended
            await asyncio.sleep(PAUSE_SECONDS)


class Connection:
    """One connection to an orchestrator. A new one has a new socket: nothing of an old one reaches an orchestrator."""

    def __init__(self, config: HostConfig, keys: CurveKeys, environment: WorkerEnvironment) -> None:
        self._config = config
        self._environment = environment
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.sndhwm = socket.rcvhwm = 0
        bound_and_beating(socket, config.address)
        find_peer_soon(socket)
        self._monitor = socket.get_monitor_socket(
            zmq.Event.DISCONNECTED
            | zmq.Event.HANDSHAKE_FAILED_AUTH
            | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
            | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        )
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._joined = False
        self._workers = -1

    async def run(self) -> str:
        """Plays until the connection ends; returns why. Raises `RefusedError`."""
        self._heard = time.monotonic()
        self._wire = BatchingWire(self._socket, self._received, lambda peer, error: self._end(f"it sent {error}"))
        player = None
        try:
            player = self._player = Player(self._environment, self._config.model, self._send)
            self._socket.connect(self._config.address)
            self._send([protocol.JOIN, platform.node()[:64], self._identity()])
            while not self._over.done():
                due = time.monotonic() + BEAT_SECONDS
                await asyncio.wait({self._over}, timeout=BEAT_SECONDS)
                self._look(max(0.0, time.monotonic() - due))
            return self._over.result()
        finally:
            self._socket.disable_monitor()
            self._monitor.close()
            self._wire.close()
            if player is not None:
                await player.close()
            self._context.term()

    def _identity(self) -> dict[str, str]:
        own = self._environment
        return identity_of(
            self._config.environment, self._config.seed, len(own), own.group_scoring, own.fingerprint
        )  # fmt: skip

    def _send(self, message: Message, nbytes: int = 0) -> None:
        self._wire.send(b"", message, nbytes)

    def _received(self, peer: bytes, message: Message) -> None:
        self._heard = time.monotonic()
        if message[0] == protocol.ALIVE:
            if not self._joined:
                logger.info("environment %r: joined %s", self._config.environment.name, self._config.address)
            self._joined = True
        elif message[0] == protocol.LEAVE:
            self._end("it told the host to leave")
        elif message[0] == protocol.REFUSED:
            if not self._over.done():
                self._over.set_exception(RefusedError(f"{self._config.address} refuses this host: {message[1]}"))
        elif self._joined:
            self._player.received(message)

    def _look(self, lag: float) -> None:
        """Tells that this loop runs and how many workers are ready; notices a connection that has ended."""
        while self._monitor.poll(0):
            self._end(_in_words(zmq.Event(recv_monitor_message(self._monitor)["event"])))
        if self._over.done():
            return
        if time.monotonic() - self._heard - lag > LOST_SECONDS:
            self._end(f"no sign of it for {LOST_SECONDS:g} s")
        if not self._joined:
            return
        self._send([protocol.BEAT, lag])
        if self._environment.ready != self._workers:
            self._workers = self._environment.ready
            self._send([protocol.ROOM, self._workers])

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)


def _in_words(event: zmq.Event) -> str:
    match event:
        case zmq.Event.HANDSHAKE_FAILED_AUTH:
            return "the host's key is not among the orchestrator's authorized keys"
        case zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            return "the handshake failed: the keys do not fit, or no orchestrator listens there"
        case _:
            return "the connection broke"
