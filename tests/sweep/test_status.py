"""`sweep_status`: what a table needs, from every kind of storage."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from counterpoint.sweep.claim import SweepTarget, claim_and_run
from counterpoint.sweep.lease import Terms, claimed
from counterpoint.sweep.lock import Claim, step_lock
from counterpoint.sweep.open_store import open_store
from counterpoint.sweep.status import TargetStatus, sweep_status


@pytest.mark.slow
def test_every_target_is_there_with_all_that_a_table_needs(root: str) -> None:
    before = time.time()

    def body(target: SweepTarget[None], claim: Claim) -> None:
        claim.stop.wait(0.01)

    claim_and_run(root, [SweepTarget("good", None)], body)
    with pytest.raises(RuntimeError), step_lock(f"{root}/bad"):
        raise RuntimeError("why not")
    with step_lock(f"{root}/busy"):
        bad, busy, good, never = sweep_status(root, ["never", "good"])
    after = time.time()
    assert [(found.target_id, found.state) for found in (bad, busy, good, never)] == [
        ("bad", "FAILED"),
        ("busy", "RUNNING"),
        ("good", "SUCCESS"),
        ("never", "PENDING"),
    ]
    assert never == TargetStatus("never", "PENDING")
    assert (bad.error, good.error) == ("RuntimeError: why not", None)
    for found in (bad, busy, good):
        assert (found.host, found.pid, found.token, found.attempts) == (socket.gethostname(), os.getpid(), 1, 1)
        assert found.owner is not None
        assert found.started_at is not None
        assert found.heartbeat_at is not None
        assert before <= found.started_at <= found.heartbeat_at <= after
        assert found.duration is not None
    assert good.duration is not None
    assert good.duration >= 0.01
    assert (busy.finished_at, busy.duration) == (None, 0.0)
    assert len({found.owner for found in (bad, busy, good)}) == 3


def test_a_sweep_that_has_not_begun_has_nothing_to_show_and_is_not_begun_by_looking(tmp_path: Path) -> None:
    assert sweep_status(tmp_path / "none") == []
    assert sweep_status(tmp_path / "none", ["a"]) == [TargetStatus("a", "PENDING")]
    assert not (tmp_path / "none").exists()


def test_files_that_are_no_targets_are_passed_over_and_damaged_records_shown(tmp_path: Path) -> None:
    record = claimed(None, "good", "owner", "host", 1, Terms(), 5.0)
    open_store(tmp_path).write("good", record.to_bytes(), None)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".hidden.json").write_text("{}")
    (tmp_path / "damaged.json").write_bytes(record.to_bytes()[:30])
    os.mkfifo(tmp_path / "fifo.json")
    damaged, fifo, good = sweep_status(tmp_path)
    assert (damaged.target_id, damaged.state, good.state) == ("damaged", "UNREADABLE", "RUNNING")
    assert (fifo.target_id, fifo.state) == ("fifo", "UNREADABLE"), "nobody waits for who would write into it"
    assert damaged.error is not None
    assert f"{tmp_path}: damaged is not a sweep's record" in damaged.error
