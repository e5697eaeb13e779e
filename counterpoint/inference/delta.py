"""Full weights as what changed: a broadcast with `delta.safetensors` beside the whole weights of an earlier version.

At small learning rates most elements of bfloat16 weights keep their bits from one version to the next. Such a broadcast has

    base/*.safetensors     the weights of an earlier version: hard links of its files, so they cost nothing and stay
    delta.safetensors      of each changed tensor T, in blocks of 65,536 elements: `T#counts` uint32, the changed elements of each
                           block; `T#places` uint16, where they are in it, ascending; `T#bits`, their new bits

and no `*.safetensors` of its own, so that no reader takes the old weights for the new. Bits are compared and replaced, not
numbers, so the result is exact (also of -0.0 and NaN). A directory needs nothing outside itself, whatever its reader holds.
torch is imported only by the functions on tensors, since the orchestrator makes whole weights of the best version without it, and
safetensors only to write: every command that checks a server's configuration imports this file.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from counterpoint.inference.checkpoint import BASE, DELTA, read_header, read_places, weight_files
from counterpoint.transport.files.atomic import remove_directory

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 16
"""Elements of a block: as many as a uint16 can tell apart."""

Bits = npt.NDArray[np.unsignedinteger[Any]]

BIT_TYPES: dict[str, type[np.unsignedinteger[Any]]] = {
    "F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
    "I64": np.uint64, "I32": np.uint32, "I16": np.uint16, "I8": np.uint8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.uint8,
}  # fmt: skip
"""The bits of an element, by safetensors' name of its type."""


def open_bits(path: Path, mode: Literal["r", "r+"] = "r") -> dict[str, Bits]:
    """Returns the flat bits of each tensor of a safetensors file, mapped. Raises `ValueError` unless the file is valid."""
    mapped = np.memmap(path, dtype=np.uint8, mode=mode)
    found: dict[str, Bits] = {}
    for name, (entry, place) in read_places(path).items():
        kind = BIT_TYPES.get(entry.dtype)
        if kind is None or len(place) != np.dtype(kind).itemsize * math.prod(entry.shape):
            raise ValueError(f"{path}: tensor {name!r} is {entry.dtype} {list(entry.shape)} in {len(place)} bytes")
        found[name] = mapped[place.start : place.stop].view(kind)
    return found


def changes(base: Bits, new: Bits) -> dict[str, Bits]:
    """Returns the arrays of one tensor's changes; empty if there are none."""
    counts, places = [], []
    for start in range(0, len(base), BLOCK):
        changed = np.flatnonzero(base[start : start + BLOCK] != new[start : start + BLOCK])
        counts.append(len(changed))
        places.append(changed.astype(np.uint16))
    if not any(counts):
        return {}
    found = [new[index * BLOCK : (index + 1) * BLOCK][each] for index, each in enumerate(places)]
    return {"counts": np.array(counts, np.uint32), "places": np.concatenate(places), "bits": np.concatenate(found)}


def positions(arrays: Mapping[str, Bits], bits: Bits, name: str) -> npt.NDArray[np.int64]:
    """Returns which elements of a tensor with these bits change. Raises `ValueError` unless the changes fit it."""
    counts, places, values = arrays["counts"].astype(np.int64), arrays["places"], arrays["bits"]
    blocks = -(-len(bits) // BLOCK)
    lengths_fit = len(counts) == blocks and counts.sum() == len(places) == len(values)
    if not lengths_fit or places.dtype != np.uint16 or values.dtype != bits.dtype:
        raise ValueError(f"{DELTA}: the changes of {name} do not fit its {len(bits)} elements of {bits.dtype}")
    found = np.repeat(np.arange(blocks, dtype=np.int64) * BLOCK, counts) + places
    if len(found) and (int(found[-1]) >= len(bits) or (np.diff(found) <= 0).any()):
        raise ValueError(f"{DELTA}: the changed elements of {name} do not ascend within its {len(bits)} elements")
    return found


def apply(arrays: Mapping[str, Bits], bits: Bits, name: str) -> None:
    """Replaces, in place, what changed in one tensor. Raises `ValueError`, before anything changes, unless it fits."""
    bits[positions(arrays, bits, name)] = arrays["bits"]


def write_delta(path: Path, base: Mapping[str, Bits], new: Iterable[tuple[str, Bits]], most_bytes: int) -> bool:
    """Writes what changed from `base` to `new`, which have the same tensors.

    Returns False, with nothing written, if that takes more than `most_bytes`. Raises `OSError`.
    """
    from safetensors.numpy import save

    arrays: dict[str, Bits] = {}
    size = 0
    for name, bits in new:
        for part, array in changes(base[name], bits).items():
            arrays[f"{name}#{part}"] = array
            size += array.nbytes
        if size > most_bytes:
            return False
    path.write_bytes(save(arrays, {"format": "counterpoint-delta-1"}))
    return True


def read_delta(directory: Path) -> dict[str, dict[str, Bits]]:
    """Returns the arrays of `delta.safetensors` by tensor. Raises `ValueError` unless they belong to tensors of the base."""
    found: dict[str, dict[str, Bits]] = {}
    for key, array in open_bits(directory / DELTA).items():
        name, _, part = key.rpartition("#")
        found.setdefault(name, {})[part] = array
    known = {name for path in weight_files(directory) for name in read_header(path)}
    for name, arrays in found.items():
        if name not in known or arrays.keys() != {"counts", "places", "bits"}:
            raise ValueError(
                f"{directory / DELTA}: {name!r} is no tensor of {directory / BASE}, or its changes lack a part"
            )
    return found


def check(directory: Path) -> None:
    """Raises `ValueError` unless each change fits the base: what passes can be applied without an error."""
    delta = read_delta(directory)
    for path in weight_files(directory):
        for name, bits in open_bits(path).items():
            if name in delta:
                positions(delta[name], bits, name)


def bits_of(tensor: Tensor) -> Bits:
    """Returns the bits of a contiguous torch tensor on the CPU, in its memory."""
    import torch

    raw: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    kinds: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    return raw.view(kinds[tensor.element_size()])


def changed_tensor(tensor: Tensor, arrays: Mapping[str, Bits], name: str) -> Tensor:
    """Returns a changed copy of a torch tensor on the CPU. Raises `ValueError` unless the changes fit it."""
    copy = tensor.clone()
    apply(arrays, bits_of(copy), name)
    return copy


def make_whole(directory: Path) -> None:
    """Puts whole weights in place of base and delta, in a directory that nobody reads yet. Raises `ValueError`, `OSError`."""
    write_whole(directory, directory)
    (directory / DELTA).unlink()
    remove_directory(directory / BASE)


def write_whole(directory: Path, target: Path) -> None:
    """Writes the whole weights of a delta into another directory. Raises `ValueError`, `OSError`."""
    delta = read_delta(directory)
    for path in weight_files(directory):
        whole = target / path.name
        shutil.copy(path, whole)
        for name, bits in open_bits(whole, "r+").items():
            if name in delta:
                apply(delta[name], bits, name)


def link_base(source: Path, directory: Path) -> None:
    """Links the whole weights of `source`, or its base, as the base of `directory`.

    Raises `OSError`, or `ValueError` if there are none.
    """
    (directory / BASE).mkdir()
    for path in weight_files(source):
        os.link(path, directory / BASE / path.name)
