"""Who may write to a job's directory may write to those in it that roles share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from counterpoint.transport.files.shared_directory import make_shared


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o2775, 0o700, 0o770])
def test_it_has_the_rights_of_the_one_above_also_if_it_was_there(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    shared = tmp_path / "prometheus"
    for _ in range(2):
        make_shared(shared)
        assert stat.S_IMODE(shared.stat().st_mode) == mode
        shared.chmod(0o700)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "job").mkdir(mode=0o755)
    (tmp_path / "job" / "prometheus").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="prometheus"):
        make_shared(tmp_path / "job" / "prometheus")
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes directories of other users")
def test_what_root_makes_another_user_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir(mode=0o755)
    os.chown(tmp_path / "job", 10001, 10002)
    make_shared(tmp_path / "job" / "prometheus")
    made = (tmp_path / "job" / "prometheus").stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (10001, 10002, 0o755)
