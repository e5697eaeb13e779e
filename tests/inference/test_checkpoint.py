"""Checkpoints by their headers: what is the same model, and what must not reach the engine."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file

from counterpoint.inference import checkpoint
from counterpoint.inference.checkpoint import (
    DELTA,
    NotSeen,
    TensorEntry,
    read_header,
    read_manifest,
    read_through,
    require_fitting_adapter,
    require_published,
    require_same_model,
    weight_files,
)

MODEL = {"a.weight": TensorEntry((2, 3), "F32"), "lm_head.weight": TensorEntry((4, 2), "F32")}


def test_the_manifest_joins_the_files_and_leaves_an_adapter_out(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), dtype=np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(4, dtype=np.int64)}, tmp_path / "model-2.safetensors")
    save_file({"c": np.zeros(4, dtype=np.float16)}, tmp_path / "adapter_model.safetensors")
    assert read_manifest(tmp_path) == {"a": TensorEntry((2, 3), "F32"), "b": TensorEntry((4,), "I64")}


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        read_manifest(tmp_path)


def test_links_that_lead_nowhere_are_refused_with_the_reason(tmp_path: Path) -> None:
    """A broadcast on the file system of another machine has such links, whole or as a delta."""
    for name in ("model.safetensors", DELTA):
        directory = tmp_path / name
        (directory / checkpoint.BASE).mkdir(parents=True)
        save_file({"a": np.zeros(4, dtype=np.int64)}, directory / checkpoint.BASE / "model.safetensors")
        (directory / name).symlink_to("/dev/shm/counterpoint-weights-gone/model.safetensors")
        for read in (read_manifest, read_through):
            with pytest.raises(ValueError, match=rf"{name} leads to .*-gone.*which is not here"):
                read(directory)


def test_a_link_that_leads_nowhere_is_not_called_unreadable(tmp_path: Path) -> None:
    (tmp_path / "STABLE").touch()
    (tmp_path / "model.safetensors").symlink_to("/dev/shm/counterpoint-weights-gone/model.safetensors")
    require_published(tmp_path)


def test_a_directory_that_is_not_there_is_told_apart_from_one_that_is_not_published(tmp_path: Path) -> None:
    directory = tmp_path / "run_a" / "broadcast" / "step_3"
    with pytest.raises(NotSeen, match=rf"does not see {directory}: it has no {tmp_path}/run_a; .*send_weights"):
        require_published(directory)
    directory.parent.mkdir(parents=True)
    for exists in (False, True):
        if exists:
            directory.mkdir()
        with pytest.raises(ValueError, match="no STABLE marker") as caught:
            require_published(directory)
        assert not isinstance(caught.value, NotSeen)
    (directory / "STABLE").touch()
    require_published(directory)


@pytest.mark.parametrize("unreadable", ["broadcast", "broadcast/step_3", "broadcast/step_3/model.safetensors"])
def test_a_server_of_another_user_is_told_that_it_may_not_read(tmp_path: Path, unreadable: str) -> None:
    directory = tmp_path / "broadcast" / "step_3"
    directory.mkdir(parents=True)
    for name in ("STABLE", "model.safetensors"):
        (directory / name).touch()
    for path in (tmp_path, directory.parent, directory, *directory.iterdir()):
        path.chmod(0o755)
    (tmp_path / unreadable).chmod(0)
    found = os.memfd_create("found")
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            os.chdir(tmp_path)  # what is above is the user's alone, who runs the tests
            if os.geteuid() == 0:
                os.setuid(65534)
            try:
                require_published(Path("broadcast/step_3"))
            except NotSeen as error:
                os.write(found, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / unreadable).chmod(0o700)
    named = {"broadcast": "broadcast/step_3/STABLE", "broadcast/step_3": "broadcast/step_3/STABLE"}
    assert f"may not read {named.get(unreadable, unreadable)}: " in os.pread(found, 1000, 0).decode()
    os.close(found)


def test_what_is_in_memory_is_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails is found before the pause; memory would be read a second time for nothing."""
    save_file({"a": np.zeros(100_000, dtype=np.int64)}, tmp_path / "model.safetensors")
    before = read_bytes()
    read_through(tmp_path)
    assert read_bytes() - before >= 800_000
    monkeypatch.setattr(checkpoint, "SHARED_MEMORY", tmp_path)
    before = read_bytes()
    read_through(tmp_path)
    assert read_bytes() - before < 800_000


def read_bytes() -> int:
    """What this process has read of files so far."""
    return int(Path("/proc/self/io").read_bytes().split()[1])


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((2, 3), dtype=np.float32)}, path)
    whole = path.read_bytes()
    for length in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        orjson.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}),
        orjson.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        orjson.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_header(path)


def test_another_precision_is_the_same_model() -> None:
    require_same_model(MODEL, MODEL | {"a.weight": TensorEntry((2, 3), "BF16")}, tied_embeddings=False)


def test_a_tied_head_may_be_left_out_and_an_untied_one_may_not() -> None:
    without = {"a.weight": MODEL["a.weight"]}
    require_same_model(MODEL, without, tied_embeddings=True)
    require_same_model(without, MODEL, tied_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        require_same_model(MODEL, without, tied_embeddings=False)


@pytest.mark.parametrize(
    ("update", "complaint"),
    [
        ({"a.weight": TensorEntry((2, 4), "F32")}, r"a\.weight has the shape \[2, 4\], \[2, 3\] is expected"),
        ({"a.weight": TensorEntry((2, 3), "I64")}, r"a\.weight holds I64"),
        ({"b.weight": TensorEntry((1,), "F32")}, r"b\.weight is unknown"),
    ],
)
def test_another_model_is_refused_by_tensor(update: dict[str, TensorEntry], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        require_same_model(MODEL, MODEL | update, tied_embeddings=False)


BASE = {
    "model.layers.0.mlp.up_proj.weight": TensorEntry((96, 32), "BF16"),
    "experts.weight": TensorEntry((4, 8, 8), "BF16"),
}


def adapter(
    layer: str = "model.layers.0.mlp.up_proj", rank: int = 4, width: int = 32, height: int = 96
) -> dict[str, TensorEntry]:
    return {
        f"base_model.model.{layer}.lora_A.weight": TensorEntry((rank, width), "F32"),
        f"base_model.model.{layer}.lora_B.weight": TensorEntry((height, rank), "F32"),
    }


def test_an_adapter_fits_the_layers_it_names() -> None:
    require_fitting_adapter(BASE, adapter(), max_rank=4)
    require_fitting_adapter(BASE, adapter() | adapter("experts", width=1), max_rank=4)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "it holds no tensor"),
        (adapter(rank=8), "lora_A.weight belongs to rank 8; the server takes 1 to 4"),
        (adapter(rank=0), "lora_A.weight belongs to rank 0"),
        (adapter(width=31), r"lora_A.weight has the shape \[4, 31\], \[4, 32\] is expected"),
        (adapter(height=95), r"lora_B.weight has the shape \[95, 4\], \[96, 4\] is expected"),
        (dict([adapter().popitem()]), "lora_B.weight belongs to rank 0"),
        ({"model.layers.0.mlp.up_proj.weight": TensorEntry((96, 32), "F32")}, "is not the lora_A or lora_B of a layer"),
        ({name: TensorEntry(entry.shape, "I8") for name, entry in adapter().items()}, "I8, is not the lora_A"),
        ({name: TensorEntry((), "F32") for name in adapter()}, "belongs to rank 0"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tensors: dict[str, TensorEntry], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        require_fitting_adapter(BASE, tensors, max_rank=4)


def test_where_an_index_names_the_files_others_are_not_read(tmp_path: Path) -> None:
    """vLLM and transformers read these alone. Some checkpoints have their weights once more, under other names."""
    for name in ("consolidated", "model-00001-of-00001"):
        save_file({f"{name}.weight": np.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(orjson.dumps({"weight_map": {"model-00001-of-00001.weight": "model-00001-of-00001.safetensors"}}))
    assert set(read_manifest(tmp_path)) == {"model-00001-of-00001.weight"}
    index.write_bytes(orjson.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"names b\.safetensors"):
        weight_files(tmp_path)
    index.write_bytes(b"{")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        weight_files(tmp_path)
