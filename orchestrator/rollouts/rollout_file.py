"""Complete rollouts in one file, arrays as raw bytes: for checkpoints, and for dumps to replay.

The file is a sequence of frames of `transport.arrays.pack_arrays`, each after its length as a little-endian uint64: for each
rollout one frame with the number of its turns, then one frame per turn. Arrays are written by reference and read as views of the
file's bytes. A rollout's frame holds each token once, and a turn's frame has the positions of its prompt and completion in it. A
turn whose ids are not views of these tokens has arrays of its own.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import reduce
from itertools import islice
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import orjson

from counterpoint.transport.arrays import AnyArray, pack_arrays, unpack_arrays
from counterpoint.transport.exact_json import loads
from counterpoint.transport.files.atomic import write_buffers
from counterpoint.transport.json_values import encode_values
from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.records import (
    COLUMNS,
    TURN_COLUMNS,
    Int32Array,
    OpponentTurn,
    Rollout,
    SavedState,
    Turn,
)

Record = TypeVar("Record", Rollout, Turn, OpponentTurn)

_LENGTH = struct.Struct("<Q")
_ROLLOUTS_AT_ONCE = 8
"""Rollouts written between two releases of the GIL: with eight short turns each, about a millisecond of Python."""
_ARRAYS = ("prompt_ids", "completion_ids", "log_probabilities", "routed_experts")
_JSON_FIELDS = ("metrics", "state")
_BY_TURN = ("turn_rewards", "turn_advantages")
_APART = (*_JSON_FIELDS, *_BY_TURN, "saved", "turns", "turn_hashes", "tokens", "branches", "opponent_turns")
"""Fields of a rollout that are not in its frame's header."""


class RolloutStateError(ValueError):
    """A `state` or `metrics` of an environment that is not JSON. The message is for a person."""


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Writes a new file, which the caller flushes. Blocks: call it in a thread.

    Raises `OSError`, and `RolloutStateError` for a rollout that was not finalized and has a state that cannot be saved.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for some in yielding_gil(in_portions(rollouts)):
            write_buffers(descriptor, [buffer for rollout in some for buffer in rollout_buffers(rollout)])
    finally:
        os.close(descriptor)


def in_portions(rollouts: Iterable[Rollout]) -> Iterator[list[Rollout]]:
    """Yields the rollouts in short lists, between which a thread that writes them rests (`yielding_gil`)."""
    iterator = iter(rollouts)
    while portion := list(islice(iterator, _ROLLOUTS_AT_ONCE)):
        yield portion


def read_rollouts(path: Path) -> list[Rollout]:
    """Reads the rollouts of a file, in order. Raises `OSError`, or `ValueError` naming the file if it is damaged."""
    try:
        return parse_rollouts(memoryview(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def rollout_buffers(rollout: Rollout) -> list[bytes | memoryview]:
    """Returns one rollout's bytes, arrays by reference."""
    buffers = framed(*_rollout_frame(rollout))
    for turn in rollout.turns:
        buffers += framed(*_turn_frame(turn, rollout.tokens))
    return buffers


def parse_rollouts(data: memoryview) -> list[Rollout]:
    """Parses the bytes of `rollout_buffers`, arrays as views. Raises `ValueError` when they are damaged."""
    rollouts: list[Rollout] = []
    parsed = frames(data)
    try:
        for header, arrays in parsed:
            tokens = arrays.get("tokens")
            turns = [_turn(*next(parsed), tokens) for _ in range(header.pop("turns"))]
            saved = SavedState(*(arrays[name].tobytes() for name in _JSON_FIELDS))
            metrics, state = loads(saved.metrics), loads(saved.state)
            others = arrays.get("opponent_turns")
            rollout = Rollout(
                turns=turns,
                metrics=metrics,
                state=state,
                saved=saved,
                tokens=tokens,
                opponent_turns=[] if others is None else _opponent_turns(others.tobytes()),
                **_by_turn(arrays, len(turns)),
                **header,
            )
            rollouts.append(_typed(rollout))
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise ValueError(f"rollout {len(rollouts)} is damaged: {error!r}") from error
    return rollouts


def saved_state(rollout: Rollout) -> SavedState:
    """Returns the rollout's `metrics` and `state` for files: as they were when it was finalized, or as they are now.

    Raises `RolloutStateError`.
    """
    return rollout.saved or SavedState(*(_encoded(name, getattr(rollout, name)) for name in _JSON_FIELDS))


def _encoded(name: str, value: object) -> bytes:
    if not isinstance(value, dict):
        raise RolloutStateError(f"the environment left a {name} of type {type(value).__name__}; expected a dictionary")
    try:
        return encode_values(value)
    except Exception as error:
        wrong = next((f"[{key!r}]" for key, each in value.items() if not _is_json(each)), "")
        raise RolloutStateError(
            f"the environment left a {name}{wrong} that is not JSON-serialisable: {error}"
        ) from error


def _is_json(value: object) -> bool:
    try:
        encode_values({"value": value})
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def _rollout_frame(rollout: Rollout) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    plain = {field.name: getattr(rollout, field.name) for field in fields(rollout) if field.name not in _APART}
    saved = saved_state(rollout)
    # As arrays, since an environment's state may exceed the limit of a frame's header.
    arrays = {name: np.frombuffer(getattr(saved, name), dtype=np.uint8) for name in _JSON_FIELDS}
    tokens = {} if rollout.tokens is None else {"tokens": rollout.tokens}
    arrays |= {name: values for name in _BY_TURN if (values := getattr(rollout, name)) is not None}
    if rollout.opponent_turns:
        arrays["opponent_turns"] = np.frombuffer(orjson.dumps(rollout.opponent_turns), dtype=np.uint8)
    return plain | {"turns": len(rollout.turns)}, arrays | tokens


def _by_turn(arrays: dict[str, AnyArray], turns: int) -> dict[str, Any]:
    found = {name: arrays[name] for name in _BY_TURN if name in arrays}
    for name, values in found.items():
        if values.dtype != np.float32 or values.shape != (turns,):
            raise ValueError(f"{name} has {values.shape} of {values.dtype} for {turns} turns; expected a float32 each")
    return found


def _opponent_turns(encoded: bytes) -> list[OpponentTurn]:
    return [_typed(OpponentTurn(**each)) for each in loads(encoded)]


def _turn_frame(turn: Turn, tokens: Int32Array | None) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    apart = (*_ARRAYS, "untrained", "columns", "alternatives")
    plain = {field.name: getattr(turn, field.name) for field in fields(turn) if field.name not in apart}
    arrays = {name: array for name in _ARRAYS if (array := getattr(turn, name)) is not None}
    if turn.untrained:  # nothing for turns that are trained as a whole: as before there was a mask
        arrays["untrained"] = np.frombuffer(bytes(turn.untrained), np.uint8)
    arrays |= turn.columns
    start = None if tokens is None else _start_within(tokens, turn)
    if start is not None:
        plain["tokens"] = [start, len(arrays.pop("prompt_ids")), len(arrays.pop("completion_ids"))]
    return plain, arrays


def _start_within(tokens: Int32Array, turn: Turn) -> int | None:
    """Returns the position in `tokens` of the turn's prompt and completion, or None if they are no views of it."""
    first, prompt, completion = (
        array.__array_interface__["data"][0] for array in (tokens, turn.prompt_ids, turn.completion_ids)
    )
    follows = completion == prompt + turn.prompt_ids.nbytes
    within = first <= prompt and completion + turn.completion_ids.nbytes <= first + tokens.nbytes
    return (prompt - first) // tokens.itemsize if follows and within else None


def _turn(header: dict[str, Any], arrays: dict[str, AnyArray], tokens: AnyArray | None) -> Turn:
    fields: dict[str, Any] = header | arrays
    if (place := fields.pop("tokens", None)) is not None:
        start, prompt, completion = place
        stop = start + prompt + completion
        if tokens is None or min(start, prompt, completion) < 0 or stop > len(tokens):
            held = "none" if tokens is None else len(tokens)
            raise ValueError(f"a turn is of tokens {start} to {stop}; the rollout has {held}")
        fields["prompt_ids"] = tokens[start : start + prompt]
        fields["completion_ids"] = tokens[start + prompt : stop]
    if (untrained := fields.pop("untrained", None)) is not None:
        fields["untrained"] = untrained.tobytes()
        if len(fields["untrained"]) != len(fields["completion_ids"]):
            raise ValueError(
                f"untrained has {untrained.nbytes} bytes for {len(fields['completion_ids'])} completion_ids"
            )
    fields["columns"] = {name: fields.pop(name) for name in TURN_COLUMNS if name in fields}
    for name, column in fields["columns"].items():
        if column.dtype != COLUMNS[name].dtype or column.shape != fields["completion_ids"].shape:
            raise ValueError(
                f"{name} has {column.shape} of {column.dtype} for {len(fields['completion_ids'])} completion_ids; expected "
                f"a {COLUMNS[name].dtype.__name__} each"
            )
    return _typed(Turn(**fields))


def _typed(record: Record) -> Record:
    for name, expected in _TYPES[type(record)].items():
        if not isinstance(value := getattr(record, name), expected):
            shown = getattr(expected, "__name__", expected)
            raise TypeError(f"{type(record).__name__}.{name} is {str(value)[:80]!r}; expected {shown}")
    return record


def _without_elements(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        return reduce(or_, map(_without_elements, get_args(hint)))
    return float | int if hint is float else get_origin(hint) or hint


_TYPES: dict[type, dict[str, Any]] = {
    kind: {name: _without_elements(hint) for name, hint in get_type_hints(kind).items()}
    for kind in (Rollout, Turn, OpponentTurn)
}
"""The declared types of fields, without those of the elements of arrays, lists and dictionaries."""


def framed(header: dict[str, Any], arrays: dict[str, AnyArray]) -> list[bytes | memoryview]:
    """Returns one frame after its length."""
    buffers = pack_arrays(header, arrays)
    return [_LENGTH.pack(sum(map(len, buffers))), *buffers]


def frames(data: memoryview) -> Iterator[tuple[dict[str, Any], dict[str, AnyArray]]]:
    """Yields the frames of `framed`, header and arrays. Raises `ValueError` when they are damaged."""
    offset = 0
    while offset < len(data):
        if len(data) - offset < _LENGTH.size:
            raise ValueError(f"the file ends within a length, at byte {offset}")
        (length,) = _LENGTH.unpack_from(data, offset)
        start, offset = offset + _LENGTH.size, offset + _LENGTH.size + length
        if offset > len(data):
            raise ValueError(f"a frame at byte {start} claims {length} bytes, {len(data) - start} are left")
        yield unpack_arrays(data[start:offset])
