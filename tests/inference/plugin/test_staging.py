"""Whole weights of what changed, made in memory before the pause."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from counterpoint.inference import delta
from counterpoint.inference.checkpoint import BASE, DELTA, is_delta
from counterpoint.inference.plugin import staging
from counterpoint.inference.plugin.staging import stage


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setattr(staging, "SHARED_MEMORY", root)
    return root


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """What changed in one of two tensors, which are in two files."""
    source, directory = tmp_path / "step_0", tmp_path / "step_1"
    source.mkdir()
    directory.mkdir()
    save_file({"a": np.zeros(100, np.float32)}, source / "model-1.safetensors")
    save_file({"b": np.ones(100, np.float32)}, source / "model-2.safetensors")
    delta.link_base(source, directory)
    base = {name: bits for path in (directory / BASE).iterdir() for name, bits in delta.open_bits(path).items()}
    new = np.arange(100, dtype=np.float32).view(np.uint32)
    assert delta.write_delta(directory / DELTA, base, [("a", base["a"]), ("b", new)], 1 << 20)
    return directory


def test_whole_weights_are_made_and_go_when_they_are_loaded(memory: Path, changed: Path) -> None:
    staged = stage(changed)
    assert staged is not None
    assert staged.path.parent == memory
    assert (load_file(staged.path / "model-1.safetensors")["a"] == 0).all()
    assert (load_file(staged.path / "model-2.safetensors")["b"] == np.arange(100)).all()
    assert is_delta(changed), "others read it, too"
    staged.remove()
    assert list(memory.iterdir()) == []


def test_without_room_nothing_is_made(memory: Path, changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is known before, or others take it."""

    class Full:
        f_bavail, f_frsize = 0, 4096

    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: Full)
        assert stage(changed) is None

    def fill(directory: Path, target: Path) -> None:
        (target / "part").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(delta, "write_whole", fill)
        assert stage(changed) is None
    assert list(memory.iterdir()) == []


def test_what_does_not_fit_its_base_is_refused_and_leaves_nothing(memory: Path, changed: Path) -> None:
    content = (changed / DELTA).read_bytes()
    (changed / DELTA).write_bytes(content[:-8])
    with pytest.raises(ValueError, match="truncated"):
        stage(changed)
    assert list(memory.iterdir()) == []
