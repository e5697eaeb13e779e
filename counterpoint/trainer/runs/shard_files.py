"""The state of a run whose weights are divided over ranks, on disk: each rank writes its slices, any number of ranks reads them.

A checkpoint's `state.safetensors` is then rank 0's, the others' are `state.rank_1.safetensors` and so on, and `shards` in its
`state.json` says how many ranks there were and how many rows each weight has. Weights are divided by rows as `torch.chunk` does,
and those of experts over the ranks of a group first (`slice_of`), so where each row is follows from these numbers. A weight
without rows there is whole in the first file. A rank reads the rows of its own slices alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from counterpoint.transport.files.atomic import publish_directory, remove_directory

STATE = "state.safetensors"

MOST_RANKS = 2**16


def slice_of(total: int, rank: int, ranks: int, parallel: int = 1) -> tuple[int, int]:
    """Returns where a rank's slice of `total` rows begins and ends: equal slices, of which the last are shorter or empty.

    With `parallel`, which divides rows and ranks, each group of so many neighbouring ranks has all rows, and the ranks at the
    same place in their groups divide one part of them.
    """
    group, index = divmod(rank, parallel)
    own, ranks = total // parallel, ranks // parallel
    size = -(-own // ranks)
    first = min(group * size, own)
    return index * own + first, index * own + min(first + size, own)


def file_name(rank: int) -> str:
    """Returns the name of a rank's file in a checkpoint."""
    return f"state.rank_{rank}.safetensors" if rank else STATE


def staged(output_dir: Path, run_id: str, rank: int) -> Path:
    """Returns where a rank other than 0 has its file, flushed, before rank 0 publishes the checkpoint."""
    return output_dir / "trainer" / run_id / "shards" / f"rank_{rank}" / file_name(rank)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors on the CPU, each in memory of its own: safetensors refuses two names for one."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def write_own(tensors: Mapping[str, Tensor], output_dir: Path, run_id: str, rank: int) -> None:
    """Writes and flushes the state of a rank other than 0, on the CPU, for the next checkpoint. Raises `OSError`."""
    directory = staged(output_dir, run_id, rank).parent
    remove_directory(directory)  # of the checkpoint before
    with publish_directory(directory) as partial:
        save_file(dict(tensors), partial / file_name(rank))


def take_over(output_dir: Path, run_id: str, ranks: int, directory: Path) -> None:
    """Moves what the other ranks have written into the checkpoint's `directory`. Raises `OSError`."""
    for rank in range(1, ranks):
        os.replace(staged(output_dir, run_id, rank), directory / file_name(rank))


def read(
    directory: Path, shards: Mapping[str, Any] | None, own: Mapping[str, tuple[int, int]] | None
) -> dict[str, Tensor]:
    """Reads a checkpoint's state.

    Args:
        directory: of the checkpoint.
        shards: its description; None if one file has everything.
        own: by weight, the rows to read; None: all of them.

    Raises `OSError`, `SafetensorError`, or `ValueError` if the files are not what the description says.
    """
    ranks, rows = (1, {}) if shards is None else (int(shards["ranks"]), dict(shards["rows"]))
    parallel = {} if shards is None else dict(shards.get("parallel", {}))
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"it was written by {ranks} ranks; expected 1 to {MOST_RANKS}")
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(directory / file_name(rank), "pt")) for rank in range(ranks)]
        names = {key: key.partition(".")[2] for key in files[0].keys()}  # noqa: SIM118
        return {key: _read(files, key, rows.get(name), parallel.get(name, 1), own) for key, name in names.items()}


def _read(
    files: list[Any], key: str, total: int | None, parallel: int, own: Mapping[str, tuple[int, int]] | None
) -> Tensor:
    """Reads the wanted rows of a tensor; `total`: of a weight that is divided, None if it is whole in the first file."""
    shape = files[0].get_slice(key).get_shape()
    if not shape:
        scalar: Tensor = files[0].get_tensor(key)
        return scalar
    if total is None:
        files, total = files[:1], shape[0]
    first, last = (own or {}).get(key.partition(".")[2], (0, total))
    if last > total:
        raise ValueError(f"{key} has {total} rows; this model has at least {last}")
    if not (isinstance(parallel, int) and parallel >= 1 and len(files) % parallel == total % parallel == 0):
        raise ValueError(
            f"{key} was divided over groups of {parallel} ranks; expected a divisor of {len(files)} ranks and {total} rows"
        )
    parts: dict[int, Tensor] = {}
    for rank, file in enumerate(files):
        begin, end = slice_of(total, rank, len(files), parallel)
        stored = file.get_slice(key)
        if (found := stored.get_shape()[0]) != end - begin:
            raise ValueError(f"{key} has {found} rows in the file of rank {rank}; expected {end - begin}")
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            parts[start] = stored[start - begin : stop - begin]
    return torch.cat([parts[start] for start in sorted(parts)]) if parts else files[0].get_tensor(key)[:0]
