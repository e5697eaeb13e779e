"""Arrays as raw bytes: the specification that travels in a header, views of received bytes, and one-frame packing.

`codec` uses the specifications for a batch's sidecars; inference's binary response uses `pack_arrays`. A specification is
checked against the bytes present before memory is allocated, so a false one costs the receiver nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.unpacked import shown, unpacked

AnyArray = npt.NDArray[Any]

DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "int32", "int64", "float32")}
"""Every dtype that may travel, little-endian."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""numpy computes `dtype.name` anew each time, in Python: half of the encoding time of a batch of thousands of arrays."""

MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**48

_MAGIC = b"CPA1"
_ALIGNMENT = 8
_PADDINGS = [bytes(length) for length in range(_ALIGNMENT)]
_MAX_PACKED_HEADER_BYTES = 2**20
_MAX_PACKED_CONTAINER = 4096
"""Elements of one list or map of a packed header. Bounds the memory that nested lengths could make msgpack allocate."""
_LIMITS = {"max_array_len": _MAX_PACKED_CONTAINER, "max_map_len": _MAX_PACKED_CONTAINER, "max_ext_len": 0}


class CodecError(ValueError):
    """Received bytes are invalid. `step` is the step that they name, if they name one."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


def specification(array: AnyArray) -> list[Any]:
    """Returns `[dtype, shape, bytes]` of an array. Raises `ValueError` for a dtype that cannot travel."""
    name = _NAMES.get(array.dtype)
    if name is None:
        raise ValueError(f"dtype {array.dtype.str} does not travel; expected one of {', '.join(DTYPES)}, little-endian")
    if array.ndim > MAX_DIMENSIONS:
        raise ValueError(f"an array of shape {array.shape} does not travel; at most {MAX_DIMENSIONS} dimensions do")
    return [name, list(array.shape), array.nbytes]


def view_array(specified: object, data: Buffer, name: str) -> AnyArray:
    """Returns the array that `specified` (see `specification`) describes, as a view of `data`; a misaligned one is copied.

    `name` is that of the array, for errors. Raises `CodecError` when the specification is malformed or does not fit the
    bytes.
    """
    # As types, which take a quarter of the time of patterns: every model call has two arrays.
    dtype_name, shape, nbytes = specified if type(specified) is list and len(specified) == 3 else (None, None, None)
    if type(dtype_name) is not str or dtype_name not in DTYPES or type(shape) is not list or type(nbytes) is not int:
        raise CodecError(f"{name}: {shown(specified)} is not [dtype, shape, bytes] with a dtype of {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        raise CodecError(f"{name}: {shown(shape)} is not a shape of at most {MAX_DIMENSIONS} sizes")
    if nbytes != (present := as_bytes_view(data).nbytes):
        raise CodecError(f"{name}: the header says {nbytes} bytes, {present} are present")
    return array_over(DTYPES[dtype_name], shape, data, name)


def array_over(dtype: np.dtype[Any], shape: Sequence[int], data: Buffer, name: str) -> AnyArray:
    """Returns an array of this dtype and of this shape, whose sizes are not negative, as a view of `data`.

    A misaligned one is copied. Raises `CodecError`, which begins with `name`, unless `data` has just its size.
    """
    claimed, present = prod(shape) * dtype.itemsize, as_bytes_view(data)
    if not claimed or claimed != present.nbytes:
        if prod(max(1, size) for size in shape) > MAX_ELEMENTS:  # numpy does not take more beside a size of 0, either
            raise CodecError(f"{name}: {shown(shape)} is no shape of at most {MAX_ELEMENTS} elements")
        if claimed != present.nbytes:
            raise CodecError(f"{name}: {dtype.name} {shape} takes {claimed} bytes, {present.nbytes} are present")
    array = np.frombuffer(present, dtype=dtype)
    if len(shape) != 1:
        array = array.reshape(shape)
    # ZMQ hands out small frames inside a larger buffer, at any address; large ones are aligned.
    return array if array.flags.aligned else array.copy()


def pack_arrays(header: Mapping[str, Any], arrays: Mapping[str, AnyArray]) -> list[bytes | memoryview]:
    """Packs a small header and named arrays into one frame, as a list of bytes to be written one after the other.

    Layout: 4 bytes magic, uint32 little-endian length of the msgpack that follows, `[header, {name: specification}]`, then
    the arrays in that order, each beginning at a multiple of 8. Arrays are referenced, not copied, unless they are not
    C-contiguous. Raises `ValueError` for a dtype that cannot travel, and for a header above 1 MiB or with a container of more
    than 4,096 elements, which could not be read again.
    """
    for name, value in {**header, "arrays": arrays}.items():
        if isinstance(value, Mapping | list | tuple) and len(value) > _MAX_PACKED_CONTAINER:
            raise ValueError(f"{name} has {len(value)} elements; at most {_MAX_PACKED_CONTAINER} travel in a header")
    packed: bytes = msgpack.packb([dict(header), {name: specification(array) for name, array in arrays.items()}])
    if len(packed) > _MAX_PACKED_HEADER_BYTES:
        raise ValueError(
            f"a header of {len(packed)} bytes; at most {_MAX_PACKED_HEADER_BYTES} travel, bulk goes into arrays"
        )
    buffers: list[bytes | memoryview] = [_MAGIC + struct.pack("<I", len(packed)) + packed + _padding(8 + len(packed))]
    for array in arrays.values():
        buffers.append(as_bytes_view(np.ascontiguousarray(array)))
        if padding := _padding(array.nbytes):
            buffers.append(padding)
    return buffers


def unpack_arrays(data: Buffer) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    """Returns header and arrays of a frame of `pack_arrays`. The arrays are views of `data`.

    Raises `CodecError` for anything else.
    """
    view = as_bytes_view(data)
    if view.nbytes < 8 or view[:4] != _MAGIC:
        raise CodecError(f"{view.nbytes} bytes that do not begin with {_MAGIC!r} are not packed arrays")
    (length,) = struct.unpack_from("<I", view, 4)
    if length > min(view.nbytes - 8, _MAX_PACKED_HEADER_BYTES):
        raise CodecError(f"packed arrays: a header of {length} bytes is claimed, in a frame of {view.nbytes}")
    found = unpacked(view[8 : 8 + length], "packed arrays: the header", CodecError, **_LIMITS)
    header, specifications = found if type(found) is list and len(found) == 2 else (None, None)
    if type(header) is not dict or type(specifications) is not dict:
        raise CodecError(f"packed arrays: the header is {shown(found)}, not [header, specifications]")
    offset = 8 + length + len(_padding(8 + length))
    arrays: dict[str, AnyArray] = {}
    for name, specified in specifications.items():
        if not isinstance(name, str):
            raise CodecError(f"packed arrays: {shown(name)} is no name of an array")
        nbytes = specified[2] if type(specified) is list and len(specified) == 3 else 0
        if type(nbytes) is not int or nbytes < 0 or nbytes > view.nbytes - offset:
            raise CodecError(f"packed arrays: {name!r} claims {nbytes} bytes where {view.nbytes - offset} are left")
        arrays[name] = view_array(specified, view[offset : offset + nbytes], name)
        offset += nbytes + len(_padding(nbytes))
    if offset != view.nbytes:
        raise CodecError(f"packed arrays: the header describes {offset} bytes, {view.nbytes} are present")
    return header, arrays


def _padding(length: int) -> bytes:
    return _PADDINGS[-length % _ALIGNMENT]
