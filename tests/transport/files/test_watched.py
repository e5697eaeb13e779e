"""Files that are read again and again, since an operator may change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.transport.files import watched
from counterpoint.transport.files.watched import Watched


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def test_what_has_changed_is_in_use(path: Path) -> None:
    file = Watched("a file", path.read_text)
    assert not file.refresh(now=True)
    path.write_text("two")
    assert file.refresh(now=True)
    assert not file.refresh(now=True)
    assert file.value == "two"


def test_looks_have_a_pause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LOOK_SECONDS", 3600.0)
    file = Watched("a file", path.read_text)
    path.write_text("two")
    assert not file.due
    assert not file.refresh()
    assert file.refresh(now=True)


def test_what_cannot_be_read_stays_as_it_was_and_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = Watched("a file", path.read_text)
    path.unlink()
    for _ in range(3):
        assert not file.refresh(now=True)
    assert file.value == "one"
    assert caplog.text.count("what was read before stays in use") == 1
    path.write_text("one")
    assert not file.refresh(now=True)
    path.write_text("two")
    assert file.refresh(now=True)
