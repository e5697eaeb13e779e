"""The keeper's process: `python -I -S main.py SOCKET [OWNER]`, with a UNIX socket that listens as its standard input.

A master binds that socket under the worker's name, starts the keeper in a session of its own, and says HELLO with the order
(`messages.py`). The keeper starts the worker below itself, as a guardian does (`transport/process/launch.py`), and outlives the
master: it holds the worker's notifications, its control socket, what it said last, and its exit code, until a master has them.
`decisions.py` decides; this is the loop around it. When the worker ends, all that is below it is killed before its end is told;
when the keeper is killed, the kernel kills the worker with it. With an OWNER, the process that has started it, it ends with that.

It costs some 11 MB, and starts within some 25 ms: it imports the standard library and its own few files alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator

if __name__ == "__main__":  # as a script: the package is found without what `counterpoint/__init__.py` loads
    _package = types.ModuleType("counterpoint")
    _package.__path__ = [os.path.abspath(f"{__file__}/../../../..")]
    sys.modules["counterpoint"] = _package

from counterpoint.transport.frames import BadFrame
from counterpoint.transport.process import launch
from counterpoint.transport.process.keeper import decisions, messages
from counterpoint.transport.process.keeper.messages import MESSAGES, WORDS
from counterpoint.transport.process.keeper.notify_socket import NotifySocket

TYPE_CHECKING = False  # as type checkers know it; to import `typing` takes 5 ms
if TYPE_CHECKING:
    from typing import Any

CHUNK = 2**16
"""Bytes that are read or written at once: whoever sends without end must not keep the others waiting."""

MOST_PEERS = 8
"""Connections at once; a further one takes the place of the oldest that is no master's."""

MOST_UNSENT = 2**18
"""Bytes that wait for a peer; then it is told nothing new until it has read."""

MOST_UNREAD = 4 * messages.MAX_MESSAGE
"""Bytes that wait for a worker that does not read, before it is killed."""

MOST_NOTIFICATIONS = 1000
"""Notifications that are read at once."""

BEATS_APART_SECONDS = 0.05
"""Shortest time between two heartbeats that are passed on; what comes sooner is passed on together, later."""

LOOK_SECONDS = 0.5
"""How often the clock is looked at."""

KILL_STEP_SECONDS = 0.005
LAST_WORDS_SECONDS = 2.0
"""How long a master that is connected may take to read the last messages."""

MOST_STATUS = 1000
"""Characters of a status or a problem that are passed on."""

EPOCH_FILE = "epoch"
"""The file beside the sockets with the highest epoch of a master, and the name of its machine: a keeper that an earlier master
has just started ends."""

_CREDENTIALS = struct.Struct("3i")


class Channel:
    """One end of a stream of messages, which never waits.

    `received` takes each message; `lost` hears that nothing more comes, and why if that is wrong.
    """

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        incoming: messages.Messages,
        received: Callable[[Channel, dict[str, Any]], None],
        lost: Callable[[Channel, str], None],
    ) -> None:
        connection.setblocking(False)
        self._socket, self._selector, self._incoming = connection, selector, incoming
        self._received, self._lost = received, lost
        self._read, self.unsent = bytearray(), bytearray()
        self._watched = 0
        self._watch(selectors.EVENT_READ)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, now or once the other end reads. Raises `BadFrame`."""
        self.unsent += MESSAGES.frame(message)
        if not self._watched & selectors.EVENT_WRITE:
            self._write()

    def ready(self, event: int) -> None:
        """Reads and writes what is possible."""
        if event & selectors.EVENT_WRITE:
            self._write()
        if event & selectors.EVENT_READ and self._watched & selectors.EVENT_READ:
            self.read()

    def read(self) -> bool:
        """Reads once; returns whether there may be more."""
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        try:
            if data:
                self._read += data
                for message in self._incoming.cut(self._read):
                    self._received(self, message)
                    if not self._watched:
                        return False
                return True
            reason = ""
        except BadFrame as error:
            reason = str(error)
        self._watch(self._watched & ~selectors.EVENT_READ)
        self._lost(self, reason)
        return False

    def _write(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self._socket.send(self.unsent[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # the other end is gone, which reading tells
            self.unsent.clear()
        wanted = selectors.EVENT_WRITE if self.unsent else 0
        self._watch(self._watched & ~selectors.EVENT_WRITE | wanted)

    def _watch(self, events: int) -> None:
        if events == self._watched:
            return
        if not self._watched:
            self._selector.register(self._socket, events, self.ready)
        elif not events:
            self._selector.unregister(self._socket)
        else:
            self._selector.modify(self._socket, events, self.ready)
        self._watched = events

    def close(self) -> None:
        """Closes it; nothing is told any more. Safe to call twice."""
        self._watch(0)
        self._socket.close()


class Keeper:
    """One keeper. `run` it."""

    def __init__(self, listener: socket.socket, owner: int = 0) -> None:
        """`owner`: the process with which it ends; 0 for none."""
        self._listener, self._owner = listener, owner
        self._selector = selectors.DefaultSelector()
        self._keeping = decisions.Keeping(launch.alive_clock())
        self._peers: list[Channel] = []
        self._control: Channel | None = None
        self._notifications: NotifySocket | None = None
        self._temporary: launch.TemporaryDirectory | None = None
        self._worker = 0
        self._codes: dict[int, int] = {}
        """The exit codes of what was below, by pid."""
        self._killing: Iterator[list[int]] | None = None
        self._is_over = False
        self._said = {"STATUS": "", "X_TROUBLE": ""}
        """The last status and problem that came as notifications."""
        self._main_pid = 0
        self._nice = 0
        """What the worker's niceness is raised by once it is ready: until then others wait for it."""
        self._news, self._alive, self._beaten = False, False, 0.0
        """Whether there is news of the worker, or a sign of life, that was not passed on yet; and when the last one was."""

    def run(self) -> None:
        """Runs until nothing is left to keep. Leaves no process."""
        launch.become_subreaper()
        wake, woken = socket.socketpair()
        for end in (wake, woken, self._listener):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._selector.register(wake, selectors.EVENT_READ, lambda _: self._on_signals(wake.recv(CHUNK)))
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())
        if self._owner:
            launch.die_with_parent(signal.SIGHUP, self._owner)
        while not self._is_over:
            self._turn()
            self._do(self._keeping.tick(launch.alive_clock()))
            self._kill_on()
            if self._nice and self._keeping.is_ready:
                launch.lower_priority(self._nice)
                self._nice = 0
            self._tell()
        self._send_rest()
        if self._temporary is not None:
            self._temporary.remove()

    def _turn(self) -> None:
        seconds = min(LOOK_SECONDS, self._keeping.lease_seconds / 4)
        if self._killing is not None:
            seconds = KILL_STEP_SECONDS
        elif self._news:
            seconds = max(0.0, min(seconds, self._beaten + BEATS_APART_SECONDS - time.monotonic()))
        for key, events in self._selector.select(seconds):
            key.data(events)

    # --- what is decided ---

    def _do(self, decided: list[decisions.Instruction]) -> None:
        """Carries out instructions, and those that follow from them at once."""
        waiting = list(decided)
        while waiting:
            match waiting.pop(0):
                case (decisions.START, order):
                    waiting += self._start(order)
                case (decisions.SEND, message):
                    waiting += self._send(message)
                case (decisions.TERMINATE,):
                    self._pass_on(signal.SIGTERM)
                case (decisions.KILL,):
                    self._killing = self._killing or launch.kill_steps(self._codes)
                case (decisions.TELL, message):
                    self._tell_at_once(message)
                case (decisions.DISMISS, peer, message):
                    with contextlib.suppress(BadFrame):
                        peer.send(message)
                    self._drop(peer)
                case (decisions.FINISH,):
                    self._is_over = True

    def _start(self, order: dict[str, Any]) -> list[decisions.Instruction]:
        """Starts the worker's process, unless a later master is here already."""
        try:
            if order["socket"] and epoch_in(os.path.dirname(order["socket"])) > self._keeping.epoch:
                return self._keeping.not_started("a later master has taken over")
            notifications = self._notifications = NotifySocket()
            self._selector.register(notifications, selectors.EVENT_READ, lambda _: self._read_notifications())
            other = self._open_control() if order["description"] else None
            self._set_environment(order, other)
            try:
                self._temporary = launch.TemporaryDirectory(os.environ)
            except OSError as error:  # such as a full disk
                print(f"there is no temporary directory for the worker alone: {error}", file=sys.stderr, flush=True)  # noqa: T201 - its log
            says_ready = bool(order["description"] or order["notifies"])
            self._nice = order["nice"] if says_ready else 0
            self._worker = self._main_pid = _fork(order["command"], order["nice"] - self._nice)
            if other is not None:
                other.close()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the command or the environment
            return self._keeping.not_started(f"{order['worker']}: {error}")
        self._news = True
        done = self._keeping.started(self._worker)
        if order["description"]:
            done = [(decisions.SEND, {"kind": messages.DESCRIPTION, "description": order["description"]}), *done]
        return done

    def _set_environment(self, order: dict[str, Any], control: socket.socket | None) -> None:
        assert self._notifications is not None
        for name in launch.SYSTEMD_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(order["environment"])
        os.environ.update({"NOTIFY_SOCKET": self._notifications.address, "PYTHONUNBUFFERED": "1"})
        if order["silence_timeout_seconds"] is not None:
            os.environ["WATCHDOG_USEC"] = str(int(order["silence_timeout_seconds"] * 1e6))
        if control is not None:
            control.set_inheritable(True)
            os.environ[messages.CONTROL_FD] = str(control.fileno())

    def _open_control(self) -> socket.socket:
        """Returns the process's end of a control socket."""
        own, other = socket.socketpair()

        def lost(_: Channel, reason: str) -> None:
            if reason:
                print(f"a message is not understood; none is read any more: {reason}", file=sys.stderr, flush=True)  # noqa: T201 - its log

        self._control = Channel(own, self._selector, WORDS, lambda _, said: self._hear(said), lost)
        return other

    def _send(self, message: dict[str, Any]) -> list[decisions.Instruction]:
        assert self._control is not None
        if len(self._control.unsent) > MOST_UNREAD:
            return self._keeping.fail("it did not read its control socket")
        try:
            self._control.send(message)
        except BadFrame as error:
            return self._keeping.fail(str(error))
        return []

    def _pass_on(self, number: int) -> None:
        if self._worker and self._worker not in self._codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._worker, number)

    # --- what happens ---

    def _on_signals(self, numbers: bytes) -> None:
        self._codes.update(launch.reap())  # before one is passed on, so that it never goes to a recycled pid
        for number in numbers:
            if number == signal.SIGHUP and self._owner:
                self._do(self._keeping.end("its owner has ended"))
            elif number == signal.SIGHUP:
                self._do(self._keeping.fail("its keeper received SIGHUP"))
            elif number != signal.SIGCHLD:
                self._pass_on(number)
        if self._worker in self._codes and self._keeping.lives:
            self._killing = self._killing or launch.kill_steps(self._codes)

    def _kill_on(self) -> None:
        """Kills what is left; tells the worker's end once nothing is."""
        if self._killing is None:
            return
        left = next(self._killing, None)
        if left is not None:
            return
        self._killing = None
        if self._worker in self._codes and self._keeping.lives:
            while self._control is not None and self._control.read():
                pass
            self._read_notifications()
            self._do(self._keeping.exited(self._codes[self._worker]))

    def _hear(self, said: dict[str, Any]) -> None:
        if self._keeping.hear(said) and said["kind"] == messages.ALIVE:
            self._news = self._alive = True

    def _read_notifications(self) -> None:
        assert self._notifications is not None
        for _ in range(MOST_NOTIFICATIONS):
            if (noted := self._notifications.receive()) is None:
                return
            for name in self._said.keys() & noted.keys():
                self._said[name], self._news = noted[name][:MOST_STATUS], True
            if (pid := noted.get("MAINPID", "")).isascii() and pid.isdecimal() and len(pid) < 10:
                self._main_pid, self._news = int(pid), True
            if noted.get("WATCHDOG") == "1" or noted.get("READY") == "1":
                self._news = self._alive = True
            if self._control is None:
                self._hear_of_command(noted)

    def _hear_of_command(self, noted: dict[str, str]) -> None:
        """Turns systemd's notifications into what a worker of a class says."""
        if noted.get("READY") == "1":
            self._beat()  # what it said before it was ready is known first
            self._keeping.hear({"kind": messages.READY, "address": "", "server_key": ""})
        if noted.get("STOPPING") == "1":
            self._keeping.hear({"kind": messages.ENDING})
        if noted.get("X_FAILURE"):
            self._keeping.hear({"kind": messages.FAILED, "reason": noted["X_FAILURE"]})
        microseconds = noted.get("EXTEND_TIMEOUT_USEC", "")
        if microseconds.isascii() and microseconds.isdecimal() and (seconds := int(microseconds[:18]) / 1e6) > 0:
            self._keeping.hear({"kind": messages.EXTEND, "seconds": seconds})

    # --- masters ---

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone already, or there are no descriptors
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] not in (os.getuid(), 0):
            connection.close()
            return
        if len(self._peers) >= MOST_PEERS:
            self._drop(next(peer for peer in self._peers if peer is not self._keeping.master))
        self._peers.append(
            Channel(connection, self._selector, MESSAGES, self._receive, lambda peer, _: self._drop(peer))
        )

    def _receive(self, peer: Channel, message: dict[str, Any]) -> None:
        epoch = self._keeping.epoch, self._keeping.master
        self._do(self._keeping.receive(peer, message, launch.alive_clock()))
        if (self._keeping.epoch, self._keeping.master) != epoch:
            self._news = True  # which a new master is told
        if len(peer.unsent) > MOST_UNSENT + messages.MAX_MESSAGE:
            self._drop(peer)  # it asks and does not read

    def _drop(self, peer: Channel) -> None:
        self._keeping.gone(peer)
        if peer in self._peers:
            self._peers.remove(peer)
        peer.close()

    def _master(self) -> Channel | None:
        """Returns the master that may be told something now."""
        master = self._keeping.master
        return master if isinstance(master, Channel) and len(master.unsent) <= MOST_UNSENT else None

    def _tell_at_once(self, message: dict[str, Any]) -> None:
        if (master := self._master()) is not None:
            master.send(message)

    def _tell(self) -> None:
        """Tells the master what it was not told, as fast as it reads."""
        if self._news and time.monotonic() >= self._beaten + BEATS_APART_SECONDS:
            self._beat()
        while self._master() is not None and (message := self._keeping.next_message()) is not None:
            self._tell_at_once(message)

    def _beat(self) -> None:
        if not self._news or self._master() is None:
            return
        alive, self._news, self._alive, self._beaten = self._alive, False, False, time.monotonic()
        status = self._keeping.status or self._said["STATUS"]
        trouble, pid = self._said["X_TROUBLE"], self._main_pid
        beat = {"status": status[:MOST_STATUS], "trouble": trouble, "pid": pid, "alive": alive}
        self._tell_at_once({"kind": messages.BEAT, **beat})

    def _send_rest(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline:
            self._tell()
            master = self._keeping.master
            if not isinstance(master, Channel) or not master.unsent:
                return
            self._turn()


def _fork(command: list[str], nice: int) -> int:
    """Starts the command as a child of this process; returns its pid. Raises `OSError`."""
    keeper = os.getpid()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
    finally:
        launch.execute(command, nice, keeper)
    raise AssertionError("unreachable")


def epoch_in(directory: str) -> int:
    """Returns the epoch of the last master of that directory; 0 if none has left it."""
    try:
        with open(f"{directory}/{EPOCH_FILE}", encoding="ascii") as file:
            return int(file.read(300).split()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return 0


def main() -> None:
    """Keeps one worker."""
    listener = socket.socket(fileno=os.dup(0))
    listener.set_inheritable(False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        Keeper(listener, int(sys.argv[2]) if len(sys.argv) > 2 else 0).run()
    finally:
        launch.kill_descendants()  # nothing, unless it failed
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sys.argv[1])
    os._exit(0)  # so that its connections end with the process, and not before


if __name__ == "__main__":
    main()
