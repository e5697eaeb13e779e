"""Packs and checks the messages of `cluster/agent/protocol.py`, and cuts a control socket's stream into them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from cluster.agent.protocol import MAX_MESSAGE

LENGTH = struct.Struct("!I")
"""Before each message on a control socket."""


class MalformedMessageError(ValueError):
    """A message is not what the protocol allows; the text says what was found."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Returns the message as bytes. Raises `MalformedMessageError` if it is too large or holds what msgpack does not."""
    try:
        data: bytes = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessageError(f"a message of kind {message.get('kind')!r} cannot be packed: {error}") from None
    if len(data) > MAX_MESSAGE:
        raise MalformedMessageError(
            f"a message of kind {message.get('kind')!r} has {len(data)} bytes; at most {MAX_MESSAGE} are allowed"
        )
    return data


def unpack(data: bytes) -> dict[str, Any]:
    """Returns the message in `data`. Raises `MalformedMessageError` if it is none."""
    if len(data) > MAX_MESSAGE:
        raise MalformedMessageError(f"a message has {len(data)} bytes; at most {MAX_MESSAGE} are allowed")
    try:
        message = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"a message is not msgpack: {error!r}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise MalformedMessageError("a message is not a map with a `kind`")
    return message


def frame(message: Mapping[str, Any]) -> bytes:
    """Returns the message as it travels on a control socket. Raises as `pack`."""
    data = pack(message)
    return LENGTH.pack(len(data)) + data


class FrameReader:
    """Cuts the bytes of a control socket into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Takes what was received; returns the messages that are whole now. Raises `MalformedMessageError`."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE:
                raise MalformedMessageError(f"a message announces {length} bytes; at most {MAX_MESSAGE} are allowed")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(unpack(bytes(self._buffer[LENGTH.size : end])))
            del self._buffer[:end]
        return messages
