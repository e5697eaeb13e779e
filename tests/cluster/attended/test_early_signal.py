"""Signals that come while the master of an attended job is not there yet."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.attended.attended_job import AttendedJob
from counterpoint.cluster.master import main as master_main
from counterpoint.cluster.master.mastership import Mastership, acquire
from counterpoint.cluster.spec import JobSpec, RoleSpec


@pytest.mark.slow
def test_a_signal_that_comes_before_the_first_term_stops_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled_first(*arguments: Any, give_up: threading.Event, **named: Any) -> Mastership:
        for _ in range(600):  # a loop that just begins to wait does not see the first one
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # type: ignore[arg-type]
            if give_up.wait(0.1):
                break
        return acquire(*arguments, give_up=give_up, **named)

    monkeypatch.setattr(master_main, "acquire", signalled_first)
    task = RoleSpec(name="a", command=(sys.executable, "-c", ""), task=True, notifies=False)
    outcome = asyncio.run(AttendedJob(JobSpec(name="job", roles=(task,)), tmp_path / "control").run())
    assert outcome.code == 143
