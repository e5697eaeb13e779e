"""A master's end of one keeper (`transport/process/keeper`): starts it, or finds one that an earlier master left.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Heartbeat
from counterpoint.cluster.backends.one_worker import LONGEST_ADDRESS, OneWorker, cut
from counterpoint.cluster.backends.order import LivingWorker, WorkerOrder
from counterpoint.cluster.clock import RunningClock
from counterpoint.cluster.errors import BackendError
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import Event
from counterpoint.cluster.remains import MARK, kill_marked
from counterpoint.transport.framed_maps import FramedChannel
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.printable import printable
from counterpoint.transport.process.child import own_environment, spawn
from counterpoint.transport.process.keeper import main as keeper
from counterpoint.transport.process.keeper import messages
from counterpoint.transport.process.keeper.messages import MESSAGES

logger = logging.getLogger(__name__)

WORKERS = "workers"
"""The folder of the keepers' sockets, in the job's directory."""

SUFFIX = ".sock"

BACKLOG = 16

CONNECT_SECONDS = 10.0
"""How long a keeper's first answer is waited for."""

LIVES_IN_A_LEASE = 4
LEAST_SILENCE_SECONDS = 3.0
"""A keeper on a busy machine may be late for so long, however short the lease."""

MOST_UNSENT = 2**26
"""Bytes that wait for a keeper that does not read; then it counts as silent."""

NO_PROCESS = 128 + 9
"""Exit code of a worker whose process is not known, or no more."""

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


class KeeperLink:
    """One connection, for as long as the master or the keeper lives. Make it on the event loop; `run` it in a task."""

    def __init__(
        self, path: Path, node: str, bundle: str, tell: Callable[[Event | Heartbeat, KeeperLink, int], None]
    ) -> None:
        """`tell` takes what happens: an event with its number, to be acknowledged, or a heartbeat."""
        self.path, self.node, self.bundle = path, node, bundle
        self.worker, incarnation, _ = path.name.removesuffix(SUFFIX).rsplit(".", 2)
        self.incarnation = int(incarnation)
        self.is_class = False
        self.created = False
        """Whether its process was started, as far as it has said."""
        self.ended = False
        """Whether it has told the worker's end."""
        self.stale_epoch = 0
        """The epoch of the later master that it obeys."""
        self.silent = False
        """Whether it was given up because it did not answer."""
        self.log_file: Path | None = None
        self.facts: Mapping[str, Any] | None = None
        self.known = asyncio.Event()
        """Set once it has answered and told what it had kept, or is gone."""
        self.gone = asyncio.Event()
        """Set once nothing of it runs any more."""
        self._tell = tell
        self._pid = 0
        """The keeper's process, a child of this one; 0 if another master started it."""
        self.is_left = False
        """Whether this master has disconnected; the keeper goes on."""
        self._channel: FramedChannel | None = None
        self._closed = asyncio.Event()
        self._received = 0
        self._unacknowledged: dict[int, bool] = {}
        """The numbers of received messages: whether each may be acknowledged."""
        self._running = RunningClock()
        self._heard = self._running.read()
        self._lived = self._heard

    # --- its beginning ---

    def start(self, order: WorkerOrder, epoch: int, lease_seconds: float) -> None:
        """Starts the keeper, and has it start the worker. Raises `OSError`, `BackendError`, and leaves nothing then."""
        order_map = asdict(order) | {"socket": str(self.path), "node": self.node}
        if order.description:
            order_map["description"] = dict(order.description) | {"node": self.node, "listen": "ipc"}
        self.is_class, self.log_file = bool(order.description), Path(order.log_file)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
            with address_of(self.path) as address:
                listener.bind(address)
            try:
                self.path.chmod(0o600)
                listener.listen(BACKLOG)
                self._open()
                self.send(messages.HELLO, epoch=epoch, lease_seconds=lease_seconds, order=order_map)
                command = [sys.executable, "-I", "-S", keeper.__file__, str(self.path)]
                environment = own_environment() | {MARK: mark_of(self.path)}
                self._pid = spawn(command, self.log_file, environment, standard_input=listener.fileno(), session=True)
            except (OSError, BackendError):
                self._close()
                self.path.unlink(missing_ok=True)
                raise

    def find(self, epoch: int, lease_seconds: float) -> None:
        """Connects to the keeper of an earlier master. Raises `OSError` if it is gone."""
        self._open()
        self.send(messages.HELLO, epoch=epoch, lease_seconds=lease_seconds)

    # --- the connection ---

    def _open(self) -> None:
        """Connects. Raises `OSError` if nobody is there."""

        def warn(error: str) -> None:
            logger.warning("the keeper of %s sent what is not understood: %s", self.worker, error)
            self._close()

        channel = (self._take, warn, self._close)
        self._channel = FramedChannel(connected(self.path), MESSAGES, *channel, most_unsent=MOST_UNSENT)

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._closed.set()

    async def run(self) -> None:
        """Returns once the keeper or its worker is gone, and nothing of it runs any more."""
        await self._closed.wait()
        try:
            if not (self.stale_epoch or self.is_left):
                await self.bury()
        finally:
            self.known.set()
            self.gone.set()

    async def bury(self) -> None:
        """Sees to it that nothing of the keeper runs; one that has told the worker's end ends by itself."""
        if (self.silent or not self.ended) and (left := await asyncio.to_thread(kill_marked, mark_of(self.path))):
            logger.error("processes of %s cannot be killed: %s", self.worker, left)
        self.path.unlink(missing_ok=True)
        with suppress(TimeoutError, ChildProcessError):
            async with asyncio.timeout(DEATH_SECONDS):
                while self._pid and os.waitpid(self._pid, os.WNOHANG) == (0, 0):  # noqa: ASYNC110, ASYNC222 - it returns at once
                    await asyncio.sleep(REAP_SECONDS)

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message; a keeper that is gone is told nothing, and its worker's end is on its way. Raises `BackendError`."""
        if self._closed.is_set() or self._channel is None:
            return
        try:
            if not self._channel.send({"kind": kind, **fields}):
                self.give_up()  # it does not read
        except BadFrame as error:
            raise BackendError(str(error)) from None

    def live(self, lease_seconds: float) -> None:
        """Shows it life, if that is due; gives it up if it does not answer. By a clock that counts while this process runs."""
        now = self._running.read()
        silence = max(lease_seconds / LIVES_IN_A_LEASE * 2, LEAST_SILENCE_SECONDS)
        if now - self._heard > silence:
            self.give_up()
        elif now - self._lived >= lease_seconds / LIVES_IN_A_LEASE:
            self._lived = now
            self.send(messages.LIFE)

    def give_up(self) -> None:
        """Ends the connection to a keeper that does not answer; `run` then kills it, and all below it."""
        if not self._closed.is_set():
            logger.warning("the keeper of %s does not answer; it is killed", self.worker)
            self.silent = True
            self._close()

    def disconnect(self) -> None:
        """Closes the connection; the keeper goes on for a lease."""
        self.is_left = True
        self._close()

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
            logger.warning("the keeper of %s sent what makes no sense: %r", self.worker, error)
            self._close()

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case messages.FACTS:
                self.facts = message
                self.bundle, self.node = str(message["bundle"] or self.bundle), str(message["node"] or self.node)
                self.created = self.created or message["lives"]
            case messages.REFUSED:
                self.stale_epoch = int(message["epoch"])
                self._close()
            case messages.BEAT:
                texts = (printable(message["status"]), printable(message["trouble"]))
                beat = Heartbeat(self.worker, self.incarnation, *texts, message["pid"], message["alive"])
                self._tell(beat, self, 0)
            case messages.LIFE:
                pass
            case _:
                number = int(message["number"])
                if number > self._received:
                    self._received = number
                    self._unacknowledged[number] = False
                    self.created = self.created or message["kind"] == messages.CREATED
                    self.ended = self.ended or message["kind"] in (messages.EXITED, messages.CREATE_FAILED)
                    if (event := self._event(message)) is None:
                        self.acknowledge(number)
                    else:
                        self._tell(event, self, number)
        if self.facts is not None and self._received >= self.facts["last"]:
            self.known.set()

    def _event(self, message: Mapping[str, Any]) -> Event | None:
        """Returns the event that a message is; None if it is none that this worker may cause. Its time is the master's to set."""
        who = (self.worker, self.incarnation)
        match message:
            case {"kind": messages.CREATED, "pid": int(pid)}:
                return events.Created(*who, self.node, pid, 0.0)
            case {"kind": messages.CREATE_FAILED, "reason": str(reason)}:
                return events.CreateFailed(*who, cut(reason), 0.0)
            case {"kind": messages.EXITED, "code": int(code), "reason": str(reason), "lost": bool(lost)}:
                return events.WorkerExited(*who, code, cut(reason), 0.0, lost)
        found: list[Event] = []
        order = WorkerOrder(*who, self.bundle, (), {}, "")
        OneWorker(order, self.node, lambda event, fields: found.append(event(**fields, at=0.0))).hear(message)
        return found[0] if found else None

    def living(self) -> LivingWorker | None:
        """Returns the worker as a new master finds it; None if it has ended."""
        facts = self.facts
        if facts is None or not facts["lives"] or self.ended:
            return None
        address, key = facts["address"][:LONGEST_ADDRESS], facts["server_key"][:LONGEST_ADDRESS]
        who = (self.worker, self.incarnation, self.node, facts["pid"])
        return LivingWorker(*who, facts["ready"], facts["started"], address, key, self.bundle)
