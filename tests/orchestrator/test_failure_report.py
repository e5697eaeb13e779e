"""What ended a run, as its log says it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from counterpoint.orchestrator.failure_report import report_failure
from counterpoint.transport.process.permanent_errors import DISK_FULL


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", [None, "batch.bin"])
def test_a_full_disk_is_reported_with_its_place(
    run_dir: Path, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    place = run_dir if name is None else run_dir / name
    full = OSError(errno.ENOSPC, "No space left on device", *([] if name is None else [str(place)]))
    assert report_failure(ExceptionGroup("tasks", [full]), run_dir) == DISK_FULL
    [said] = caplog.messages
    assert said.startswith(f"cannot write to {place}: ")
    assert "free space" in said
