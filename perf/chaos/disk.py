"""Readers of a job's directory that follow `docs/contracts.md` alone.

An audit that used the parts' own readers would share their mistakes.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

_MAGIC = b"CPBATCH2"
_INDEXED = b"CPBATCH3"


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The identity and counts of a batch, from its `batch.bin`."""

    run_id: str
    step: int
    rollout_ids: tuple[str, ...]
    """The rollouts of its samples, in order."""
    tokens: int
    trained_tokens: int


def read_batch(path: Path) -> BatchRecord:
    """Reads a `batch.bin`. Raises `OSError`, or `ValueError` naming a file that is no batch."""
    content = path.read_bytes()
    if content[:8] == _MAGIC:
        (count,) = struct.unpack_from("<Q", content, 8)
        frames, end = [], 16
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", content, end)
            frames.append(content[end + 8 : end + 8 + length])
            end += 8 + length + -length % 8
    elif content[:8] == _INDEXED:
        (count,) = struct.unpack_from("<Q", content, len(content) - 16)
        places = [struct.unpack_from("<QQ", content, len(content) - 16 * (count + 1 - i)) for i in range(count)]
        frames = [content[begin : begin + length] for begin, length in places]
        end = 8 + sum(length + -length % 8 for _, length in places) + 16 * (count + 1)
    else:
        raise ValueError(f"{path} begins with {content[:8]!r}; expected {_MAGIC!r} or {_INDEXED!r}")
    if end != len(content) or len(frames) < 4:
        raise ValueError(f"{path}: {count} frames end at byte {end} of {len(content)}")
    header = msgpack.Unpacker()
    header.feed(frames[1])
    run_id, step, samples, *_ = header.unpack()
    rollout_ids = tuple(header.unpack()[0] for _ in range(samples))
    return BatchRecord(run_id, step, rollout_ids, len(frames[2]) // 4, sum(frames[3]))


def published(parent: Path) -> list[int]:
    """Returns the N of every `step_N` in `parent` that has its `STABLE`, ascending."""
    found = (re.fullmatch(r"step_(\d+)", marker.parent.name) for marker in parent.glob("step_*/STABLE"))
    return sorted(int(match[1]) for match in found if match)


def json_lines(path: Path) -> list[Any]:
    """Returns the whole lines of a JSON Lines file; none where it is missing. A line that is still being written is left out."""
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in whole.splitlines()]


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal. Raises `OSError`."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_ids(job: Path) -> list[str]:
    """Returns the ids of a job's runs, by their directories."""
    return sorted(path.name.removeprefix("run_") for path in job.glob("run_*") if path.is_dir())
