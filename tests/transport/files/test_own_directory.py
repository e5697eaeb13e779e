"""Directories that go with their process: what is removed at the next start, and what must stay."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from counterpoint.transport.files.own_directory import OwnDirectory, remove_left
from counterpoint.transport.process.launch import TemporaryDirectory

PREFIX = "ours-"


def test_a_directory_goes_with_its_owner(tmp_path: Path) -> None:
    own = OwnDirectory(tmp_path, PREFIX)
    (own.path / "sub").mkdir()
    (own.path / "sub" / "file").touch()
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    other = OwnDirectory(tmp_path, PREFIX)
    assert (own.path / "sub" / "file").exists(), "of a live process"
    own.remove()
    own.remove()
    assert list(tmp_path.iterdir()) == [other.path]
    del other
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("guardian", [False, True])
def test_one_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(
    guardian: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # a guardian makes none where the path is long
    opened, removed = os.open, list[str]()

    def open_late(path: os.PathLike[str] | str, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if not removed:
            removed.append(os.fspath(path))
            Path(path).rmdir()
        return opened(path, flags, *more, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_late)
    own: OwnDirectory | TemporaryDirectory = (
        TemporaryDirectory({"TMPDIR": str(place)}) if guardian else OwnDirectory(place, PREFIX)
    )
    assert len(removed) == 1
    assert list(place.iterdir()) == [Path(own.path)]
    assert removed != [str(own.path)]
    own.remove()
    place.rmdir()


def test_what_is_no_abandoned_directory_of_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links, files, other names, and what another user has put there."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "file").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").touch()
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "link").symlink_to(target)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12345)
        remove_left(tmp_path, PREFIX)
    assert left.is_dir(), "another user's"
    remove_left(tmp_path, PREFIX)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", f"{PREFIX}file", f"{PREFIX}link"]
    assert (target / "file").exists()
