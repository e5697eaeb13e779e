"""A worker's output is put aside when it is full, while the worker goes on writing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest

from counterpoint.cluster import log_rotation
from counterpoint.cluster.log_rotation import rotate_if_full


@pytest.fixture(autouse=True)
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rotation, "LOG_BYTES", 100)


def test_a_full_log_is_put_aside_under_its_writer(tmp_path: Path) -> None:
    log_file = tmp_path / "trainer.log"
    assert not rotate_if_full(log_file)
    writer = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for generation in range(7):
            os.write(writer, f"{generation}\n".encode())
            assert not rotate_if_full(log_file)
            os.write(writer, b"x" * 100)
            assert rotate_if_full(log_file)
            assert log_file.stat().st_size == 0
        os.write(writer, b"after\n")
    finally:
        os.close(writer)
    assert log_file.read_text() == "after\n"
    kept = {file.name: file.read_text()[0] for file in tmp_path.iterdir()}
    assert kept == {"trainer.log": "a", **{f"trainer.log.{n}": str(7 - n) for n in range(1, 5)}}


def test_a_disk_without_room_costs_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_file, older = tmp_path / "trainer.log", tmp_path / "trainer.log.1"
    log_file.write_bytes(b"x" * 200)
    older.write_bytes(b"older")

    def full(source: BinaryIO, target: BinaryIO) -> None:
        target.write(source.read(150))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as faulty:
        faulty.setattr(shutil, "copyfileobj", full)
        for _ in range(6):  # as the supervisor does, which looks again and again
            with pytest.raises(OSError, match="No space left"):
                rotate_if_full(log_file)
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == {"trainer.log": 200, "trainer.log.1": 5}
    assert rotate_if_full(log_file)
    assert (tmp_path / "trainer.log.2").read_bytes() == b"older"


def test_nothing_but_a_regular_file_is_emptied(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 200)
    (tmp_path / "link.log").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe.log")
    with pytest.raises(OSError, match="symbolic links"):
        rotate_if_full(tmp_path / "link.log")
    assert not rotate_if_full(tmp_path / "pipe.log")
    assert precious.stat().st_size == 200
