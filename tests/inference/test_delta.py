"""Weights as what changed: the bits that come back, the directories, and deltas that do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from counterpoint.inference import delta
from counterpoint.inference.checkpoint import BASE, DELTA, is_delta
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.server import check_configuration

LENGTHS = (1, delta.BLOCK - 1, delta.BLOCK, 2 * delta.BLOCK + 3)


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{index}.w": torch.randn(length, generator=generator).to(dtype) for index, length in enumerate(LENGTHS)
    }


def broadcast(directory: Path, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def broadcast_changes(directory: Path, source: Path, tensors: dict[str, Tensor], most_bytes: int = 1 << 30) -> bool:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    delta.link_base(source, directory)
    base = delta.open_bits(directory / BASE / "model.safetensors")
    new = ((name, delta.bits_of(tensor)) for name, tensor in tensors.items())
    return delta.write_delta(directory / DELTA, base, new, most_bytes)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and bool((delta.bits_of(first) == delta.bits_of(second)).all())


def bits_after(directory: Path) -> dict[str, Tensor]:
    changes = delta.read_delta(directory)
    base = load_file(directory / BASE / "model.safetensors")
    return {
        name: delta.changed_tensor(tensor, changes[name], name) if name in changes else tensor
        for name, tensor in base.items()
    }


@given(
    places=st.lists(st.integers(0, LENGTHS[-1] - 1), unique=True, max_size=8),
    bits=st.lists(st.integers(0, 0xFFFF), min_size=8, max_size=8),
)
@settings(max_examples=40)
def test_any_bits_at_any_place_come_back(places: list[int], bits: list[int]) -> None:
    """Also those of NaNs, infinities and -0.0."""
    base = np.arange(LENGTHS[-1], dtype=np.uint16)
    new = base.copy()
    new[places] = np.array(bits[: len(places)], dtype=np.uint16)
    found, result = delta.changes(base, new), base.copy()
    if found:
        delta.apply(found, result, "w")
    assert (result == new).all()
    assert len(found.get("bits", ())) == (base != new).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_delta_of_a_delta_is_of_the_same_base_and_whole_weights_are_made_of_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    versions = [weights(0, dtype)]
    for step in range(2):
        changed = {name: tensor.clone() for name, tensor in versions[-1].items()}
        changed["layers.3.w"][step::5] *= 1.5
        changed["layers.0.w"][0] = -0.0 if step else float("nan")
        versions.append(changed)
    source = broadcast(tmp_path / "step_0", versions[0])
    for step in (1, 2):
        assert broadcast_changes(tmp_path / f"step_{step}", source, versions[step])
        shutil.rmtree(source)  # a directory needs no other
        source = tmp_path / f"step_{step}"
        delta.check(source)
    after = bits_after(source)
    assert after.keys() == versions[2].keys()
    assert all(same_bits(after[name], tensor) for name, tensor in versions[2].items())
    delta.make_whole(source)
    assert {path.name for path in source.iterdir()} == {"config.json", "model.safetensors"}
    whole = load_file(source / "model.safetensors")
    assert all(same_bits(whole[name], tensor) for name, tensor in versions[2].items())


def test_whole_weights_leave_the_files_that_others_have_linked(tmp_path: Path) -> None:
    before = weights(0)
    source = broadcast(tmp_path / "step_0", before)
    assert broadcast_changes(tmp_path / "step_1", source, weights(1))
    delta.make_whole(tmp_path / "step_1")
    kept = load_file(source / "model.safetensors")
    assert all(same_bits(kept[name], tensor) for name, tensor in before.items())


def test_changes_that_are_too_large_are_not_written(tmp_path: Path) -> None:
    source = broadcast(tmp_path / "step_0", weights(0))
    assert not broadcast_changes(tmp_path / "step_1", source, weights(1), most_bytes=1000)
    assert not is_delta(tmp_path / "step_1")


def test_a_server_does_not_start_from_a_delta(tmp_path: Path) -> None:
    source = broadcast(tmp_path / "step_0", weights(0))
    assert broadcast_changes(tmp_path / "step_1", source, weights(1))
    with pytest.raises(ValueError, match="holds only what changed"):
        check_configuration(InferenceConfig(model=str(tmp_path / "step_1")))


@pytest.mark.parametrize(
    ("name", "part", "value", "complaint"),
    [
        ("layers.3.w", "counts", [1, 1], "do not fit its 131075 elements"),
        ("layers.3.w", "counts", [0, 0, 9], "do not fit"),
        ("layers.3.w", "places", [3, 2, 1], "do not ascend within"),
        ("layers.3.w", "places", [0, 1, 3], "do not ascend within"),
        ("layers.3.w", "bits", [1], "do not fit"),
        ("layers.3.w", "places", torch.arange(3, dtype=torch.int64).to(torch.uint64), "do not fit"),
        ("other", "counts", [1], "is no tensor of"),
    ],
)
def test_a_delta_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, part: str, value: list[int] | Tensor, complaint: str
) -> None:
    source = broadcast(tmp_path / "step_0", weights(0))
    directory = tmp_path / "step_1"
    assert broadcast_changes(directory, source, weights(0))
    arrays = {"counts": [0, 0, 3], "places": [0, 1, 2], "bits": [1, 2, 3]} | {part: value}
    types = {"counts": torch.uint32, "places": torch.uint16, "bits": torch.uint16}
    tensors = {
        f"{name}#{key}": torch.tensor(each, dtype=types[key]) if isinstance(each, list) else each
        for key, each in arrays.items()
    }
    save_file(tensors, directory / DELTA)
    with pytest.raises(ValueError, match=complaint):
        delta.check(directory)
    with pytest.raises(ValueError, match=complaint):
        delta.make_whole(directory)
