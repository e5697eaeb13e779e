"""One worker: it loads an environment and plays rollouts as it is told, until it is told to leave or is killed.

    python -P -m counterpoint.environments.workers.worker < BOOT

What it needs to know comes as JSON on its standard input, which holds its token, too. It has a guardian
(`transport/process/launch.py`), which kills whatever is left of it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import uvloop
import zmq

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.boot import Boot
from counterpoint.environments.workers.player import Player
from counterpoint.environments.workers.process import STACK_SIGNAL
from counterpoint.environments.workers.protocol import Message
from counterpoint.environments.workers.wire import BatchingWire

BEAT_SECONDS = 0.2

_LEAVE_SECONDS = 2.0
"""How long what was sent last may take."""


class _Worker:
    """The worker on its loop."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._player: Player
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Serves until told to leave. What fails before the first rollout is reported."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.maxmsgsize = protocol.MAX_FRAME_BYTES
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(self._boot.address)
        self._wire = BatchingWire(socket, self._received, lambda peer, error: sys.exit(error))
        self._send([protocol.HELLO, self._boot.token.encode(), os.getpid()])
        self._wire.flush()
        beating = asyncio.create_task(self._beat())
        try:
            await self._serve()
        finally:
            beating.cancel()
            self._wire.close(_LEAVE_SECONDS)
            context.term()

    async def _serve(self) -> None:
        from counterpoint.environments.registry import load_here  # loads the operator's module: after HELLO

        config = EnvironmentConfig.model_validate(self._boot.environment)
        directory, model = Path(self._boot.directory), Path(self._boot.model)
        context = EnvironmentContext(config.name, directory, model, self._boot.seed, own_process=True)
        try:
            environment = load_here(config)
            async with started(environment, context):
                self._player = Player(environment, model, self._send)
                self._send([protocol.READY, len(environment), environment.group_scoring])
                await self._leaving.wait()
                await self._player.close()
        except ValueError as error:
            self._send([protocol.UNABLE, str(error)[: protocol.MAX_ERROR]])

    async def _beat(self) -> None:
        """Tells that the loop runs, and how late it was."""
        while True:
            due = time.monotonic() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self._send([protocol.BEAT, max(0.0, time.monotonic() - due)])

    def _send(self, message: Message, nbytes: int = 0) -> None:
        self._wire.send(b"", message, nbytes)

    def _received(self, peer: bytes, message: Message) -> None:
        if message[0] == protocol.LEAVE:
            self._leaving.set()
        else:
            self._player.received(message)


def _confine(boot: Boot) -> None:
    """Takes what the process must not have: core files, the orchestrator's place when memory runs out, endless processes."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel takes a worker first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if boot.most_user_processes and os.getuid() != 0:  # the kernel counts a user's processes, and does not count root's
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = boot.most_user_processes if hard == resource.RLIM_INFINITY else min(hard, boot.most_user_processes)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def main() -> int:
    """Runs the worker. An environment's `SystemExit` that reaches the loop does not end it."""
    boot = Boot.read(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _confine(boot)
    faulthandler.enable()
    with open(boot.stack_file, "w") as stacks:
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loop = runner.get_loop()

            async def work() -> None:
                await _Worker(boot).run()

            task = loop.create_task(work())
            while True:
                try:
                    loop.run_until_complete(task)
                    return 0
                except (SystemExit, KeyboardInterrupt):
                    if task.done():
                        raise


if __name__ == "__main__":
    sys.exit(main())
