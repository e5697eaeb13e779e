"""Signals that come while the master of an attended job is not there yet."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.attended.attended_job import AttendedJob
from counterpoint.cluster.master import main as master_main
from counterpoint.cluster.spec import JobSpec, RoleSpec


@pytest.mark.slow
def test_a_signal_that_comes_before_the_first_term_stops_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_state = master_main.MasterProcess._read_state

    def signalled_first(process: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        while process.signalled is None:  # this is a thread: the loop handles it
            pass
        return read_state(process)

    monkeypatch.setattr(master_main.MasterProcess, "_read_state", signalled_first)
    task = RoleSpec(name="a", command=(sys.executable, "-c", ""), task=True, notifies=False)
    outcome = asyncio.run(AttendedJob(JobSpec(name="job", roles=(task,)), tmp_path / "control").run())
    assert outcome.code == 143
