"""`tokens.bin`: the token ids and log-probabilities of a step's recorded completions, for people who look at single tokens.

It lies beside `rollouts.jsonl` and is bounded as its text is: of a long rollout it has the first and the last tokens
(`transcripts.py`). For each rollout, in the order of the lines, it has one frame of `transport.arrays.pack_arrays` after its
length as a little-endian uint64: `kept` int32 `[turns, 3]` (tokens kept at the beginning, at the end, and of the completion in
all), and for the kept tokens one after the other `token_ids` int32, `log_probabilities` float32 and `untrained` uint8. A reader
trusts none of it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from counterpoint.orchestrator.rollouts.rollout_file import framed
from counterpoint.orchestrator.rollouts.transcripts import TurnText
from counterpoint.transport.arrays import AnyArray, unpack_arrays
from counterpoint.transport.files.untrusted import open_regular
from counterpoint.transport.records import Float32Array, Int32Array, Rollout, Turn, UInt8Array

TOKENS_FILE = "tokens.bin"

MAX_FRAME_BYTES = 64 * 2**20
"""Most bytes of a rollout's frame that a reader accepts."""

MAX_ROLLOUTS = 1_000_000
"""Most frames that a reader passes over to reach one."""

_LENGTH = struct.Struct("<Q")
_NOTHING = (0, 0, 0)
_DTYPES: tuple[type[np.generic], ...] = (np.int32, np.float32, np.uint8)


class TokenFileError(ValueError):
    """A file that is not as `write_tokens` writes it. The message says where."""


@dataclass(frozen=True, slots=True)
class CompletionTokens:
    """The kept tokens of one turn's completion."""

    first: int
    """Tokens kept at its beginning. Those after them are from its end."""
    total: int
    """Tokens of the whole completion, or 0 if nothing could be recorded."""
    token_ids: Int32Array
    log_probabilities: Float32Array
    """Log-probabilities at sampling, as in `Turn`."""
    untrained: UInt8Array
    """1 for a token that its environment left out of training."""

    @property
    def positions(self) -> Int32Array:
        """The position of each kept token in the completion, from 0."""
        last = len(self.token_ids) - self.first
        return np.concatenate(
            [np.arange(self.first, dtype=np.int32), np.arange(self.total - last, self.total, dtype=np.int32)]
        )


def write_tokens(file: BinaryIO, rollout: Rollout, texts: Sequence[TurnText]) -> bytes:
    """Appends one rollout's frame and returns its SHA-256. `texts` have the kept ranges of each turn. Blocks.

    Raises `OSError`. Call it in a thread.
    """
    kept: list[tuple[int, int, int]] = []
    parts: tuple[list[AnyArray], ...] = ([], [], [])
    for turn, text in zip(rollout.turns, texts, strict=True):
        if (columns := _columns(turn)) is None:
            kept.append(_NOTHING)
            continue
        first, last = text.kept
        kept.append((first, last, len(turn.completion_ids)))
        for part, column in zip(parts, columns, strict=True):
            part.append(column[:first])
            if last:
                part.append(column[len(column) - last :])
    ids, values, untrained = map(_joined, parts, _DTYPES)
    arrays: dict[str, AnyArray] = {"kept": np.array(kept, np.int32).reshape(-1, 3), "token_ids": ids}
    arrays |= {"log_probabilities": values, "untrained": untrained}
    frame = b"".join(framed({"rollout_id": rollout.rollout_id}, arrays))
    file.write(frame)
    return hashlib.sha256(frame).digest()


def _joined(part: Sequence[AnyArray], dtype: type[np.generic]) -> AnyArray:
    if len(part) == 1:
        return part[0].astype(dtype, copy=False)
    return np.concatenate(part).astype(dtype, copy=False) if part else np.zeros(0, dtype)


def _columns(turn: Turn) -> tuple[AnyArray, AnyArray, AnyArray] | None:
    """Returns ids, log-probabilities and mask of a completion, or None if arrays of a failed rollout do not fit together."""
    tokens = len(turn.completion_ids)
    if turn.completion_ids.ndim != 1 or turn.log_probabilities.shape != (tokens,):
        return None
    if turn.untrained and len(turn.untrained) != tokens:
        return None
    untrained = np.frombuffer(bytes(turn.untrained), np.uint8) if turn.untrained else np.zeros(tokens, np.uint8)
    return turn.completion_ids, turn.log_probabilities, untrained


def read_tokens(path: Path, number: int) -> tuple[str, list[CompletionTokens]]:
    """Returns the id and the turns of the rollout with line `number`, from 0.

    Raises `OSError` for a missing file, `TokenFileError` for a damaged one, and `UntrustedFileError` if it is no file.
    """
    with open_regular(path) as file:
        data = _frame(file.fileno(), number, path)
    try:
        header, arrays = unpack_arrays(data)
        kept, *columns = (arrays[name] for name in ("kept", "token_ids", "log_probabilities", "untrained"))
        return str(header.get("rollout_id")), _turns(kept, columns)
    except (KeyError, ValueError) as error:
        raise TokenFileError(f"{path}: the tokens of rollout {number} are damaged: {error}") from None


def _frame(descriptor: int, number: int, path: Path) -> bytes:
    size, offset = os.fstat(descriptor).st_size, 0
    if not 0 <= number < MAX_ROLLOUTS:
        raise TokenFileError(f"{path}: {number} is no number of a rollout; expected 0 to {MAX_ROLLOUTS - 1}")
    for index in range(number + 1):
        head = os.pread(descriptor, _LENGTH.size, offset)
        if len(head) < _LENGTH.size:
            raise TokenFileError(f"{path} ends after {index} rollouts; number {number} was asked for")
        (length,) = _LENGTH.unpack(head)
        offset += _LENGTH.size
        if length > size - offset:
            raise TokenFileError(f"{path}: rollout {index} claims {length} bytes where {size - offset} are left")
        if index < number:
            offset += length
    if length > MAX_FRAME_BYTES:
        raise TokenFileError(f"{path}: rollout {number} has {length} bytes; at most {MAX_FRAME_BYTES} are read")
    return os.pread(descriptor, length, offset)


def _turns(kept: AnyArray, columns: Sequence[AnyArray]) -> list[CompletionTokens]:
    for column, dtype in zip(columns, (np.int32, np.float32, np.uint8), strict=True):
        if column.dtype != dtype or column.shape != columns[0].shape or column.ndim != 1:
            raise ValueError(f"a column has {column.shape} of {column.dtype}; expected {columns[0].shape} of {dtype}")
    if kept.dtype != np.int32 or kept.ndim != 2 or kept.shape[1] != 3:
        raise ValueError(f"kept has {kept.shape} of {kept.dtype}; expected [turns, 3] of int32")
    turns, start = [], 0
    for first, last, total in kept.tolist():
        stop = start + first + last
        if min(first, last) < 0 or first + last > total or stop > len(columns[0]):
            raise ValueError(f"a turn keeps {first} and {last} of {total} tokens; {len(columns[0]) - start} are left")
        ids, values, untrained = (column[start:stop] for column in columns)
        turns.append(CompletionTokens(first, total, ids, values, untrained))
        start = stop
    return turns
