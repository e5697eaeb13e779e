"""Finds and ends the keepers that a killed command has left, and all below them, without the wait for their lease."""

from __future__ import annotations

import os
from pathlib import Path

from counterpoint.cluster.attended.left_running import has_workers
from counterpoint.cluster.backends.keeper_link import SUFFIX, WORKERS, mark_of
from counterpoint.cluster.remains import kill_marked, marked
from tests.support.polling import wait_until


def keepers(control: Path) -> list[int]:
    """Returns the processes of the keepers that live in a job's control directory."""
    return [pid for path in (control / WORKERS).glob(f"*{SUFFIX}") for pid in _keeper_at(path)]


def keeper_of(control: Path, worker: str) -> int:
    """Returns the process of a worker's keeper."""
    (found,) = [pid for path in (control / WORKERS).glob(f"{worker}.*{SUFFIX}") for pid in _keeper_at(path)]
    return found


def _keeper_at(path: Path) -> list[int]:
    """The keeper leads a session, and its command names its socket."""
    found = marked(mark_of(path))
    return [pid for pid in found if os.fsencode(path.resolve()) in _command(pid) and os.getsid(pid) == pid]


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []


def end_keepers(control: Path) -> None:
    """Kills the keepers of a job with that control directory; returns once nothing of them lives."""
    for path in (control / WORKERS).glob(f"*{SUFFIX}"):
        assert not kill_marked(mark_of(path))
    wait_until(lambda: not has_workers(control), "the keepers to be gone")
