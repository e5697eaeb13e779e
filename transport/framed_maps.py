"""MessagePack maps with a `kind`, each in a frame: between an agent and its workers, a tuner and its trials. Never pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack

from counterpoint.transport.frames import BadFrame, Framing
from counterpoint.transport.unpacked import unpacked


class FramedMaps:
    """The messages of connections of one kind. All methods raise `BadFrame`."""

    def __init__(self, framing: Framing) -> None:
        self._framing = framing

    def pack(self, message: Mapping[str, Any]) -> bytes:
        """Returns a message as bytes."""
        try:
            data: bytes = msgpack.packb(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadFrame(f"a message of kind {message.get('kind')!r} cannot be packed: {error}") from None
        if len(data) > self._framing.most:
            raise BadFrame(
                f"a message of kind {message.get('kind')!r} has {len(data)} bytes; at most {self._framing.most} are sent"
            )
        return data

    def unpack(self, data: bytes) -> dict[str, Any]:
        """Returns the message in `data`."""
        if len(data) > self._framing.most:
            raise BadFrame(f"a message has {len(data)} bytes; at most {self._framing.most} are read")
        message = unpacked(data, "a message", BadFrame)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise BadFrame("a message is not a map with a `kind`")
        return message

    def frame(self, message: Mapping[str, Any]) -> bytes:
        """Returns a message after its length."""
        return self._framing.frame(self.pack(message))

    def read(self, receive: Callable[[int], bytes]) -> dict[str, Any] | None:
        """Returns the next message of a connection that blocks; None at its end. Raises also as `Framing.read`."""
        data = self._framing.read(receive)
        return None if data is None else self.unpack(data)

    def cut(self, received: bytearray) -> Iterator[dict[str, Any]]:
        """Removes the whole messages from the beginning of what was received; yields each."""
        return map(self.unpack, self._framing.cut(received))
