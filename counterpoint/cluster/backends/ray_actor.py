"""The actor of one worker on Ray: it starts the worker's keeper below itself, and passes the bytes between it and masters on.

The keeper (`transport/process/keeper`) is the same as on one machine: it starts and stops the worker, holds what that says until
a master has acknowledged it, and ends the worker without a master for a lease. Here it dies with its actor, too. So neither torch
nor vLLM is in the actor, and the worker has a main thread (signal handlers, torch and many native libraries want one): Ray 2.60.0
leaves that to one method at a time, and beside a concurrency group, or in an async actor, every method runs in another thread.

Every method takes the master's epoch, and refuses one that is lower than the highest heard. Once its keeper has ended and no
master was heard of for a lease, the actor ends; the last one of a bundle removes the placement group. Ray restarts nothing and
repeats no call; the manager decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.keeper_link import BACKLOG, spawn_keeper
from counterpoint.cluster.backends.ray_places import ActorName, node_name
from counterpoint.cluster.log_rotation import rotate_if_full
from counterpoint.cluster.remains import MARK, clear_dead, start_of
from counterpoint.transport.files.own_directory import remove_left
from counterpoint.transport.process import launch
from counterpoint.transport.wires.endpoint import NODE_ADDRESS

logger = logging.getLogger(__name__)

CHUNK = 2**20
"""Bytes that are read of a keeper at once."""

TICKS_IN_A_LEASE = 20

ROTATION_SECONDS = 5.0
"""How often the log is looked at."""

LAST_SECONDS = 120.0
"""How long the last actor of a bundle waits for the others before it leaves the placement group to its job's next start."""


class _Connection:
    """One master's connection to the keeper. Where a call begins in the stream says what is asked or sent again."""

    def __init__(self, address: str) -> None:
        """Raises `OSError` if the keeper is gone."""
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise
        self._written = self._read_from = 0
        self._unread = b""
        self._receiving: asyncio.Task[None] | None = None
        """Goes on when a call ends: what it has received would be lost with it."""
        self._over = False

    async def write(self, begin: int, data: bytes) -> None:
        new, self._written = data[self._written - begin :], max(self._written, begin + len(data))
        with suppress(OSError):  # it has ended, which reading tells
            await self._loop.sock_sendall(self._socket, new)

    async def read(self, begin: int, seconds: float) -> dict[str, Any]:
        """Returns what the keeper has sent from there on, and whether that was all; waits so many seconds for some."""
        self._unread, self._read_from = self._unread[begin - self._read_from :], begin
        if not self._unread and not self._over:
            self._receiving = self._receiving or asyncio.create_task(self._receive())
            await asyncio.wait({self._receiving}, timeout=seconds)
        return {"data": self._unread, "over": self._over and not self._unread}

    async def _receive(self) -> None:
        received = b""
        with suppress(OSError):
            received = await self._loop.sock_recv(self._socket, CHUNK)
        self._unread, self._over, self._receiving = received, not received, None

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._loop.call_soon(self._socket.close)  # once the loop looks at it no more


class WorkerActor:
    """One incarnation of a worker. All runs on Ray's event loop for it, whose thread lives as long as the actor."""

    def __init__(self, name: str, lease_seconds: float) -> None:
        """Starts no process yet. `name`: the actor's own."""
        import ray

        here, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        self._name, self._lease = name, lease_seconds
        self._me, self._group = here.current_actor, ray.util.get_current_placement_group()
        self._node, self._listen = node_name({"NodeManagerAddress": address, "NodeID": here.get_node_id()}), address
        self._mark = f"{name}:{os.getpid()}:{start_of(os.getpid())}"
        _own_threads()
        remove_left(Path(os.environ.get(launch.SHARED_TMPDIR) or tempfile.gettempdir()), launch.TEMPORARY)
        clear_dead(f"{name.partition('/')[0]}/")
        os.environ |= {MARK: self._mark, NODE_ADDRESS: address}
        self._epoch = 0
        self._heard = launch.alive_clock()
        self._departs = False
        self._keeper = 0
        """Its process; 0 before it was started, and once it has ended."""
        self._log_file: Path | None = None
        self._address = f"\0counterpoint-keeper-{os.getpid()}-{os.urandom(8).hex()}"
        self._connection: _Connection | None = None
        """That of the master of the highest epoch."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    # --- for masters ---

    async def connect(self, epoch: int, log_file: str) -> dict[str, Any]:
        """Connects a master to the keeper; with a log, starts it before, once. Again changes nothing."""
        if refused := self._refusal(epoch):
            return refused
        if log_file and self._log_file is None and not self._departs:
            self._spawn(Path(log_file))
        if self._connection is None and self._keeper:
            with suppress(OSError):  # it has just ended
                self._connection = _Connection(self._address)
        return {"node": self._node, "address": self._listen, "over": self._connection is None}

    async def write(self, epoch: int, begin: int, data: bytes) -> dict[str, Any]:
        """Sends the keeper what begins there in the master's stream."""
        refused = self._refusal(epoch)
        if not refused and self._connection is not None:
            await self._connection.write(begin, data)
        return refused

    async def read(self, epoch: int, begin: int, seconds: float) -> dict[str, Any]:
        """Returns what the keeper has sent from there on in its stream, `data`, and whether that was all, `over`."""
        if (refused := self._refusal(epoch)) or self._connection is None:
            return refused or {"data": b"", "over": True}
        said = await self._connection.read(begin, seconds)
        return self._refusal(epoch) or said

    async def leave(self) -> None:
        """Ends the actor in order."""
        import ray

        ray.actor.exit_actor()

    def _refusal(self, epoch: int) -> dict[str, Any]:
        """What a master of a lower epoch is answered; nothing for the highest, which is heard of."""
        if epoch < self._epoch:
            return {"stale": self._epoch}
        self._heard = launch.alive_clock()
        if epoch > self._epoch:
            self._epoch = epoch
            if self._connection is not None:
                self._connection.close()  # a master of the earlier epoch waits
                self._connection = None
        return {}

    # --- the keeper ---

    def _spawn(self, log_file: Path) -> None:
        """Starts the keeper. Raises `OSError`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
            listener.bind(self._address)
            listener.listen(BACKLOG)
            self._keeper = spawn_keeper(listener, log_file, self._mark, "", str(os.getpid()))
        self._log_file = log_file

    async def _watch(self) -> None:
        """Ends the actor once its keeper has ended, and no master was heard of for a lease."""
        rotated = time.monotonic()
        while self._keeper or launch.alive_clock() - self._heard <= self._lease:
            if self._keeper and os.waitpid(self._keeper, os.WNOHANG) != (0, 0):  # noqa: ASYNC222 - it returns at once
                self._keeper = 0
            if self._log_file is not None and time.monotonic() - rotated > ROTATION_SECONDS:
                rotated = time.monotonic()
                try:
                    await asyncio.to_thread(rotate_if_full, self._log_file)
                except OSError as error:
                    logger.warning("the log of %s cannot be rotated: %s", self._name, error)
            await asyncio.sleep(min(0.5, self._lease / TICKS_IN_A_LEASE))
        self._departs = True
        threading.Thread(target=self._depart, name="departure", daemon=True).start()

    def _depart(self) -> None:
        """Ends the actor, and removes the placement group if nothing else is in it: the master may be gone for good.

        Of several actors that end at the same time, the one with the first name waits for the others.
        """
        import ray

        name = ActorName.parse(self._name)
        assert name is not None
        deadline = time.monotonic() + LAST_SECONDS
        try:
            while others := [
                other
                for other in map(ActorName.parse, ray.util.list_named_actors())
                if other is not None and (other.job, other.bundle) == (name.job, name.bundle) and other != name
            ]:
                if min(map(str, others)) < self._name or time.monotonic() > deadline:
                    return
                time.sleep(0.2)
            ray.util.remove_placement_group(self._group)
        finally:
            self._me.leave.remote()


def _own_threads() -> None:
    """Removes the number of threads that Ray sets for numerical libraries in an actor.

    It counts the cores that the actor reserved, often none; the worker decides by itself, as on one machine.
    """
    with open("/proc/self/environ", "rb") as file:
        given = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
    if b"OMP_NUM_THREADS" not in given:
        os.environ.pop("OMP_NUM_THREADS", None)
