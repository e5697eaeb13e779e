"""One worker's process as its actor on Ray has it: the guarded process, its notifications and, of a class, its control socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.log_rotation import rotate_if_full
from counterpoint.transport.framed_maps import FramedChannel
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.printable import clipped, printable
from counterpoint.transport.process.child import INHERITED, Command, Process
from counterpoint.transport.process.keeper import messages
from counterpoint.transport.process.keeper.messages import MAX_MESSAGE, MESSAGES

logger = logging.getLogger(__name__)

MOST_UNREAD = 4 * MAX_MESSAGE
"""Bytes that wait for a process that does not read."""
BEATS_APART_SECONDS = 0.05
"""Shortest time between two heartbeats that are passed on; what comes sooner is passed on together, later."""

Hear = Callable[[str, int, Mapping[str, Any]], None]
"""Takes a worker, its incarnation, and a message of its process (`protocol`)."""


NEWS = "news"
"""The kind of a message of an `OwnedProcess`: a command's process id, or what it says of itself, has changed. No sign of life."""

MOST_SAID = 1000
"""Characters of what a worker says of itself."""


class OwnedProcess:
    """A started worker. Start it from the main thread, on the event loop."""

    def __init__(self, order: WorkerOrder, hear: Hear, fence_seconds: float) -> None:
        """Starts it. Raises `OSError` as `Process` does, and leaves nothing then."""
        self.order = order
        self._hear = partial(hear, order.worker, order.incarnation)
        self._loop = asyncio.get_running_loop()
        self._control: FramedChannel | None
        self._control, other = self._open_control() if order.description else (None, None)
        self.status = ""
        self._beaten = 0.0
        self._alive = False
        """Whether it gave a sign of life that was not passed on yet."""
        self._late_beat: asyncio.TimerHandle | None = None
        environment = dict(order.environment)
        if self._control is not None:
            environment[messages.CONTROL_FD] = str(INHERITED)
        command = Command(
            order.worker,
            order.command,
            Path(order.log_file),
            silence_timeout_seconds=order.silence_timeout_seconds,
            nice=order.nice,
            environment=environment,
        )
        inherited = None if other is None else other.fileno()
        try:
            self._process = Process(command, inherited=inherited, fence_seconds=fence_seconds)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the command or the environment
            if self._control is not None:
                self._control.close()
            raise OSError(f"{order.worker}: {error}") from error
        finally:
            if other is not None:
                other.close()
        self._loop.add_reader(self._process.notifications.fileno(), self._read_notifications)

    def _open_control(self) -> tuple[FramedChannel, socket.socket]:
        """Returns the actor's end of a control socket, and the process's."""
        own, other = socket.socketpair()

        def warn(error: str) -> None:
            logger.warning(
                "%s sent what is not understood; its control socket is not read any more: %s", self.order.worker, error
            )

        return FramedChannel(own, MESSAGES, self._on_message, warn, most_unsent=MOST_UNREAD), other

    @property
    def guardian_pid(self) -> int:
        """The process to reap."""
        return self._process.guardian_pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the process of a class; kills one that has not read for long."""
        if self._control is None:
            return
        try:
            reason = "" if self._control.send(message) else "it did not read its control socket"
        except BadFrame as error:
            reason = str(error)
        if reason:
            logger.warning("%s is killed: %s", self.order.worker, reason)
            self._hear({"kind": messages.FAILED, "reason": reason})
            self.kill()

    def terminate(self) -> None:
        """Asks it to end."""
        if self._control is None:
            self._process.terminate()
        else:
            self.send({"kind": messages.STOP})

    def kill(self) -> None:
        """Kills it and everything below it."""
        self._process.kill()

    def show_life(self) -> None:
        """Shows its guardian that the actor lives."""
        self._process.show_life()

    def beat(self, *, alive: bool) -> dict[str, Any]:
        """Returns its heartbeat, or the news of it, for the master."""
        return {
            "kind": messages.BEAT,
            "worker": self.order.worker,
            "incarnation": self.order.incarnation,
            "status": clipped(printable(self.status or self._process.status), MOST_SAID),
            "trouble": clipped(printable(self._process.trouble), MOST_SAID),
            "pid": self._process.main_pid or 0,
            "alive": alive,
        }

    def rotate_log(self) -> None:
        """Keeps its output bounded. May copy for long: not for an event loop. Raises `OSError`."""
        rotate_if_full(Path(self.order.log_file))

    def read_rest(self) -> None:
        """Reads what it sent before it ended."""
        if self._control is not None:
            self._control.drain()
        self._read_notifications()

    def close(self) -> None:
        """Frees its sockets."""
        if self._late_beat is not None:
            self._late_beat.cancel()
        self._loop.remove_reader(self._process.notifications.fileno())
        self._process.close()
        if self._control is not None:
            self._control.close()

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["kind"] == messages.ALIVE:
            self.status = str(message.get("status", ""))
            self._pass_beat_on(alive=True)
        else:
            self._hear(message)

    def _pass_beat_on(self, *, alive: bool) -> None:
        """Passes a heartbeat or news on, at once unless the last one was just now."""
        self._alive = self._alive or alive
        now = self._loop.time()
        if self._late_beat is None:
            self._late_beat = self._loop.call_at(max(now, self._beaten + BEATS_APART_SECONDS), self._beat)

    def _beat(self) -> None:
        kind, self._alive = messages.ALIVE if self._alive else NEWS, False
        self._late_beat, self._beaten = None, self._loop.time()
        self._hear({"kind": kind})

    def _read_notifications(self) -> None:
        """Turns systemd's notifications into the messages of a class's process."""
        before = self._process.main_pid, self._process.status, self._process.trouble
        received = self._process.read_notifications()
        changed = before != (self._process.main_pid, self._process.status, self._process.trouble)
        if "READY" in received and (changed or self._late_beat is not None):
            self._hear({"kind": NEWS})  # what it said before it was ready is known first
        if self._control is None:
            for word, kind in (("READY", messages.READY), ("STOPPING", messages.ENDING)):
                if word in received:
                    self._hear({"kind": kind})
            if self._process.failure:
                self._hear({"kind": messages.FAILED, "reason": self._process.failure})
            if (seconds := self._process.take_extension()) > 0:
                self._hear({"kind": messages.EXTEND, "seconds": seconds})
        of_life = "WATCHDOG" in received or "READY" in received
        if of_life or changed:
            self._pass_beat_on(alive=of_life)
