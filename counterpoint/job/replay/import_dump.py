"""Imports the reference system's step, a pickled `list[RolloutOutput]` (prime-rl, verifiers), as a dump of ours.

Only the fields that a replay needs are imported (`docs/debugging.md`). Versions of that system write routed experts in different
ways; all known ones are read. A rollout that cannot be read becomes a failed one. A file without such a list is refused.
"""

from __future__ import annotations

import binascii
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pybase64

from counterpoint.job.replay.restricted_pickle import PickledArray, describe_value, load
from counterpoint.orchestrator.rollouts.dump import DumpError, DumpHeader
from counterpoint.orchestrator.step.finalize import find_fault
from counterpoint.run.config import AdvantageConfig, ZeroAdvantageFilter
from counterpoint.transport.arrays import AnyArray
from counterpoint.transport.records import Float32Array, Int32Array, Rollout, RoutingArray, Turn

UNNAMED_ENVIRONMENT = "imported"

_FIELDS = {
    "rollout": (
        {"example_id", "env_name", "task", "reward", "metrics", "error", "trajectory", "advantage"},
        {"prompt", "completion", "answer", "info", "timing", "tools", "tool_defs", "is_completed", "is_truncated"}
        | {"stop_condition", "token_usage"},
    ),
    "step": (
        {"tokens", "is_truncated"},
        {"prompt", "completion", "response", "reward", "advantage", "trajectory_id", "extras"},
    ),
    "tokens": (
        {"prompt_ids", "completion_ids", "completion_mask", "completion_logprobs", "is_truncated", "routed_experts"},
        {"prompt_mask", "overlong_prompt"},
    ),
    "routed_experts": ({"data", "shape", "start"}, set()),
}  # fmt: skip
"""The fields of each kind of dictionary: the fields that are imported, and the known fields that a replay does not
need."""

_LONGEST_ERROR = 2000
_RECORD_BYTES = 512
"""Approximate size of a rollout or a turn without its arrays."""
_BYTES_PER_BYTE = 8
"""The dump may be this many times as large as the file. A token id takes 2 to 5 bytes of a pickle and 4 here; only an object that
is referenced many times could exceed it."""
_BYTES_TO_SPARE = 16 * 2**20


class UnreadableError(ValueError):
    """A rollout is malformed; the message says where."""


class ImportedRollouts:
    """The rollouts of one file. Reading it takes as much memory as the reference system's own objects."""

    def __init__(self, path: Path) -> None:
        """Reads the whole file. Raises `restricted_pickle.PickleError`, `DumpError` when it holds something else, `OSError`."""
        outputs = load(path)
        if not isinstance(outputs, list) or not any(isinstance(o, dict) and "trajectory" in o for o in outputs):
            found = f"a list of {len(outputs)}" if isinstance(outputs, list) else f"a {type(outputs).__name__}"
            raise DumpError(f"{path} holds {found}; expected a list of rollouts, dictionaries with a trajectory")
        self._path = path
        self._outputs: list[Any] = outputs
        self._bytes_left = _BYTES_TO_SPARE + _BYTES_PER_BYTE * path.stat().st_size
        self._groups: dict[tuple[str, object], int] = {}
        self.unreadable: list[tuple[int, str]] = []
        """Positions of rollouts that were imported as failed because they could not be read, and why."""
        self.left_out: Counter[str] = Counter()
        """How often each thing was found that a dump cannot hold, such as an unknown field."""
        self.header = DumpHeader(
            run_id="imported",
            step=1,
            shipped=len(outputs),
            advantage=AdvantageConfig(),
            filters=[ZeroAdvantageFilter()],
            state_columns={name: [] for name in sorted({_environment(output) for output in outputs})},
        )
        """The header of the dump. Advantage and filters are our defaults: the file does not have them."""

    def rollouts(self) -> Iterator[Rollout]:
        """Yields the rollouts and frees each input. Raises `DumpError` if the dump would be much larger than the file."""
        for position, output in enumerate(self._outputs):
            self._outputs[position] = None
            yield self._rollout(position, output)

    def _rollout(self, position: int, output: object) -> Rollout:
        environment = _environment(output)
        example_id = output.get("example_id") if isinstance(output, dict) else None
        # A rollout without an example is a group of its own.
        key = (environment, example_id if isinstance(example_id, int | str) else (position,))
        group_id = self._groups.setdefault(key, len(self._groups))
        example_index = example_id if isinstance(example_id, int) and 0 <= example_id < 2**63 else group_id
        rollout = Rollout(f"{group_id}-{position}", group_id, environment, example_index)
        try:
            self._fill(rollout, output)
            fault = find_fault(rollout) if rollout.error is None else None
        except UnreadableError as error:
            fault = str(error)
        if fault is not None and rollout.error is None:
            self.unreadable.append((position, fault))
            rollout.error = f"could not be imported: {fault}"
        self._spend(_RECORD_BYTES + sum(map(len, rollout.metrics)))
        return rollout

    def _fill(self, rollout: Rollout, output: object) -> None:
        """Sets the fields in order of rising risk of being unreadable. Raises `UnreadableError`."""
        fields = self._dictionary(output, "rollout", "the rollout")
        rollout.error = _error(fields.get("error"))
        if isinstance(metrics := fields.get("metrics"), dict):
            rollout.metrics = {_text(k): float(v) for k, v in metrics.items() if isinstance(k, str) and _is_finite(v)}
        rollout.reward = _number(fields.get("reward"), "reward")
        rollout.advantage = _number(fields.get("advantage"), "advantage") or 0.0
        trajectory = fields.get("trajectory")
        if not isinstance(trajectory, list | tuple):
            raise UnreadableError(f"trajectory is a {type(trajectory).__name__}; expected a list")
        turns = [self._turn(step, f"trajectory[{index}]") for index, step in enumerate(trajectory)]
        rollout.turns = _of_one_dtype([turn for turn in turns if turn is not None])

    def _turn(self, step: object, where: str) -> Turn | None:
        """The turn of a step; None for a step without tokens, which cannot be trained on."""
        outer = self._dictionary(step, "step", where)
        if outer.get("tokens") is None:
            self.left_out["step without tokens"] += 1
            return None
        where = f"{where}.tokens"
        fields = self._dictionary(outer["tokens"], "tokens", where)
        prompt_ids = _token_ids(fields.get("prompt_ids"), f"{where}.prompt_ids")
        completion_ids = _token_ids(fields.get("completion_ids"), f"{where}.completion_ids")
        log_probabilities = _log_probabilities(fields.get("completion_logprobs"), f"{where}.completion_logprobs")
        untrained = _untrained(fields.get("completion_mask"), len(completion_ids), f"{where}.completion_mask")
        tokens = len(prompt_ids) + len(completion_ids)
        routed_experts, start = self._routing(fields.get("routed_experts"), tokens, f"{where}.routed_experts")
        arrays = (prompt_ids, completion_ids, log_probabilities, routed_experts)
        self._spend(_RECORD_BYTES + sum(array.nbytes for array in arrays if array is not None))
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            log_probabilities=log_probabilities,
            policy_version=0,
            finish_reason="length" if fields.get("is_truncated") or outer.get("is_truncated") else "stop",
            routed_experts=routed_experts,
            routed_experts_start=start,
            untrained=untrained,
        )

    def _routing(self, value: object, tokens: int, where: str) -> tuple[RoutingArray | None, int]:
        """The routing `[rows, layers, top_k]` and the position of its first row, without the last token's row if there is one."""
        start = 0
        match value:
            case None:
                return None, 0
            case PickledArray():
                found = value.value
            case list() | tuple():
                found = _nested(value, where, self._bytes_left)
            case dict():
                found, start = _payload(self._dictionary(value, "routed_experts", where), where)
            case _:
                raise UnreadableError(f"{where} is a {type(value).__name__}; expected lists, an array or a dictionary")
        if found.ndim != 3:
            raise UnreadableError(f"{where} has shape {found.shape}; expected [tokens, layers, top_k]")
        rows = tokens - 1 - start
        if len(found) not in (rows, rows + 1):
            raise UnreadableError(
                f"{where} has {len(found)} rows from position {start} on, of {tokens} tokens; expected {rows}, or one more"
            )
        return _experts(found[:rows], where), start

    def _dictionary(self, value: object, kind: str, where: str) -> dict[Any, Any]:
        """Returns `value` as a dictionary and counts its unknown fields."""
        if not isinstance(value, dict):
            raise UnreadableError(f"{where} is a {type(value).__name__}; expected a dictionary")
        taken, known = _FIELDS[kind]
        for name in value:
            if name not in taken and name not in known:
                self.left_out[f"{kind}.{name[:80] if isinstance(name, str) else describe_value(name)}"] += 1
        return value

    def _spend(self, nbytes: int) -> None:
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            raise DumpError(
                f"{self._path} references the same objects so often that a dump would be more than "
                f"{_BYTES_PER_BYTE} times as large"
            )


def _environment(output: object) -> str:
    """The name by which prime-rl groups rollouts; else the task, by which verifiers names the environment of a group."""
    names = [output.get("env_name"), output.get("task")] if isinstance(output, dict) else []
    return next((_text(name) for name in names if isinstance(name, str) and name), UNNAMED_ENVIRONMENT)


def _error(value: object) -> str | None:
    """The error as text, whatever its type. An empty dictionary is an error; an empty text is none."""
    match value:
        case None | "":
            return None
        case str(text):
            return _text(text)[:_LONGEST_ERROR]
        case dict():
            texts = [text[:_LONGEST_ERROR] for text in islice(value.values(), 8) if isinstance(text, str)]
            return _text("; ".join(texts))[:_LONGEST_ERROR] or "an error without a message"
        case _:
            return f"an error given as a {type(value).__name__}"


def _text(text: str) -> str:
    """The text with its lone surrogates, which cannot be written, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _number(value: object, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not _is_finite(value):
        raise UnreadableError(f"{where} is {describe_value(value)}; expected a finite number")
    return float(value)


def _token_ids(value: object, where: str) -> Int32Array:
    if not isinstance(value, PickledArray):
        return np.asarray(_packed("i", value, where), dtype=np.int32)
    found = value.value
    if found.ndim != 1 or not _fit(found, np.int32):
        raise UnreadableError(
            f"{where} is an array of {found.dtype} and shape {found.shape}; expected [tokens] of int32"
        )
    return found.astype(np.int32)


def _untrained(mask: object, tokens: int, where: str) -> bytes:
    """Returns `Turn.untrained` of a mask that is 0 where a completion token is not trained; None trains all."""
    if mask is None:
        return b""
    if isinstance(mask, PickledArray) and mask.value.ndim == 1:
        mask = mask.value.tolist()
    if not isinstance(mask, list | tuple) or len(mask) != tokens:
        raise UnreadableError(f"{where} is not a list of {tokens} values, one for each completion token")
    return b"" if all(mask) else bytes(not trained for trained in mask)


def _log_probabilities(value: object, where: str) -> Float32Array:
    if not isinstance(value, PickledArray):
        return np.asarray(_packed("f", value, where), dtype=np.float32)
    if value.value.ndim != 1:
        raise UnreadableError(f"{where} is an array of shape {value.value.shape}; expected [tokens]")
    return value.value.astype(np.float32)


def _experts(found: AnyArray, where: str) -> RoutingArray:
    """The routing as uint8 if all values fit, else as uint16."""
    if found.dtype == np.uint8 or _fit(found, np.uint8):
        return found.astype(np.uint8, copy=False)
    if _fit(found, np.uint16):
        return found.astype(np.uint16, copy=False)
    raise UnreadableError(f"{where} holds {found.dtype} that are no indices of experts; expected 0 to 65535")


def _fit(found: AnyArray, dtype: type[np.integer[Any]]) -> bool:
    """Whether all values are integers from 0 to the largest of `dtype`."""
    if found.dtype.kind not in "iu":
        return False
    return not found.size or (int(found.min()) >= 0 and int(found.max()) <= np.iinfo(dtype).max)


def _packed(typecode: str, value: object, where: str) -> array[Any]:
    """A list of numbers as Python's `array`, which refuses texts and numbers that do not fit."""
    if not isinstance(value, list | tuple):
        raise UnreadableError(f"{where} is a {type(value).__name__}; expected a list of numbers")
    try:
        return array(typecode, value)
    except (TypeError, OverflowError) as error:
        raise UnreadableError(f"{where} is not a list of numbers: {error}") from error


def _nested(rows: Sequence[object], where: str, most: int) -> AnyArray:
    """An array from lists of lists of lists of integers. `most`: cells; more would be a list that is referenced many times."""
    inner, layers = _flattened(rows, where, most)
    cells, top_k = _flattened(inner, where, most)
    return np.asarray(_packed("H", cells, where), dtype=np.uint16).reshape(len(rows), layers, top_k)


def _flattened(lists: Sequence[object], where: str, most: int) -> tuple[list[object], int]:
    """The elements of lists of one length, one list after the other, and that length."""
    known = [one for one in lists if isinstance(one, list | tuple)]
    lengths = {len(one) for one in known} or {0}
    if len(known) < len(lists) or len(lengths) > 1:
        raise UnreadableError(
            f"{where} is not [tokens, layers, top_k] of integers: its lists differ in length, or in depth"
        )
    (length,) = lengths
    if len(known) * length > most:
        raise UnreadableError(f"{where} has {len(known)} x {length} entries, more than the file can hold")
    return list(chain.from_iterable(known)), length


def _payload(fields: dict[Any, Any], where: str) -> tuple[AnyArray, int]:
    """`{data, shape, start}`: raw or base64 bytes, of integers as wide as the bytes suggest."""
    data, shape, start = fields.get("data"), fields.get("shape"), fields.get("start", 0)
    if isinstance(data, str):
        try:
            data = pybase64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UnreadableError(f"{where}.data is not base64: {error}") from error
    if isinstance(data, PickledArray):
        data = data.value.tobytes()
    if not isinstance(data, bytes | bytearray):
        raise UnreadableError(f"{where}.data is a {type(data).__name__}; expected bytes or base64 text")
    if not isinstance(start, int) or not 0 <= start < 2**31:
        raise UnreadableError(f"{where}.start is {describe_value(start)}; expected a position")
    match shape:
        case [int(rows), int(layers), int(top_k)] if all(0 <= size < 2**31 for size in shape):
            cells = rows * layers * top_k
        case _:
            raise UnreadableError(f"{where}.shape is {describe_value(shape)}; expected [tokens, layers, top_k]")
    dtypes = {cells: "u1", 2 * cells: "<u2", 4 * cells: "<i4", 8 * cells: "<i8"}
    if len(data) not in dtypes:
        raise UnreadableError(f"{where}.shape is {shape} for {len(data)} bytes; expected 1, 2, 4 or 8 bytes an index")
    return np.frombuffer(data, dtype=dtypes[len(data)]).reshape(rows, layers, top_k), start


def _of_one_dtype(turns: list[Turn]) -> list[Turn]:
    """The turns, their routing as uint16 where that of any of them is."""
    if all(turn.routed_experts is None or turn.routed_experts.dtype == np.uint8 for turn in turns):
        return turns
    return [
        replace(turn, routed_experts=turn.routed_experts.astype(np.uint16, copy=False))
        if turn.routed_experts is not None
        else turn
        for turn in turns
    ]
