"""The lock that says who is at a place: one process at a time, and looking at it disturbs nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from counterpoint.transport.files.lock import LockHolder, holder_of, take_lock


def test_a_place_is_held_until_the_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "place.lock"
    assert holder_of(path) is None
    descriptor = take_lock(path, "taken")
    assert holder_of(path) == LockHolder(os.getpid(), socket.gethostname())
    with pytest.raises(OSError, match="taken"):
        take_lock(path, "taken")
    assert holder_of(path) == LockHolder(os.getpid(), socket.gethostname()), "the one who was refused left no trace"
    os.close(descriptor)
    assert holder_of(path) is None
    os.close(take_lock(path, "taken"))


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "place.lock"
    first = take_lock(path, "taken")
    with pytest.raises(OSError, match="taken"):
        take_lock(path, "taken", 0.05)
    threading.Timer(0.05, os.close, [first]).start()
    os.close(take_lock(path, "taken", 60))


def test_whoever_may_read_the_directory_may_ask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        os.close(take_lock(tmp_path / "place.lock", "taken"))
    finally:
        os.umask(before)
    assert (tmp_path / "place.lock").stat().st_mode & 0o777 == 0o644


def test_a_killed_holder_holds_nothing_any_more(tmp_path: Path) -> None:
    path = tmp_path / "place.lock"
    code = (
        f"import time; from pathlib import Path; from counterpoint.transport.files.lock import take_lock; "
        f"take_lock(Path({str(path)!r}), 'taken'); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert holder_of(path) == LockHolder(other.pid, socket.gethostname())
        other.kill()
        other.wait()
    assert holder_of(path) is None


def test_what_the_file_says_is_believed_only_when_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "place.lock"
    descriptor = take_lock(path, "taken")
    for words in ("", "² host", "9" * 400 + " host", "12", "-1 host"):
        path.write_text(words)
        assert holder_of(path) == LockHolder(0, "")
    os.close(descriptor)


@pytest.mark.parametrize("has_successor", [False, True])
def test_a_file_that_was_moved_before_it_was_locked_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_successor: bool
) -> None:
    """Who opened it before, and is then preempted, would hold a place beside the one who asks under its name."""
    path, moved = tmp_path / "job" / "place.lock", tmp_path / "job.1"
    successors: list[int] = []
    open_file = os.open

    def preempted(*arguments: Any) -> int:
        descriptor = open_file(*arguments)
        if not moved.exists():
            path.parent.rename(moved)
            successors.extend([take_lock(path, "taken")] if has_successor else [])
        return descriptor

    monkeypatch.setattr(os, "open", preempted)
    if has_successor:
        with pytest.raises(OSError, match="taken"):
            take_lock(path, "taken")
    else:
        successors.append(take_lock(path, "taken"))
    monkeypatch.undo()
    assert holder_of(path) == LockHolder(os.getpid(), socket.gethostname())
    assert holder_of(moved / path.name) is None
    os.close(successors[0])
