"""Sinks that hang or raise: they are tried again, are named, and harm no other."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.job.tracking.rows import Sink, SinkSpec
from counterpoint.job.tracking.tracking import SinkPatience, Tracking
from tests.job.tracking.broken_sinks import DyingSink, HangingSink, NotingSink, RaisingSink
from tests.job.tracking.jobs import Job

LIMITS = SinkPatience(first_pause_seconds=0.01, stall_seconds=2.0, follow_seconds=0.02)

HANGS = """
import sys
from counterpoint.cli import track
from counterpoint.job.tracking import sinks_of
from counterpoint.job.tracking.event_files import library
from counterpoint.job.tracking.tracking import SinkPatience, Tracking
from tests.job.tracking.broken_sinks import HangingSink

library()  # else its import counts
sinks_of.SINKS["trackio"] = (HangingSink, "trackio")
track.Tracking = lambda specs: Tracking(specs, SinkPatience(stall_seconds=5.0))
sys.exit(track.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_broken_sink_is_named_and_the_others_get_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    job.steps(*range(1, 7))
    sinks: dict[str, type[Sink]] = {"hangs": HangingSink, "raises": RaisingSink, "dies": DyingSink, "notes": NotingSink}
    tracking = Tracking([SinkSpec(name, sink, tmp_path, "job", {}) for name, sink in sinks.items()], LIMITS)
    troubles: list[str] = []

    def over() -> bool:
        return (
            bool(troubles) and "hangs: it has taken nothing for 2 s" in troubles[-1] and _steps(job, "dies")[-1:] == [6]
        )

    with caplog.at_level(logging.WARNING):
        lacking = tracking.run(over, troubles.append)
    assert lacking == ["hangs", "raises"]
    assert _steps(job, "notes") == _steps(job, "dies") == list(range(1, 7))
    assert _steps(job, "hangs") == [1, 2]
    assert "raises failed: RuntimeError: no such project" in troubles[-1]
    assert caplog.text.count("dies failed, and is tried again in 0.01 s") == 3
    assert f"counterpoint track {tmp_path} --to raises" in caplog.text


@pytest.mark.slow
def test_the_command_ends_though_a_sink_hangs(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(*range(1, 7))
    command = [sys.executable, "-c", HANGS, str(tmp_path), "--to", "trackio", "--to", "tensorboard"]
    ended = subprocess.run(command, check=False, timeout=100, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("tensorboard has all of")
    assert f"trackio did not get everything; `counterpoint track {tmp_path} --to trackio`" in ended.stderr
    assert sorted(job.shown()) == list(range(1, 7))


def _steps(job: Job, name: str) -> list[int]:
    file = job.directory / "tracking" / name / "steps"
    return [int(step) for step in file.read_text().split()] if file.exists() else []
