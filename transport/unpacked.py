"""MessagePack from outside: the one way to read a value whose bytes another process, machine or model has made.

msgpack makes lists of claimed lengths before it reads the elements, and nested lists multiply: with msgpack 1.2, 20 kB took
70 MB. So the value is first passed over, which allocates nothing: afterwards each claimed element is there. The files that
hold arrays or messages (`transport/arrays.py`, `transport/codec.py`, `transport/framed_maps.py`, ...) bound the bytes, and check
what a value means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from transport.files.atomic import as_bytes_view

if TYPE_CHECKING:
    from transport.files.atomic import Buffer


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
