"""Files that are read again once they have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transport.files import watched
from transport.files.watched import Watched, read_all_again


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def test_a_file_is_read_again_when_it_has_changed_and_not_otherwise(path: Path) -> None:
    reads: list[str] = []

    def read() -> str:
        reads.append(path.read_text())
        return reads[-1]

    file = Watched([path], read)
    assert not file.refresh(now=True)
    path.write_text("two")
    assert file.refresh(now=True)
    assert not file.refresh(now=True)
    assert (file.value, reads) == ("two", ["one", "two"])


def test_looks_have_a_pause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LOOK_SECONDS", 3600.0)
    file = Watched([path], path.read_text)
    path.write_text("two")
    assert not file.refresh()
    assert file.refresh(now=True)


def test_what_cannot_be_read_stays_as_it_was_and_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = Watched([path], path.read_text)
    path.unlink()
    for _ in range(3):
        assert not file.refresh(now=True)
    assert file.value == "one"
    assert caplog.text.count("what was read before stays in use") == 1
    path.write_text("one")
    assert not file.refresh(now=True)
    path.write_text("two")
    assert file.refresh(now=True)


def test_a_request_reads_what_looks_the_same(path: Path) -> None:
    file = Watched([path], path.read_text)
    about = path.stat()
    path.write_text("two")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert not file.refresh(now=True)
    read_all_again()
    assert file.refresh(now=True)
    assert file.value == "two"


def test_files_of_a_directory_count(tmp_path: Path) -> None:
    directory = Watched([tmp_path], lambda: sorted(each.name for each in tmp_path.iterdir()))
    (tmp_path / "new").touch()
    assert directory.refresh(now=True)
    assert directory.value == ["new"]
