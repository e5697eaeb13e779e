"""A master's end of one keeper of this machine (`transport/process/keeper`): starts it, or finds one of an earlier master.

A keeper's socket lies in a folder of the job's directory, under the worker's name, its incarnation, and the epoch of the master
that started it; so no two are ever called alike, and whoever lists the folder finds all. Who dies leaves the file: nobody takes
connections there then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from counterpoint.cluster.backends.link import Link, Tell, order_map
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.remains import MARK, kill_marked
from counterpoint.transport.process.child import own_environment, spawn
from counterpoint.transport.process.keeper import main as keeper

logger = logging.getLogger(__name__)

WORKERS = "workers"
"""The folder of the keepers' sockets, in the job's directory."""

SUFFIX = ".sock"

BACKLOG = 16

REAP_SECONDS = 0.005
DEATH_SECONDS = 20.0
"""How long the end of a killed keeper is waited for."""


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Yields an address of the socket that is short enough for the kernel, however long the path is."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connected(path: Path) -> socket.socket:
    """Returns a connection to the keeper at that socket, which may not answer. Raises `OSError` if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with address_of(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def lives(path: Path) -> bool:
    """Whether there is a keeper at that socket."""
    try:
        connected(path).close()
    except BlockingIOError:  # it does not take connections at present
        return True
    except OSError:
        return False
    return True


def mark_of(path: Path) -> str:
    """Returns what all processes of a keeper, itself included, have in the environment with which they started."""
    return str(path.resolve().with_suffix(""))


def spawn_keeper(listener: socket.socket, log_file: Path, mark: str, *arguments: str) -> int:
    """Starts a keeper that listens there, with the arguments that its `main` describes; returns its pid. Raises `OSError`."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", "-S", keeper.__file__, *arguments]
    environment = own_environment() | {MARK: mark}
    return spawn(command, log_file, environment, standard_input=listener.fileno(), session=True)


class KeeperLink(Link):
    """A link to a keeper of this machine."""

    def __init__(self, path: Path, node: str, bundle: str, clock: Callable[[], float], tell: Tell) -> None:
        """`path`: the keeper's socket. The rest is as of `Link`."""
        worker, incarnation, _ = path.name.removesuffix(SUFFIX).rsplit(".", 2)
        super().__init__(worker, int(incarnation), node, bundle, clock, tell)
        self.path = path
        self._pid = 0
        """The keeper's process, a child of this one; 0 if another master started it."""

    async def start(self, order: WorkerOrder, epoch: int, lease_seconds: float) -> None:
        """See `Link.start`."""
        self.is_class, self.log_file = bool(order.description), Path(order.log_file)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
            with address_of(self.path) as address:
                listener.bind(address)
            self.path.chmod(0o600)
            listener.listen(BACKLOG)
            given = order_map(order, self.node, "ipc", str(self.path))
            self._open(connected(self.path), epoch, lease_seconds, order=given)
            self._pid = spawn_keeper(listener, self.log_file, mark_of(self.path), str(self.path))

    async def find(self, epoch: int, lease_seconds: float) -> None:
        """See `Link.find`."""
        self._open(connected(self.path), epoch, lease_seconds)

    async def bury(self) -> None:
        """See `Link.bury`."""
        if (self.silent or not self.ended) and (left := await asyncio.to_thread(kill_marked, mark_of(self.path))):
            logger.error("processes of %s cannot be killed: %s", self.worker, left)
        self.path.unlink(missing_ok=True)
        with suppress(TimeoutError, ChildProcessError):
            async with asyncio.timeout(DEATH_SECONDS):
                while self._pid and os.waitpid(self._pid, os.WNOHANG) == (0, 0):  # noqa: ASYNC110, ASYNC222 - it returns at once
                    await asyncio.sleep(REAP_SECONDS)
