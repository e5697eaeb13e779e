"""Reads the tensors of a safetensors checkpoint from the headers alone, and compares them with the served model's.

The plugin compares a broadcast with the checkpoint that the engine started from before it touches the model: vLLM's reload
takes the model apart first, so a tensor that is missing or misshapen is noticed only when the engine is already lost.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, then JSON).
"""

from __future__ import annotations

import errno
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import orjson

from counterpoint.transport.files.atomic import STABLE
from counterpoint.transport.files.shared_memory import SHARED_MEMORY

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_BYTES_A_READ = 1 << 20

FLOATING = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of the element types that may stand in for one another: the engine casts what it loads."""

DELTA, BASE = "delta.safetensors", "base"
"""A broadcast of what changed, and the directory in it with the weights that it changes."""

INDEX = "model.safetensors.index.json"
"""The file that says in which file each tensor is, where there are several."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"

ADAPTER_FILES = ("adapter_config.json", ADAPTER_WEIGHTS)
"""What a published adapter has, in PEFT's format."""

PEFT_PREFIX = "base_model.model."

_ADAPTER_TENSOR = re.compile(rf"{re.escape(PEFT_PREFIX)}(.+)\.lora_([AB])\.weight")


def is_delta(directory: Path) -> bool:
    """Whether the directory has what changed, and the base of it, instead of whole weights."""
    return (directory / DELTA).exists()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its header describes it."""

    shape: tuple[int, ...]
    dtype: str


class NotSeen(ValueError):
    """A published directory that this machine, or container, does not have, or whose files this user may not read."""


def require_published(directory: Path) -> None:
    """Raises `NotSeen`, with what to do, or `ValueError` if `directory` is there and is no published one."""
    try:
        (directory / STABLE).stat()
        for path in directory.iterdir():
            if path.exists() and not os.access(path, os.R_OK):
                # What a link leads to may be gone, which is another fault.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except PermissionError as error:
        raise NotSeen(
            f"the server, user {os.geteuid()}, may not read {error.filename}: the trainer's user and umask decide who may; run "
            "both as one user, or give them a group and the trainer the umask 027"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        if not directory.parent.is_dir():
            missing = next(path for path in reversed([directory, *directory.parents]) if not path.is_dir())
            raise NotSeen(
                f"the server does not see {directory}: it has no {missing}; give it the job's directory under the same path, or "
                "set send_weights in the run's section [inference]"
            ) from None
        raise ValueError(f"{directory} is not a published directory: it has no {STABLE} marker") from None


def weight_files(directory: Path) -> list[Path]:
    """Returns the model's `*.safetensors` in `directory`, sorted; of a delta (`delta.py`), those of its base.

    Where transformers' index names files, these alone, as for vLLM: some checkpoints have their weights once more, under other
    names. Raises `ValueError` when there are none, one that is named is not there, or a link leads nowhere.
    """
    if (directory / DELTA).exists():
        directory /= BASE
    files = sorted(path for path in directory.glob("*.safetensors") if path.name != "adapter_model.safetensors")
    if not files:
        raise ValueError(f"{directory}: no *.safetensors file; a checkpoint in Hugging Face format is expected")
    if (index := directory / INDEX).is_file():
        named = _named_files(index)
        if missing := sorted(named - {path.name for path in files}):
            raise ValueError(f"{index} names {missing[0]}, which is not there; expected every file of the checkpoint")
        files = [path for path in files if path.name in named]
    for path in files:
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"{path} leads to {os.readlink(path)}, which is not here: the server has to see that file, too"
            )
    return files


def _named_files(index: Path) -> set[str]:
    try:
        return {str(name) for name in orjson.loads(index.read_bytes())["weight_map"].values()}
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} is no index of a checkpoint ({type(error).__name__}: {error}); expected an object with a weight_map"
        ) from error


def read_through(directory: Path) -> None:
    """Reads the weights of a checkpoint once, so that a later reading comes from memory. Raises `OSError`.

    What is in shared memory is not read: it is in no other place.
    """
    buffer = memoryview(bytearray(_BYTES_A_READ))
    delta = directory / DELTA
    memory = SHARED_MEMORY.stat().st_dev if SHARED_MEMORY.is_dir() else None
    for path in [*weight_files(directory), *([delta] if delta.exists() else [])]:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_dev == memory:
                continue
            while file.readinto(buffer):
                pass


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of one file.

    Raises `ValueError`, naming file and tensor, unless every byte that the header describes is there.
    """
    return {name: entry for name, (entry, _) in read_places(path).items()}


def read_places(path: Path) -> dict[str, tuple[TensorEntry, range]]:
    """Returns the tensors of one file, each with the bytes of the file that it takes. Raises `ValueError` as `read_header`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: {size} bytes cannot hold the header of {length} bytes that it announces: truncated?"
            )
        try:
            header = orjson.loads(file.read(length))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path}: its header is not JSON ({error}); not a safetensors file?") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header is not a JSON object; not a safetensors file?")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size - 8 - length) for name, fields in header.items()}


def _entry(path: Path, name: str, fields: object, begin: int, data_bytes: int) -> tuple[TensorEntry, range]:
    try:
        shape = tuple(int(extent) for extent in fields["shape"])  # type: ignore[index]
        start, end = map(int, fields["data_offsets"])  # type: ignore[index]
        dtype = str(fields["dtype"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the header entry of tensor {name!r} is malformed: {error!r}") from error
    if not 0 <= start <= end <= data_bytes:
        raise ValueError(f"{path}: tensor {name!r} ends at byte {end} of {data_bytes} bytes of data: truncated?")
    if dtype in FLOATING and end - start != FLOATING[dtype] * math.prod(shape):
        raise ValueError(f"{path}: tensor {name!r} is {dtype} {list(shape)} but takes {end - start} bytes")
    return TensorEntry(shape, dtype), range(begin + start, begin + end)


def read_manifest(directory: Path) -> dict[str, TensorEntry]:
    """Returns all tensors of a checkpoint.

    Raises `ValueError` for an invalid one, `OSError` if a file cannot be opened.
    """
    manifest: dict[str, TensorEntry] = {}
    for path in weight_files(directory):
        manifest.update(read_header(path))
    return manifest


def require_same_model(expected: dict[str, TensorEntry], update: dict[str, TensorEntry], tied_embeddings: bool) -> None:
    """Raises `ValueError` unless `update` has the names, shapes and kinds of element of `expected`.

    With tied embeddings `lm_head.weight` may be present or not: it is the same tensor as the embedding.
    """
    optional = {"lm_head.weight"} if tied_embeddings else set()
    problems = [f"{name} is missing" for name in sorted(expected.keys() - update.keys() - optional)]
    problems += [f"{name} is unknown to the model" for name in sorted(update.keys() - expected.keys() - optional)]
    for name in sorted(expected.keys() & update.keys()):
        if expected[name].shape != update[name].shape:
            problems.append(
                f"{name} has the shape {list(update[name].shape)}, {list(expected[name].shape)} is expected"
            )
        elif (
            update[name].dtype != expected[name].dtype
            and not {update[name].dtype, expected[name].dtype} <= FLOATING.keys()
        ):
            problems.append(f"{name} holds {update[name].dtype}, {expected[name].dtype} is expected")
    _raise(problems, "these are not weights of the model being served")


def require_fitting_adapter(base: dict[str, TensorEntry], adapter: dict[str, TensorEntry], max_rank: int) -> None:
    """Raises `ValueError` unless the tensors of a PEFT adapter fit the linear layers of `base` that they name.

    They are A `[rank, in]` and B `[out, rank]`, with ranks up to `max_rank`. The engine would drop its former adapter before
    it noticed. Layers that `base` does not hold as one matrix (fused experts) are left to the engine.
    """
    problems = [] if adapter else ["it holds no tensor"]
    for name, entry in sorted(adapter.items()):
        match = _ADAPTER_TENSOR.fullmatch(name)
        if match is None or entry.dtype not in FLOATING:
            problems.append(f"{name}, {entry.dtype}, is not the lora_A or lora_B of a layer")
            continue
        layer, factor = match.groups()
        weight = base.get(f"{layer}.weight")
        if weight is None or len(weight.shape) != 2:
            continue
        down = adapter.get(f"{PEFT_PREFIX}{layer}.lora_A.weight")
        rank = down.shape[0] if down is not None and down.shape else 0
        if not 1 <= rank <= max_rank:
            problems.append(f"{name} belongs to rank {rank}; the server takes 1 to {max_rank}")
        expected = (rank, weight.shape[1]) if factor == "A" else (weight.shape[0], rank)
        if entry.shape != expected:
            problems.append(f"{name} has the shape {list(entry.shape)}, {list(expected)} is expected")
    _raise(problems, "this adapter does not fit the model being served")


def _raise(problems: list[str], summary: str) -> None:
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{summary}: {'; '.join(problems[:3])}{more}")
