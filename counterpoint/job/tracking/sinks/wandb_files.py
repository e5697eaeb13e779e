"""Reads the files that W&B writes on this machine, `run-<id>.wandb`: which steps they have.

They have LevelDB's log format: blocks of 32 KiB, in which each record has a header of checksum, length and kind, and is divided
where a block ends.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path

_FILE_HEADER = 7
_BLOCK = 32768
_RECORD = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


def steps_in(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields each step of the run's history with its values, as JSON, by name. A part of a record at the end is left out."""
    record_class = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for data in _records(file.read_bytes()):
        record = record_class()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            yield int(values.get("_step", record.history.step.num)), values


def last_offline_step(directory: Path, run_id: str) -> int:
    """Returns the last step in the files of W&B's run `run_id` below `directory`; 0 if there is none. Raises `OSError`."""
    files = directory.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    return max((step for file in files for step, _ in steps_in(file)), default=0)


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _FILE_HEADER, b""
    while at + _RECORD.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _RECORD.size:
            at += left
            continue
        _, size, kind = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if kind == 0 or at + size > len(data):
            return
        chunk = data[at : at + size]
        at += size
        record = chunk if kind in (_FULL, _FIRST) else record + chunk
        if kind in (_FULL, _LAST):
            yield record
