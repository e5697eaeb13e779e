"""Reads arrays of `tokens.bin` and `batch.bin` (`docs/debugging.md#format`, `transport/codec.py`), with every length checked."""

from __future__ import annotations

import mmap
import struct
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from counterpoint.verify.files import Directory, Unreadable

_MOST_HEADER_BYTES = 2**28
_OF_TOKENS = {"token_ids": "int32", "loss_mask": "uint8", "log_probabilities": "float32", "advantages": "float32"}
_OF_FRAME = {"kept": "int32", "token_ids": "int32", "log_probabilities": "float32", "untrained": "uint8"}
_FAULTS = (LookupError, TypeError, ValueError, struct.error, msgpack.UnpackException)

Arrays = dict[str, npt.NDArray[Any]]

Samples = dict[str, list[tuple[int, Arrays]]]
"""The version and the columns of each sample, by rollout."""


def completions(frame: memoryview) -> list[Arrays] | None:
    """Returns the turns of a frame of `tokens.bin`: ids, log-probabilities and what is untrained of each completion.

    None where it has not all tokens of each. Raises `Unreadable`.
    """
    try:
        length = int.from_bytes(frame[12:16], "little")
        _, specified = msgpack.unpackb(frame[16 : 16 + length])
        offset, arrays = 8 + _aligned(8 + length), {}
        for name, dtype in _OF_FRAME.items():
            arrays[name] = _array(specified[name], frame[offset:], dtype)
            offset += _aligned(arrays[name].nbytes)
        turns, start = [], 0
        for first, last, total in arrays.pop("kept").reshape(-1, 3).tolist():
            if first + last != total:
                return None
            part = slice(start, start := start + total)
            turns.append({name: values[part] for name, values in arrays.items()})
    except _FAULTS as error:
        raise Unreadable(f"a frame of tokens is damaged: {error}") from None
    return turns


def read_batch(run: Directory, name: str) -> tuple[str, int, Samples]:
    """Returns a batch's digest, step and samples, without routing. Raises `Unreadable` and `FileNotFoundError`."""
    with run.open(name) as file:
        try:
            return _batch(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except _FAULTS as error:
            raise Unreadable(f"it is damaged: {error}") from None


def _batch(data: memoryview) -> tuple[str, int, Samples]:
    """Does as `read_batch`, with a file's bytes. Raises one of `_FAULTS`."""
    found = _frames(data)
    header = next(islice(found, 1, None), memoryview(b""))
    if header.nbytes > _MOST_HEADER_BYTES:
        raise Unreadable("it has a header that is too long")
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, header.nbytes), max_array_len=16, max_map_len=0, max_ext_len=0)
    unpacker.feed(header)
    [(_, step, count, *_)] = islice(unpacker, 1)
    rows = list(islice(unpacker, count))
    digest = blake2b(header[: unpacker.tell()], digest_size=16)
    columns: Arrays = {}
    dtypes = _OF_TOKENS | {"offsets": "int64"}
    for name, specified, frame in zip(dtypes, unpacker, found, strict=False):
        columns[name] = _array(specified, frame, dtypes[name])
        if name in ("token_ids", "log_probabilities", "advantages"):
            digest.update(columns[name].data)
    offsets, lengths = columns["offsets"], {len(columns[each]) for each in _OF_TOKENS}
    follow = offsets[0] == 0 and (np.diff(offsets) > 0).all()
    if lengths != {offsets[-1]} or not follow or not len(offsets) - 1 == len(rows) == count:
        raise Unreadable("it has columns of different lengths, or samples that do not follow one another")
    samples: Samples = defaultdict(list)
    for (rollout, _, version, *_), (start, stop) in zip(rows, pairwise(offsets.tolist()), strict=True):
        samples[rollout].append((version, {name: columns[name][start:stop] for name in _OF_TOKENS}))
    return digest.hexdigest(), step, samples


def _frames(data: memoryview) -> Iterator[memoryview]:
    """Yields the frames of a `batch.bin`, in the batch's order: kind, header, columns, routing. Raises `struct.error`."""
    magic = bytes(data[:8])
    if magic == b"CPBATCH2":
        yield from (frame[8:] for frame in frames(data[16:], padded_to=8))
    elif magic == b"CPBATCH3" == bytes(data[-8:]):
        (count,) = struct.unpack_from("<Q", data, len(data) - 16)
        for first, length in struct.iter_unpack("<QQ", data[-16 - 16 * count : -16]):
            yield data[first : first + length]
    else:
        raise Unreadable("it is no batch")


def frames(data: memoryview, padded_to: int = 1) -> Iterator[memoryview]:
    """Yields the frames that follow one another in a file, with their lengths. Raises `Unreadable`."""
    start = 0
    while start < len(data):
        end = start + 8 + int.from_bytes(data[start : start + 8], "little")
        if end > len(data):
            raise Unreadable("it ends within a frame")
        yield data[start:end]
        start = -(-end // padded_to) * padded_to


def _array(specified: Any, data: memoryview, dtype: str) -> npt.NDArray[Any]:
    """Returns the numbers of an array of which `specified` is dtype, shape and bytes, in one dimension."""
    match specified:
        case [str(said), list(), int(nbytes)] if said == dtype and 0 <= nbytes <= len(data):
            return np.frombuffer(data[:nbytes], np.dtype(dtype).newbyteorder("<"))
    raise Unreadable(f"it has an array that is not the one of {dtype} that is expected")


def _aligned(length: int) -> int:
    return -(-length // 8) * 8
