"""What is not mounted yet is told from what is not there, by tables of mounts and by empty mount points."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from counterpoint.job.resolve_model import check_model, resolve_model
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.mounts import file_system, unmounted
from counterpoint.transport.process.permanent_errors import PASSING, exit_code_of, is_permanent


def test_a_mount_point_is_empty_or_named_by_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    full, spaced = tmp_path / "full", tmp_path / "a b"
    full.mkdir()
    (full / "file").touch()
    fstab = tmp_path / "fstab"
    monkeypatch.setattr("counterpoint.transport.files.mounts.FSTAB", fstab)
    for missing, place in (
        ("gone", None),
        ("gone/far", None),
        ("full/gone", None),
        ("empty/a/b", "empty"),
        ("empty", "empty"),
    ):
        assert unmounted(tmp_path / missing) == (place and tmp_path / place)
    fstab.write_text(
        f"# a b c\nserver:/a {full} nfs defaults 0 0\nserver:/b {str(spaced).replace(' ', chr(92) + '040')} nfs4 x\n/dev/a / ext4"
    )
    assert unmounted(full / "gone") == full
    assert unmounted(spaced / "gone") == spaced
    assert unmounted(tmp_path / "gone") is None
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    assert unmounted(full / "gone") is None, "it is mounted, and lacks the file"
    mounts = tmp_path / "mounts"
    monkeypatch.setattr("counterpoint.transport.files.mounts.MOUNTS", mounts)
    mounts.write_text(f"auto.net {full} autofs rw 0 0\n")
    assert unmounted(full / "gone") == full


def test_a_model_that_is_not_mounted_yet_is_no_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    (tmp_path / "file").touch()
    for find in (check_model, resolve_model):
        for name in ("mount", "mount/model"):
            with pytest.raises(Obstructed, match=f"mounted at {tmp_path / 'mount'} yet"):
                find(str(tmp_path / name))
    with pytest.raises(UserError) as refused:
        check_model(str(tmp_path / "modle"))
    assert refused.value.code == 2
    (tmp_path / "mount" / "model").mkdir()
    (tmp_path / "mount" / "model" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "mount" / "model")) == tmp_path / "mount" / "model"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS])
def test_an_error_below_a_mount_point_passes(tmp_path: Path, number: int) -> None:
    """Nobody but root may write to a mount point before something is mounted there."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "file").touch()
    early = OSError(number, os.strerror(number), str(tmp_path / "mount" / "jobs" / "demo"))
    wrong = OSError(number, os.strerror(number), str(tmp_path / "jobs" / "demo"))
    assert exit_code_of(early) == PASSING
    assert not is_permanent(early)
    assert is_permanent(wrong) == (number != errno.ENOENT)
    refusal = ValueError("cannot be read")
    refusal.__cause__ = early
    assert exit_code_of(refusal) == PASSING
    refusal.__cause__ = wrong
    assert exit_code_of(refusal) == 2


def test_the_innermost_mount_says_the_kind_of_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts, spaced = tmp_path / "mounts", tmp_path / "a b"
    monkeypatch.setattr("counterpoint.transport.files.mounts.MOUNTS", mounts)
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\nserver:/a {str(spaced).replace(' ', chr(92) + '040')} nfs rw 0 0\ntmpfs {spaced}/c tmpfs rw 0 0\n"
        f"server:/a {str(spaced).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n"
    )
    assert file_system(tmp_path / "file") == "ext4"
    assert file_system(spaced / "deep" / "file") == "nfs4", "what was mounted last hides the others"
    mounts.unlink()
    assert file_system(spaced) == ""
