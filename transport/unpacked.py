"""MessagePack from outside: the one way to read a value whose bytes another process, machine or model has made.

msgpack makes lists of claimed lengths before it reads the elements, and nested lists multiply: with msgpack 1.2, 20 kB took
70 MB. So the value is first passed over, which allocates nothing: afterwards each claimed element is there. The files that
hold arrays or messages (`transport/arrays.py`, `transport/codec.py`, `transport/framed_maps.py`, ...) bound the bytes, and check
what a value means. Integers of more than 64 bits, which msgpack lacks, are an extension (`long_integer`).
"""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgpack

from counterpoint.transport.files.atomic import as_bytes_view

if TYPE_CHECKING:
    from counterpoint.transport.files.atomic import Buffer

MOST_INTEGER_BYTES = 2048
"""Most bytes of an integer as an extension: more than JSON's longest has."""

_INTEGER = 1
"""The code of the extension."""


def long_integer(value: object) -> msgpack.ExtType:
    """Returns an integer of more than 64 bits as an extension: `default` of `msgpack.packb`. Raises `TypeError`."""
    if not isinstance(value, int):
        raise TypeError(f"{type(value).__name__} cannot be packed")
    return msgpack.ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def read_long_integer(code: int, data: bytes) -> int:
    """Returns what `long_integer` has made: `ext_hook` of `msgpack.unpackb`. Raises `ValueError`."""
    if code != _INTEGER:
        raise ValueError(f"an extension {code} that is not known")
    return int.from_bytes(data, "little", signed=True)


class _Short(reprlib.Repr):
    """Shows what is long, or nested deep, in part only, and before its whole text is made."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring = 4, 80

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Shows the beginning of the bytes."""
        return repr(value[: self.maxstring]) + ("..." if len(value) > self.maxstring else "")

    def repr_int(self, value: int, level: int) -> str:
        """Shows how long it is where Python would not write it."""
        return repr(value) if value.bit_length() < 1024 else f"an integer of {value.bit_length()} bits"

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        """Shows some entries, which alone are sorted."""
        return super().repr_dict(dict(islice(value.items(), self.maxdict + 1)), level)


def shown(value: object) -> str:
    """Returns an unpacked value as text, short enough for a log line, whatever its size. Also an integer of any length."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


_SHORT = _Short()


def unpacked(data: Buffer, what: str, error: type[ValueError], **options: Any) -> Any:
    """Returns the one value that `data` is. `options` are `msgpack.unpackb`'s, such as `max_array_len`.

    Raises `error`, a class of the caller's own, with a text that begins with `what`, for anything else, before it allocates more
    than a small multiple of the bytes. Hooks among the options raise it, too.
    """
    view = as_bytes_view(data)
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=max(view.nbytes, 1))
        unpacker.feed(view)
        unpacker.skip()
        if unpacker.tell() == view.nbytes:
            return msgpack.unpackb(view, **options)
    except error:  # of a hook
        raise
    except (
        ValueError,
        TypeError,
        RecursionError,
        msgpack.UnpackException,
    ) as problem:  # TypeError: a key without a hash
        raise error(f"{what} is not msgpack: {problem or type(problem).__name__}") from problem
    raise error(f"{what} goes on after {unpacker.tell()} of its {view.nbytes} bytes")
