"""What the host of an episode and one seat say to each other: msgpack maps, each after its length, over a UNIX socket.

A connection is one seat in one episode, so its end is the end of the partner. Sizes are checked before memory is allocated.

| message | from | meaning |
|---|---|---|
| `sit {protocol, seat, key}` | seat | wants to sit there; seats of one group have the same key |
| `seated {example}` | host | has a place in an episode of that example |
| `ask {messages}` | host | the messages since the seat's last answer; an answer is due |
| `answer {text}` | seat | |
| `leave {reason}` | seat | will not answer any more |
| `end {reward, reason}` | host | the last message; without a reward (nil), with a reason |
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgpack

from counterpoint.environments.base import Unavailable
from counterpoint.transport.frames import BadFrame, Framing
from counterpoint.transport.unpacked import unpacked

PROTOCOL = 1

MAX_MESSAGE_BYTES = 4 << 20
"""The size of one message: a million tokens of text."""

CLOSE_SECONDS = 5.0

SOCKET_NAME = "seats.sock"

_FRAMING = Framing(MAX_MESSAGE_BYTES, ">")


class PartnerGone(Unavailable):
    """The other side of an episode ended it, died, or did not say anything in time."""


class NoPartner(Unavailable):
    """Nobody came to the episode in time."""


class Connection:
    """One end. Not for use by two tasks at once in one direction."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        """`peer` says in errors who the other side is."""
        self._reader = reader
        self._writer = writer
        self._peer = peer

    async def receive(self) -> dict[str, Any]:
        """Returns the next message. Raises `PartnerGone` at the end of the connection, or for what is no message."""
        try:
            message = unpacked(await _FRAMING.read_from(self._reader), "it", BadFrame, max_ext_len=0)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PartnerGone(f"{self._peer} ended the connection") from error
        except ValueError as error:
            raise PartnerGone(f"{self._peer} sent what is no message: {error}") from error
        if not isinstance(message, dict):
            raise PartnerGone(f"{self._peer} sent a {type(message).__name__}; expected a map")
        return message

    async def send(self, **message: Any) -> None:
        """Sends a message, waiting while the other side does not read. Raises `PartnerGone`."""
        try:
            self._write(message)
            await self._writer.drain()
        except OSError as error:
            raise PartnerGone(f"{self._peer} ended the connection") from error

    def end(self, **message: Any) -> None:
        """Sends a last message without waiting for it to be read, and closes the connection. Never raises."""
        with suppress(OSError, RuntimeError, ValueError):
            if not self._writer.is_closing():
                self._write(message)
        self._writer.close()

    async def closed(self) -> None:
        """Closes the connection and returns once it is closed, at the latest after `CLOSE_SECONDS`."""
        self._writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._writer.wait_closed()
        self._writer.transport.abort()  # if the other side has not read what was left

    def _write(self, message: dict[str, Any]) -> None:
        self._writer.write(_FRAMING.frame(msgpack.packb(message)))
