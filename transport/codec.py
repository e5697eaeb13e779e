"""Batches and messages as frames, and as one file of the same frames.

A message is `[kind, run's id, header]`, a batch `[b"BATCH", header, sidecar...]`, with its run's id and its session after the
kind when it is sent. An item has its session and number, its header, and the frames of its batch, if it has one, in that place.
A batch's header is a row of small msgpack values, one after the other:

1. `[run_id, step, number of samples S, number of sidecars N, routed, name of an optional column...]`
2. S times `[rollout_id, environment, policy_version, reward, temperature, number of routing chunks]`
3. N times `[dtype, shape, bytes]`

Nothing is nested, so neither end ever makes one long call into msgpack while holding the GIL, and a false length cannot make the
receiver allocate. Sidecars are raw little-endian bytes: the required columns, the optional ones in the order of their names in
the header, then every sample's routing chunks, uint8 or uint16 `[tokens, layers, top_k]`.

`batch.bin` has the frames of a batch: 8 bytes `CPBATCH2`, a uint64 number of frames, then for each frame its uint64
length and its bytes, padded to 8. Where routing was written before the batch was known: 8 bytes `CPBATCH3`, the frames
in any order, each padded to 8, then for each frame, in the batch's order, its uint64 first byte and its uint64 length,
the uint64 number of frames, and `CPBATCH3` again. `docs/contracts.md` has the kinds of messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from counterpoint.transport.arrays import CodecError, pack_arrays, specification, unpack_arrays, view_array
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.files.direct import write_new_file
from counterpoint.transport.messages import (
    MAX_REASON_LENGTH,
    PROTOCOL_VERSION,
    Acknowledged,
    Answered,
    Ask,
    Bye,
    Commit,
    Evicted,
    Hello,
    Offer,
    Published,
    Ready,
    Rejected,
    Waiting,
)
from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.records import COLUMNS, OPTIONAL_COLUMNS, REQUIRED_COLUMNS, Batch, SampleInfo
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import shown, unpacked
from counterpoint.transport.validation import MAX_NAME_LENGTH, validate

Message = Hello | Ready | Waiting | Acknowledged | Published | Rejected | Commit | Evicted | Bye

BATCH, ITEM = b"BATCH", b"ITEM"
ANSWERED = b"ANSWERED"

MAX_FRAMES = 2**18
"""Most frames of one message. 256 rollouts of 78 turns make 20,000."""

MAX_HEADER_BYTES = 2**28
"""Longest header of a batch."""

MAX_MESSAGE_BYTES = 2**14

MAX_ANSWER_BYTES = 2**28
"""Longest answer to an item: 8 bytes for each token of a contribution, and some."""

_KINDS: dict[bytes, type[Message]] = {
    b"HELLO": Hello,
    b"READY": Ready,
    b"WAITING": Waiting,
    b"ACK": Acknowledged,
    b"PUBLISHED": Published,
    b"REJECTED": Rejected,
    b"COMMIT": Commit,
    b"EVICTED": Evicted,
    b"BYE": Bye,
}
_NAMES = {message: kind for kind, message in _KINDS.items()}
_FIELDS = {message: [field.name for field in dataclasses.fields(message)] for message in _NAMES}
_FRAMES = {b"HELLO": (2,), b"REJECTED": (2, 3)}
"""How many frames a message has, where it is not three."""
_RUN_ID = re.compile(IDENTIFIER_PATTERN.encode())
_PREAMBLE = 5
"""Values of a header's first list before the names of the optional columns."""
_ARRAYS_AT_ONCE = 256
"""Arrays encoded between two rests: the batch is encoded for the wire and for its record at the same time, beside the loop."""
_SESSION = struct.Struct("<Q")
_SESSION_AND_NUMBER = struct.Struct("<QQ")

_FILE_MAGIC = b"CPBATCH2"
FILE_ALIGNMENT = 8
INDEXED_MAGIC = b"CPBATCH3"
"""Begins and ends a file whose frames lie in any order."""

_PLACE = struct.Struct("<QQ")
Place = tuple[int, int]
"""The place of a frame in such a file: its first byte, a multiple of `FILE_ALIGNMENT`, and its length."""


# --- batches ---


def encode(batch: Batch) -> list[Buffer]:
    """Returns the frames of a batch: kind, header, then the columns, the optional ones last, and the routing chunks.

    Arrays are taken by reference unless they are not C-contiguous. Rests in between: not for the loop's thread. Raises
    `ValueError` for arrays that cannot travel; their values are not checked (`validate` does that).
    """
    header, frames = [_preamble(batch)], []
    arrays = batch.arrays
    for start in yielding_gil(range(0, len(arrays), _ARRAYS_AT_ONCE)):
        for array in arrays[start : start + _ARRAYS_AT_ONCE]:
            contiguous = np.ascontiguousarray(array)
            header.append(msgpack.packb(specification(contiguous)))
            frames.append(as_bytes_view(contiguous))
    if len(frames) + 2 > MAX_FRAMES:
        raise ValueError(
            f"step {batch.step}: {len(frames) + 2} frames; at most {MAX_FRAMES} travel, merge routing chunks"
        )
    return [BATCH, b"".join(header), *frames]


def _preamble(batch: Batch) -> bytes:
    """Returns the header up to the first sidecar's specification."""
    routed = bool(batch.routed_experts)
    sidecars = len(batch.columns) + sum(map(len, batch.routed_experts))
    values: list[list[Any]] = [[batch.run_id, batch.step, len(batch.samples), sidecars, routed, *batch.optional]]
    for index, sample in enumerate(batch.samples):
        chunks = len(batch.routed_experts[index]) if routed else 0
        named = [sample.rollout_id, sample.environment, sample.policy_version, sample.reward, sample.temperature]
        values.append([*named, chunks])
    return b"".join(map(msgpack.packb, values))


def digest_of(batch: Batch) -> str:
    """Returns 32 hexadecimal digits that name the content of a batch, by which two of one step are told apart.

    Of its rollouts, tokens, log-probabilities and advantages, about 1 GB a second. Blocks: not for the event loop.
    """
    found = hashlib.blake2b(_preamble(batch), digest_size=16)
    for name, column in COLUMNS.items():
        if column.in_digest and name in batch.columns:
            found.update(as_bytes_view(np.ascontiguousarray(batch.columns[name])))
    return found.hexdigest()


def decode(frames: Sequence[Buffer], max_batch_bytes: int, *, whole_routing: bool = True) -> Batch:
    """Returns the valid batch of `frames`, as `validate` says; its arrays are views of them.

    Raises `CodecError` for anything else, before allocating.
    """
    if not 2 <= len(frames) <= MAX_FRAMES or as_bytes_view(frames[0]) != BATCH:
        raise CodecError(
            f"{len(frames)} frames that are not a batch; expected {BATCH!r}, a header and {len(REQUIRED_COLUMNS)} or more arrays"
        )
    size = frames_size(frames[2:])
    if size > max_batch_bytes:
        raise CodecError(f"a batch of {size} bytes; transport.max_batch_bytes is {max_batch_bytes}")
    values = _values(as_bytes_view(frames[1]))
    match next(values, None):
        case [str(run_id), int(step), int(sample_count), int(array_count), bool(routed), *names] if step >= 1:
            pass
        case other:
            raise CodecError(f"a batch whose preamble is {shown(other)}")
    try:
        _check_names(names)
        names = [*REQUIRED_COLUMNS, *names]
        columns = len(names)
        if array_count != len(frames) - 2 or array_count < columns:
            raise CodecError(
                f"the header claims {array_count} arrays, {len(frames) - 2} are present, at least {columns} expected"
            )
        infos, counts = _decode_samples(values, sample_count)
        arrays = [view_array(next(values, None), frame, f"sidecar {i}") for i, frame in enumerate(frames[2:])]
        for trailing in values:
            raise CodecError(f"the header does not end after its last array, but goes on with {shown(trailing)}")
        if sum(counts) != array_count - columns or not (routed or sum(counts) == 0):
            raise CodecError(f"the samples claim {sum(counts)} routing chunks, {array_count - columns} are present")
        left = iter(arrays[columns:])
        chunks = tuple(tuple(next(left) for _ in range(count)) for count in counts) if routed else ()
        batch = Batch(run_id, step, infos, dict(zip(names, arrays, strict=False)), chunks)
        validate(batch, whole_routing=whole_routing)
    except ValueError as error:
        raise CodecError(str(error), step) from error
    return batch


def _check_names(names: Sequence[object]) -> None:
    for index, name in enumerate(names):
        if name not in OPTIONAL_COLUMNS or name in names[:index]:
            raise CodecError(
                f"the header names the optional columns {names!r:.80}; expected each of {', '.join(OPTIONAL_COLUMNS)} at most "
                "once"
            )


def _values(header: memoryview) -> Iterator[Any]:
    """Yields the msgpack values of a header, one by one.

    The limits bound each value, as nested lengths would otherwise multiply: everything valid is a list of at most eight with
    short strings.
    """
    if header.nbytes >= MAX_HEADER_BYTES:
        raise CodecError(f"a header of {header.nbytes} bytes")
    unpacker = msgpack.Unpacker(
        max_buffer_size=max(header.nbytes, 1),
        max_array_len=max(8, _PREAMBLE + len(OPTIONAL_COLUMNS)),
        max_map_len=0,
        max_str_len=4 * MAX_NAME_LENGTH,
        max_bin_len=0,
        max_ext_len=0,
    )
    try:
        unpacker.feed(header)
        yield from unpacker
        if unpacker.tell() != header.nbytes:
            raise CodecError(f"the header is cut short after {unpacker.tell()} of its {header.nbytes} bytes")
    except CodecError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError(f"the header is not msgpack: {error or type(error).__name__}") from error


def _decode_samples(values: Iterator[Any], count: int) -> tuple[tuple[SampleInfo, ...], list[int]]:
    infos: list[SampleInfo] = []
    counts: list[int] = []
    while len(infos) < count:
        match next(values, None):
            case [str(), str(), int(), float(), float(), int(chunks)] as row if chunks >= 0:
                infos.append(SampleInfo(*row[:-1]))
                counts.append(chunks)
            case other:
                raise CodecError(
                    f"sample {len(infos)} of {count} is {shown(other)}; protocol {PROTOCOL_VERSION} has rollout id, environment, "
                    "policy version, reward, temperature and number of routing chunks"
                )
    return tuple(infos), counts


def frames_size(frames: Sequence[Buffer]) -> int:
    """Returns the bytes of all frames together."""
    return sum(as_bytes_view(frame).nbytes for frame in frames)


# --- a batch on its way ---


def encode_offer(offer: Offer) -> list[Buffer]:
    """Returns the frames of a batch that is sent: kind, run's id, session, then those of `encode` after the kind.

    Raises as `encode` does.
    """
    kind, *rest = encode(offer.batch)
    return [kind, offer.batch.run_id.encode(), _SESSION.pack(offer.session), *rest]


def split_offer(frames: Sequence[Buffer]) -> tuple[int, list[Buffer]]:
    """Returns the session of a batch that was sent, and the frames for `decode`.

    Raises `CodecError` when there is no session.
    """
    if len(frames) < 3 or as_bytes_view(frames[2]).nbytes != _SESSION.size:
        raise CodecError(f"a batch of {len(frames)} frames whose third is no session of {_SESSION.size} bytes")
    (session,) = _SESSION.unpack(as_bytes_view(frames[2]))
    return session, [frames[0], *frames[3:]]


# --- items and their answers ---


def encode_ask(ask: Ask, run_id: str) -> list[Buffer]:
    """Returns the frames of an item: kind, run's id, session and number, header, those of `encode` after the kind.

    Raises as `encode` does.
    """
    batch = encode(ask.batch)[1:] if ask.batch is not None else []
    return [ITEM, run_id.encode(), _SESSION_AND_NUMBER.pack(ask.session, ask.number), ask.header, *batch]


def decode_ask(frames: Sequence[Buffer], max_batch_bytes: int) -> Ask:
    """Returns the item of `frames`; its batch is valid. Raises `CodecError` for anything else, before allocating.

    The error's `step` is the item's number, if it is known.
    """
    if (
        len(frames) < 4
        or as_bytes_view(frames[2]).nbytes != _SESSION_AND_NUMBER.size
        or as_bytes_view(frames[0]) != ITEM
    ):
        raise CodecError(
            f"{len(frames)} frames that are no item; expected {ITEM!r}, a run, session and number, a header"
        )
    session, number = _SESSION_AND_NUMBER.unpack(as_bytes_view(frames[2]))
    if not 1 <= number < 2**62:
        raise CodecError(f"an item with the number {number}; they count from 1")
    header = bytes(as_bytes_view(frames[3]))
    try:
        batch = decode([BATCH, *frames[4:]], max_batch_bytes, whole_routing=False) if frames[4:] else None
    except CodecError as error:
        raise CodecError(f"item {number}: {error}", number) from error
    return Ask(number, header, batch, session)


def encode_answered(answered: Answered, run_id: str) -> list[Buffer]:
    """Returns the frames of an answer: kind, run's id, `pack_arrays` of the rest. Long texts are cut."""
    values = (answered.number, answered.step, answered.fault, answered.text[:MAX_REASON_LENGTH])
    header = dict(zip(_ANSWER, values, strict=True)) | {"metrics": dict(answered.metrics)}
    return [ANSWERED, run_id.encode(), b"".join(map(as_bytes_view, pack_arrays(header, answered.columns)))]


def decode_answered(frames: Sequence[Buffer]) -> Answered:
    """Returns the answer of `frames`. Raises `CodecError` for anything else."""
    if len(frames) != 3 or as_bytes_view(frames[2]).nbytes > MAX_ANSWER_BYTES:
        raise CodecError(f"{len(frames)} frames of {frames_size(frames)} bytes are no answer to an item")
    header, columns = unpack_arrays(frames[2])
    if set(header) != {*_ANSWER, "metrics"}:
        raise CodecError(f"an answer with {shown(header)}; expected {', '.join(_ANSWER)} and metrics")
    if any(each.dtype != np.float32 or each.ndim != 1 for each in columns.values()):
        raise CodecError("an answer whose columns are not float32 of one dimension")
    return dataclasses.replace(typed(header, Answered, "ANSWERED", CodecError), columns=columns)


_ANSWER = ("number", "step", "fault", "text")


# --- messages ---


def run_of(frames: Sequence[Buffer]) -> str:
    """Returns the id of the run that a message or a batch that was sent names; empty if it names none, as a `Hello`."""
    named = bytes(as_bytes_view(frames[1])[:128]) if len(frames) > 2 else b""
    return named.decode() if _RUN_ID.fullmatch(named) else ""


def encode_message(message: Message | Answered, run_id: str = "") -> list[Buffer]:
    """Returns the frames of a message: kind, its run's id, header. Long reasons are cut.

    A `Hello` has no frame for the id, nor has the `Rejected` that answers it: other versions read these two.
    """
    if isinstance(message, Answered):
        return encode_answered(message, run_id)
    kind = type(message)
    values = ((name, getattr(message, name)) for name in _FIELDS[kind])
    fields = {name: value[:MAX_REASON_LENGTH] if isinstance(value, str) else value for name, value in values}
    return [_NAMES[kind], *([run_id.encode()] if run_id else []), msgpack.packb(fields)]


def decode_message(frames: Sequence[Buffer]) -> Message | Answered:
    """Returns the message of `frames`; `run_of` says whose it is. Raises `CodecError` for anything else.

    The protocol of a `Hello` is compared before its fields, since those of another version may be others.
    """
    kind = bytes(as_bytes_view(frames[0])[:16]) if frames else b""
    if kind == ANSWERED:
        return decode_answered(frames)
    expected_frames = _FRAMES.get(kind, (3,))
    if kind not in _KINDS or len(frames) not in expected_frames or as_bytes_view(frames[-1]).nbytes > MAX_MESSAGE_BYTES:
        raise CodecError(
            f"{len(frames)} frames of {frames_size(frames)} bytes and kind {kind!r} are no message we know"
        )
    fields = unpacked(frames[-1], f"{kind.decode()}: its header", CodecError)
    if kind == b"HELLO" and isinstance(fields, dict) and fields.get("protocol") != PROTOCOL_VERSION:
        raise CodecError(
            f"run {shown(fields.get('run_id'))} has protocol {shown(fields.get('protocol'))}, and this trainer has "
            f"{PROTOCOL_VERSION}; install one version at both ends"
        )
    expected = _FIELDS[_KINDS[kind]]
    if not isinstance(fields, dict) or set(fields) != set(expected):
        raise CodecError(f"{kind.decode()}: {shown(fields)}; expected {', '.join(expected)}")
    return typed(fields, _KINDS[kind], kind.decode(), CodecError)


# --- files ---


def write_file(path: Path, batch: Batch) -> None:
    """Writes the frames of `batch` as a new file. For use inside `publish_directory`, which flushes.

    Layout: 8 bytes magic, uint64 number of frames, then for each its uint64 length and its bytes, padded to 8. Raises
    `OSError`.
    """
    write_new_file(path, file_buffers(encode(batch)))


def read_file(path: Path, max_batch_bytes: int) -> Batch:
    """Reads the batch that `write_file` wrote. Raises `CodecError` naming the file, or `OSError`."""
    try:
        return decode(read_frames(path, max_batch_bytes + MAX_HEADER_BYTES), max_batch_bytes)
    except CodecError as error:
        raise CodecError(f"{path}: {error}", error.step) from error


def file_buffers(frames: Sequence[Buffer]) -> list[Buffer]:
    """Returns frames as the buffers of a file (see `write_file`)."""
    buffers: list[Buffer] = [_FILE_MAGIC + struct.pack("<Q", len(frames))]
    for frame in frames:
        view = as_bytes_view(frame)
        buffers += [struct.pack("<Q", view.nbytes), view, bytes(-view.nbytes % FILE_ALIGNMENT)]
    return buffers


def index_of(places: Sequence[Place]) -> bytes:
    """Returns the end of a file with `INDEXED_MAGIC`: the place of each frame, their number, and the magic again.

    The frames, each padded to `FILE_ALIGNMENT`, are all that lies between the magic and the index.
    """
    index = b"".join(_PLACE.pack(*place) for place in places)  # in Python, so that the loop may have the GIL in between
    return b"".join((index, struct.pack("<Q", len(places)), INDEXED_MAGIC))


def _indexed_frames(content: memoryview) -> list[Buffer]:
    """Returns the frames of a file with an index, as views. Raises `CodecError`."""
    (count,) = struct.unpack_from("<Q", content, content.nbytes - 16)
    if content[-8:] != INDEXED_MAGIC or count > min(MAX_FRAMES, content.nbytes // 16):
        raise CodecError(f"a file of {content.nbytes} bytes does not end with an index of frames: it is cut short")
    end = content.nbytes - 16 - 16 * count
    index = np.frombuffer(content[end : end + 16 * count], "<u8").reshape(count, 2).tolist() if end >= 8 else []
    expected = 8
    for begin, length in sorted(index):
        if begin != expected or length > end - begin:
            expected = -1
            break
        expected = begin + length + -length % FILE_ALIGNMENT
    if end < 8 or expected != end:
        raise CodecError(f"the index of {count} frames does not cover the {content.nbytes} bytes of its file")
    return [content[begin : begin + length] for begin, length in index]


def read_frames(path: Path, max_bytes: int) -> list[Buffer]:
    """Reads the frames of a file of `file_buffers`, or of one with an index (`index_of`), as views of one buffer.

    Raises `CodecError`, before allocating, when it is no such file or larger than `max_bytes` and the file's own framing;
    `OSError` as reading does.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes + 16 * MAX_FRAMES:
            raise CodecError(f"a file of {size} bytes; at most {max_bytes} are read (transport.max_batch_bytes)")
        content = np.empty(size, np.uint8).data
        filled = 0
        while filled < size and (count := file.readinto(content[filled:])):
            filled += count
    if filled >= 24 and content[:8] == INDEXED_MAGIC:
        return _indexed_frames(content[:filled])
    if filled < 16 or content[:8] != _FILE_MAGIC:
        raise CodecError(f"{filled} bytes that do not begin with {_FILE_MAGIC!r} are not a file of frames")
    (count,) = struct.unpack_from("<Q", content, 8)
    if count > min(MAX_FRAMES, filled // 8):
        raise CodecError(f"{count} frames are claimed in a file of {filled} bytes")
    frames: list[Buffer] = []
    offset = 16
    for index in range(count):
        (length,) = struct.unpack_from("<Q", content, offset) if offset + 8 <= filled else (filled,)
        if length > filled - offset - 8:
            raise CodecError(
                f"frame {index} of {count} claims {length} bytes, {max(0, filled - offset - 8)} are left of the file"
            )
        frames.append(content[offset + 8 : offset + 8 + length])
        offset += 8 + length + -length % FILE_ALIGNMENT
    if offset != filled:
        raise CodecError(f"the {count} frames end at byte {offset} of a file of {filled}")
    return frames
