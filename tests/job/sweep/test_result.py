"""The result of a target, of which a run's metrics may hold anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.job.sweep.result import result_of
from counterpoint.job.sweep.rows import row_of
from counterpoint.job.sweep.targets import Target
from counterpoint.sweep.status import TargetStatus


def target_with(tmp_path: Path, lines: str) -> Target:
    """A target whose run has written these metrics."""
    (tmp_path / "run_r").mkdir()
    (tmp_path / "run_r" / "metrics.jsonl").write_text(lines)
    return Target("r", {}, {}, tmp_path, "r", None, "f")


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ("", "step 1/?, reward 0.500"),
        ("[]\n", "step 1/?, reward 0.500"),
        ('{"event": "a note of mine"}\n', "step 1/?, reward 0.500"),
        ('{"step": "2", "time": 2.0, "reward/mean": 0.7}\n', "step 1/?, reward 0.500"),
        ('{"step": 2, "time": 2.0, "reward/mean": "high"}\n', "step 2/?, reward 0.500"),
        ('{"step": 2, "time": 2.0, "reward/mean": [1]}\n', "step 2/?, reward 0.500"),
        ('{"step": 2, "time": 2.0, "reward/mean": 0.7}\n{"step": 3, "ti', "step 2/?, reward 0.600"),
    ],
)
def test_a_line_that_is_no_steps_is_passed_over(tmp_path: Path, odd: str, expected: str) -> None:
    target = target_with(tmp_path, '{"step": 1, "time": 1.0, "reward/mean": 0.5}\n' + odd)
    assert result_of(target).description == expected


@pytest.mark.parametrize("run_id", ["r", None])
def test_an_output_that_was_deleted_is_told_beside_its_success(tmp_path: Path, run_id: str | None) -> None:
    target = Target("r", {"seed": 1}, {}, tmp_path / "job", run_id, None, "f")
    target.output.mkdir(parents=True)
    succeeded, pending = TargetStatus("r", "SUCCESS"), TargetStatus("r", "PENDING")
    assert row_of(succeeded, target).status == succeeded
    target.output.rmdir()
    assert f"{target.output}, is not here: it was deleted" in str(row_of(succeeded, target).status.error)
    assert row_of(pending, target).status == pending
    assert row_of(succeeded, None).status == succeeded
