"""Reads arrays of `tokens.bin` and `batch.bin` (`docs/debugging.md#format`, `transport/codec.py`), with every length checked."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from counterpoint.verify.files import Directory, Unreadable

_PLACE = struct.Struct("<QQ")
_MOST_FRAMES = 2**18
_MOST_HEADER_BYTES = 2**28
_OF_TOKENS = {"token_ids": "int32", "loss_mask": "uint8", "log_probabilities": "float32", "advantages": "float32"}
_OF_BATCH = _OF_TOKENS | {"offsets": "int64"}
_OF_FRAME = {"kept": "int32", "token_ids": "int32", "log_probabilities": "float32", "untrained": "uint8"}
_IN_DIGEST = ("token_ids", "log_probabilities", "advantages")

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What is checked of a `batch.bin`: its samples, each with rollout, environment, version, reward and temperature."""

    digest: str
    step: int
    samples: list[tuple[str, str, int, float, float]]
    columns: Arrays

    def sample(self, index: int) -> Arrays:
        """Returns the columns of one sample."""
        start, stop = self.columns["offsets"][index : index + 2].tolist()
        return {name: self.columns[name][start:stop] for name in _OF_TOKENS}


def completions(frame: bytes) -> list[Arrays] | None:
    """Returns the turns of a frame of `tokens.bin`: ids, log-probabilities and what is untrained of each completion.

    None where it has not all tokens of each. Raises `Unreadable`.
    """
    try:
        (length,) = struct.unpack_from("<I", frame, 12)
        _, specified = msgpack.unpackb(frame[16 : 16 + length])
        offset, arrays = 8 + _aligned(8 + length), {}
        for name, dtype in _OF_FRAME.items():
            arrays[name] = _array(specified[name], memoryview(frame)[offset:], dtype)
            offset += _aligned(arrays[name].nbytes)
        turns, start = [], 0
        for first, last, total in arrays.pop("kept").reshape(-1, 3).tolist():
            if first + last != total:
                return None
            part = slice(start, start := start + total)
            turns.append({name: values[part] for name, values in arrays.items()})
    except (LookupError, TypeError, ValueError, struct.error, msgpack.UnpackException) as error:
        raise Unreadable(f"a frame of tokens is damaged: {error}") from None
    return turns


def read_batch(run: Directory, name: str) -> TrainedBatch:
    """Reads a batch without its routing. Raises `Unreadable` and `FileNotFoundError`."""
    with run.open(name) as file:
        try:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:
            raise Unreadable("it is empty") from None
    frames = _frames(data)
    header = next(islice(frames, 1, None), memoryview(b""))
    if header.nbytes > _MOST_HEADER_BYTES:
        raise Unreadable("it has a header that is too long")
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, header.nbytes), max_array_len=16, max_map_len=0, max_ext_len=0)
    unpacker.feed(header)
    try:
        match next(unpacker, None):
            case [str(), int(step), int(count), int(), bool(), *_]:
                samples = [tuple(row[:5]) for row in islice(unpacker, count)]
            case _:
                raise Unreadable("it does not begin with a batch's preamble")
        digest = blake2b(header[: unpacker.tell()], digest_size=16)
        specified = islice(unpacker, len(_OF_BATCH))
        columns = {
            name: _array(each, frame, _OF_BATCH[name])
            for name, each, frame in zip(_OF_BATCH, specified, frames, strict=False)
        }
        for each in _IN_DIGEST:
            digest.update(columns[each].data)
        batch = TrainedBatch(digest.hexdigest(), step, samples, columns)
        tokens, offsets = len(columns["token_ids"]), columns["offsets"]
        lengths = {len(columns[each]) for each in _OF_TOKENS}
        if lengths != {tokens} or len(offsets) != len(samples) + 1 or len(samples) != count:
            raise Unreadable("it has columns of different lengths")
        if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) <= 0).any():
            raise Unreadable("it has samples that do not follow one another")
    except Unreadable:
        raise
    except (LookupError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise Unreadable(f"it is damaged: {error}") from None
    return batch


def _frames(data: memoryview) -> Iterator[memoryview]:
    """Yields the frames of a `batch.bin`, in the batch's order: kind, header, columns, routing."""
    magic = bytes(data[:8])
    try:
        if magic == b"CPBATCH2":
            (count,), offset = struct.unpack_from("<Q", data, 8), 16
            for _ in range(min(count, _MOST_FRAMES)):
                (length,) = struct.unpack_from("<Q", data, offset)
                yield data[offset + 8 : offset + 8 + length]
                offset += 8 + _aligned(length)
        elif magic == b"CPBATCH3" == bytes(data[-8:]):
            (count,) = struct.unpack_from("<Q", data, len(data) - 16)
            places = data[-16 - _PLACE.size * min(count, _MOST_FRAMES) : -16]
            for first, length in _PLACE.iter_unpack(places):
                yield data[first : first + length]
        else:
            raise Unreadable("it is no batch")
    except struct.error:
        raise Unreadable("it ends within a frame") from None


def _array(specified: Any, data: memoryview, dtype: str) -> npt.NDArray[Any]:
    """Returns the numbers of an array of which `specified` is dtype, shape and bytes, in one dimension."""
    match specified:
        case [str(said), list(), int(nbytes)] if said == dtype and 0 <= nbytes <= len(data):
            return np.frombuffer(data[:nbytes], np.dtype(dtype).newbyteorder("<"))
    raise Unreadable(f"it has an array that is not the one of {dtype} that is expected")


def _aligned(length: int) -> int:
    return -(-length // 8) * 8
