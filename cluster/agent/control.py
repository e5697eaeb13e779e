"""The agent's end of a worker process's control socket, on the agent's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from counterpoint.cluster.agent.protocol import MAX_MESSAGE, MESSAGES
from counterpoint.transport.frames import BadFrame

logger = logging.getLogger(__name__)

MOST_UNREAD = 4 * MAX_MESSAGE
"""Bytes that wait for a process that does not read."""

CHUNK = 64 * 1024

LEFT_CHUNKS = 64
"""Chunks that an ended process may have left unread; they are more than a socket's buffer holds."""


class ControlSocket:
    """Sends without waiting, and hands each message that comes to `on_message`."""

    def __init__(self, worker: str, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._worker = worker
        self._on_message = on_message
        self._own, self.other = socket.socketpair()
        """`other` is for the process; close it once that has it."""
        self._own.setblocking(False)
        self._received = bytearray()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._own.fileno(), self._read, 1)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a message, now or once the process reads; returns False if too much waits, and it was not sent."""
        data = MESSAGES.frame(message)
        if len(self._unsent) + len(data) > MOST_UNREAD:
            return False
        self._unsent += data
        self._write()
        return True

    def read_rest(self) -> None:
        """Reads what an ended process left unread."""
        self._read(LEFT_CHUNKS)

    def _read(self, chunks: int) -> None:
        """Reads at most so much: a process may write faster than it is read, and the agent has others to hear."""
        try:
            for _ in range(chunks):
                data = self._own.recv(CHUNK)
                if not data:
                    self._loop.remove_reader(self._own.fileno())  # the process has closed it
                    return
                self._received += data
                for message in MESSAGES.cut(self._received):
                    self._on_message(message)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._loop.remove_reader(self._own.fileno())
        except BadFrame as error:
            logger.warning(
                "%s sent what is not understood; its control socket is not read any more: %s", self._worker, error
            )
            self._loop.remove_reader(self._own.fileno())

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._own.send(self._unsent[:CHUNK])]
        except BlockingIOError:
            self._loop.add_writer(self._own.fileno(), self._write)
            return
        except (BrokenPipeError, ConnectionResetError):  # it has ended, or ends
            self._unsent.clear()
        self._loop.remove_writer(self._own.fileno())

    def close(self) -> None:
        """Closes both ends. Safe to call twice."""
        if self._own.fileno() >= 0:
            self._loop.remove_reader(self._own.fileno())
            self._loop.remove_writer(self._own.fileno())
        self._own.close()
        self.other.close()
