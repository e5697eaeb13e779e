"""Values as frames: a small msgpack tree, and one raw frame for each array and each long string of bytes.

What travels is exactly what arrives: None, bool, int (64 bits),
float, str, bytes, numpy arrays and numpy's scalars, lists, tuples and dicts of these. Nothing else does, and nothing is
pickled. Arrays are sent by reference and arrive as views of the received frame; each is checked against the bytes that are
present before memory is allocated for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from counterpoint.transport.arrays import AnyArray, CodecError, array_over
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.unpacked import unpacked

__all__ = ["CodecError", "decode", "encode", "encode_parts"]

MAX_DEPTH = 32
"""Most containers inside each other."""

MAX_TREE_BYTES = 64 * 2**20
"""Largest tree: everything but arrays and long bytes."""

MAX_FRAMES = 2**14
"""Most arrays and long bytes of one value."""

MAX_DIMENSIONS = 8

_INLINE_BYTES = 1024
"""Bytes up to this length travel inside the tree, as a frame of their own costs more than a copy."""

_DTYPES = tuple(
    np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""Every dtype that may travel; its place is its number in the tree, so the order is part of the protocol."""

_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}

_TUPLE, _ARRAY, _BYTES, _SCALAR = range(4)
"""The codes of msgpack's extension types."""

_SIZE = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<BB")

_PLAIN: Final = frozenset({type(None), bool, int, float, str})
_KEYS: Final = _PLAIN
_ALLOWED = "send numbers, strings, bytes, arrays, lists, dicts"
_TUPLE_MARK = msgpack.ExtType(_TUPLE, b"")
"""The first element of a list that stands for a tuple."""


def encode(value: object, name: str) -> list[Buffer]:
    """Returns the frames of a value: the tree, then one for each array and each long string of bytes, by reference.

    Raises `TypeError` that names the part that cannot travel, with its path from `name`, such as `result[0]['config']`. Whoever
    changes an array before its frames have been sent changes what is sent.
    """
    return _frames({name: value}, alone=True)


def encode_parts(parts: Mapping[str, object]) -> list[Buffer]:
    """Returns the frames of the list of these values. See `encode`; a path begins with the name of its part."""
    return _frames(parts, alone=False)


def _frames(parts: Mapping[str, object], *, alone: bool) -> list[Buffer]:
    sidecars: list[Buffer] = []
    name = next(iter(parts))
    try:
        trees = [_tree(value, sidecars, name, 0) for name, value in parts.items()]
        tree: bytes = msgpack.packb(trees[0] if alone else trees)
    except (ValueError, OverflowError) as error:  # an int of more than 64 bits, a lone surrogate, a string above 4 GiB
        raise TypeError(f"{_unpackable(parts)} cannot be sent: {error}") from None
    if len(tree) > MAX_TREE_BYTES:
        raise TypeError(f"{name}: {len(tree)} bytes without its arrays; at most {MAX_TREE_BYTES} travel: send arrays")
    if len(sidecars) > MAX_FRAMES:
        raise TypeError(f"{name}: {len(sidecars)} arrays and long bytes; at most {MAX_FRAMES} travel: join them")
    return [tree, *sidecars]


def _tree(value: object, sidecars: list[Buffer], path: str, depth: int) -> object:
    """Returns the value as msgpack takes it, and appends what travels beside it."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth >= MAX_DEPTH:
        raise TypeError(f"{path[:200]}: more than {MAX_DEPTH} containers inside each other cannot be sent")
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = value if {*map(type, value)} <= _PLAIN else _items(value, sidecars, path, depth)
        return items if kind is list else [_TUPLE_MARK, *items]
    if isinstance(value, dict) and kind is dict:
        for key in value:
            if type(key) not in _KEYS:
                raise TypeError(f"{path}: the key {key!r:.80} cannot be sent; keys are strings, numbers or None")
        if {*map(type, value.values())} <= _PLAIN:
            return value
        return {key: _tree(item, sidecars, f"{path}[{key!r:.40}]", depth + 1) for key, item in value.items()}
    if isinstance(value, bytes) and kind is bytes:
        if len(value) <= _INLINE_BYTES:
            return value
        sidecars.append(value)
        return msgpack.ExtType(_BYTES, _SIZE.pack(len(value)))
    if isinstance(value, np.ndarray) and kind is np.ndarray:
        return _array(value, sidecars, path)
    if isinstance(value, np.generic):
        number = _number(value.dtype, path)
        return msgpack.ExtType(_SCALAR, bytes([number]) + value.astype(_DTYPES[number]).tobytes())
    raise TypeError(f"{path}: {_named(kind)} cannot be sent; {_hint(kind)}")


def _items(values: Sequence[object], sidecars: list[Buffer], path: str, depth: int) -> list[object]:
    return [_tree(item, sidecars, f"{path}[{index}]", depth + 1) for index, item in enumerate(values)]


def _array(value: AnyArray, sidecars: list[Buffer], path: str) -> object:
    number = _number(value.dtype, path)
    if value.ndim > MAX_DIMENSIONS:
        raise TypeError(f"{path}: an array of {value.ndim} dimensions cannot be sent; at most {MAX_DIMENSIONS} can")
    # Not `ascontiguousarray`, which makes an array without dimensions one of one dimension.
    sidecars.append(as_bytes_view(np.asarray(value, dtype=_DTYPES[number], order="C")))
    return msgpack.ExtType(_ARRAY, _ARRAY_HEAD.pack(number, value.ndim) + struct.pack(f"<{value.ndim}Q", *value.shape))


def _number(dtype: np.dtype[Any], path: str) -> int:
    number = _NUMBERS.get(dtype.newbyteorder("<"))
    if number is None:
        raise TypeError(f"{path}: an array of dtype {dtype.str!r} cannot be sent; send numbers or booleans")
    return number


def _named(kind: type) -> str:
    shown = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if shown[0].lower() in 'aeiou' else 'a'} {shown}"


def _hint(kind: type) -> str:
    if kind.__module__.partition(".")[0] == "torch" and kind.__name__ in ("Tensor", "Parameter"):
        return "send tensor.detach().cpu().numpy()"
    for plain in (bool, int, float, str, bytes, tuple, list, dict, np.ndarray):
        if issubclass(kind, plain):
            return f"it would arrive as another type: send {plain.__name__}(...) of it, which arrives as it is"
    return _ALLOWED


def _unpackable(parts: Mapping[str, object]) -> str:
    """Returns the path of the first value that msgpack refuses, and the value. Slow: only for an error's message."""
    for path, value in parts.items():
        try:
            msgpack.packb(_tree(value, [], path, 0))
        except (ValueError, OverflowError):
            if isinstance(value, dict):
                keys = {f"{path}: the key": key for key in value if _is_refused(key)}
                return _unpackable(keys or {f"{path}[{key!r:.40}]": item for key, item in value.items()})
            if isinstance(value, list | tuple):
                return _unpackable({f"{path}[{index}]": item for index, item in enumerate(value)})
            return f"{path}: {value!r:.80}"
    return next(iter(parts))


def _is_refused(key: object) -> bool:
    try:
        msgpack.packb(key)
    except (ValueError, OverflowError):
        return True
    return False


def decode(frames: Sequence[Buffer]) -> Any:
    """Returns the value of the frames of `encode`. Arrays are views of them; a misaligned one is copied.

    Raises `CodecError` for anything else, before allocating more than a small multiple of the bytes that are present.
    """
    if not 1 <= len(frames) <= MAX_FRAMES + 1:
        raise CodecError(f"{len(frames)} frames are no value; expected 1 to {MAX_FRAMES + 1}")
    tree = as_bytes_view(frames[0])
    if tree.nbytes > MAX_TREE_BYTES:
        raise CodecError(f"a tree of {tree.nbytes} bytes; at most {MAX_TREE_BYTES} travel")
    return _Decoder(frames[1:]).value(tree)


class _Decoder:
    """Decodes one tree: takes the sidecars in order, and turns marked lists into tuples."""

    def __init__(self, sidecars: Sequence[Buffer]) -> None:
        self._sidecars = sidecars
        self._taken = 0
        self._marks = 0
        """Tuple marks read, less those that began a list."""

    def value(self, tree: memoryview) -> Any:
        hooks = {"ext_hook": self._extension, "list_hook": self._list}
        value = unpacked(tree, "the tree", CodecError, **hooks, strict_map_key=False)
        if self._marks:
            raise CodecError(f"{self._marks} marks of tuples stand where no tuple begins")
        if self._taken != len(self._sidecars):
            raise CodecError(f"{len(self._sidecars)} sidecars are present, the tree names {self._taken}")
        return value

    def _list(self, items: list[Any]) -> list[Any] | tuple[Any, ...]:
        if items and items[0] is _TUPLE_MARK:
            self._marks -= 1
            return tuple(items[1:])
        return items

    def _extension(self, code: int, data: bytes) -> object:
        if code == _TUPLE and not data:
            self._marks += 1
            return _TUPLE_MARK
        if code == _ARRAY and len(data) >= _ARRAY_HEAD.size:
            return self._array(data)
        if code == _BYTES and len(data) == _SIZE.size:
            (size,) = _SIZE.unpack(data)
            return bytes(self._sidecar(size, f"{size} bytes"))
        if code == _SCALAR and data and data[0] < len(_DTYPES) and len(data) == 1 + _DTYPES[data[0]].itemsize:
            scalar: object = _checked(np.frombuffer(data[1:], _DTYPES[data[0]]))[0]
            return scalar
        raise CodecError(f"an extension of code {code} and {len(data)} bytes is not of this protocol")

    def _array(self, data: bytes) -> AnyArray:
        number, dimensions = _ARRAY_HEAD.unpack_from(data)
        if number >= len(_DTYPES) or dimensions > MAX_DIMENSIONS or len(data) != _ARRAY_HEAD.size + 8 * dimensions:
            raise CodecError(f"{data!r:.80} specifies no array")
        shape, dtype = struct.unpack_from(f"<{dimensions}Q", data, _ARRAY_HEAD.size), _DTYPES[number]
        return _checked(array_over(dtype, shape, self._next(f"{dtype.name} {shape}"), "an array"))

    def _sidecar(self, size: int, what: str) -> memoryview:
        """Returns the next sidecar, which has to be of this size in bytes."""
        frame = self._next(what)
        if frame.nbytes != size:
            raise CodecError(f"{what}: the tree says {size} bytes, {frame.nbytes} are present")
        return frame

    def _next(self, what: str) -> memoryview:
        if self._taken == len(self._sidecars):
            raise CodecError(f"{what}: there is no sidecar left of {len(self._sidecars)}")
        self._taken += 1
        return as_bytes_view(self._sidecars[self._taken - 1])


def _checked(array: AnyArray) -> AnyArray:
    """Raises for booleans other than 0 and 1, by which numpy would compute wrong sizes."""
    if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise CodecError(f"an array of booleans of shape {array.shape} holds other bytes than 0 and 1")
    return array
