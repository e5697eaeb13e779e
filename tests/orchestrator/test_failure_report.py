"""What ended a run, as its log says it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from orchestrator.failure_report import report_failure
from transport.process.permanent_errors import DISK_FULL


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    return tmp_path


def test_a_full_disk_is_reported_with_its_place(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert report_failure(ExceptionGroup("tasks", [full]), run_dir) == DISK_FULL
    assert caplog.messages == [f"cannot write to {run_dir}: {full}. What was committed before is intact"]


def test_an_error_that_names_its_file_is_reported_as_it_is(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = OSError(errno.ENOSPC, "No space left on device", str(run_dir / "batch.bin"))
    assert report_failure(named, run_dir) == DISK_FULL
    assert caplog.messages == [str(named)]
