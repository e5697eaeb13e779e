"""Sinks that hang, raise or die: they are tried again, dropped after a bound, and harm no other."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from counterpoint.job.tracking.tracking import Limits, Tracking
from tests.job.tracking.jobs import Job

LIMITS = Limits(attempts=2, first_pause_seconds=0.05, stall_seconds=4.0, finish_seconds=30.0)
SINKS = "tests.job.tracking.broken_sinks"


@pytest.mark.slow
def test_a_broken_sink_is_dropped_and_the_others_get_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    job.steps(*range(1, 7))
    broken = {"hangs": "HangingSink", "raises": "RaisingSink", "dies": "DyingSink"}
    specs = [job.spec(name, f"{SINKS}:{sink}") for name, sink in broken.items()]
    troubles: list[str] = []
    whole = [job.spec("notes", f"{SINKS}:NotingSink")]
    tracking = Tracking([*specs, *whole], LIMITS)

    def over() -> bool:
        return caplog.text.count("gets nothing any more") == 2 and _steps(job, "dies") == list(range(1, 7))

    with caplog.at_level(logging.WARNING):
        left = tracking.run(over, troubles.append)
    assert set(left) == {"hangs", "raises"}
    assert _steps(job, "notes") == _steps(job, "dies") == list(range(1, 7))
    assert _steps(job, "hangs") == [1, 2]
    assert "hangs gets nothing any more: it hung for 4 s and was killed" in troubles[-1]
    assert f"counterpoint track {tmp_path} --to raises" in caplog.text


@pytest.mark.slow
def test_a_folder_of_the_working_directory_does_not_stand_for_a_package_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    job = Job(tmp_path / "job")
    job.steps(1, 2)
    troubles: list[str] = []
    assert not Tracking([job.spec("notes", f"{SINKS}:NotingSink")], LIMITS).run(lambda: True, troubles.append)
    assert _steps(job, "notes") == [1, 2]


@pytest.mark.slow
def test_sinks_that_were_just_started_are_killed_where_hangups_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below `nohup`: a guardian that has just been started does not hear SIGHUP."""
    monkeypatch.setattr("counterpoint.job.tracking.tracking.POLL_SECONDS", 0.0)
    tracking = Tracking([Job(tmp_path).spec("hangs", f"{SINKS}:HangingSink")], LIMITS)

    def interrupted(_trouble: str) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            tracking.run(lambda: False, interrupted)
    finally:
        signal.signal(signal.SIGHUP, former)


def _steps(job: Job, name: str) -> list[int]:
    file = job.directory / "tracking" / name / "steps"
    return [int(step) for step in file.read_text().split()] if file.exists() else []
