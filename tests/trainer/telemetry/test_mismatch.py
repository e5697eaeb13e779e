"""A jump of the mismatch KL is said once, with the samples that did it, and read again by status and page."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from counterpoint.trainer.metrics import MetricsFile
from counterpoint.trainer.telemetry.mismatch import COMPARED_STEPS, LEAST_STEPS, MismatchWatch, read_jump
from tests.trainer.one_process_trainer import life, write_member
from tests.trainer.orchestrator_end import metrics_lines

SAMPLES = [("7-1", 2.0), ("7-0", 0.5)]


def warnings_of(directory: Path, values: list[float], caplog: pytest.LogCaptureFixture) -> list[int]:
    """The steps, from 1, at which the values make a new notice."""
    watch, found = MismatchWatch(directory), []
    for step, value in enumerate(values, 1):
        caplog.clear()
        watch.take("a", step, value, SAMPLES)
        if any("mismatch KL" in record.message for record in caplog.records):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([3e-6, 4e-6, 3e-6, 5e-6, 0.14, 0.13, 4e-6], [5]),
        ([3e-6, 4e-6, 3e-6, 5e-6, 0.14, *[4e-6] * COMPARED_STEPS, 0.2], [5, COMPARED_STEPS + 6]),
        ([3e-6, 4e-6, 3e-6, 0.14], []),
        ([50.0, 900.0, 40.0, 3e-6, 3e-6], [1]),
        ([3e-6, 2.0], [2]),
        ([3e-6, 4e-6, 3e-6, 5e-6, math.inf, 4e-6, 0.14], [5, 7]),
        ([3e-6, 4e-6, 3e-6, 5e-6, math.nan, 0.14], [6]),
        ([3e-9, 4e-9, 3e-9, 5e-9, 1e-3], []),
        ([2e-3, 3e-3, 2e-3, 3e-3, 0.14], []),
    ],
    ids=[
        "once",
        "again after it was over",
        "too few steps before",
        "absurd from the first step on",
        "absurd in an early step",
        "infinite",
        "no number",
        "harmless",
        "not a hundred times",
    ],
)
def test_a_jump_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: list[float], steps: list[int]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert warnings_of(tmp_path, values, caplog) == steps
    jump = read_jump(tmp_path, "a")
    assert (jump is not None) == bool(steps)
    if jump is not None:
        assert (jump.step, jump.samples) == (steps[-1], tuple(SAMPLES))


def test_a_step_whose_mismatch_is_no_finite_number_does_not_end_the_next_trainer(tmp_path: Path) -> None:
    """The probability of one token that the server called impossible overflows: JSON has no such number."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, value in enumerate([3e-6, math.inf, 5e-6], 1):
        metrics.append({"run_id": "a", "step": step, "mismatch_kl": value})
    assert metrics.newest(["a"], "mismatch_kl", 3) == {"a": [3e-6, 5e-6]}


def test_a_restart_knows_the_steps_before_and_forgets_a_jump_that_is_trained_again(tmp_path: Path) -> None:
    watch = MismatchWatch(tmp_path)
    watch.begin("a", 4, [3e-6] * 4)
    watch.take("a", 5, 0.14, SAMPLES)
    assert read_jump(tmp_path, "a") is not None
    again = MismatchWatch(tmp_path)
    again.begin("a", 5, [3e-6] * 4 + [0.14])
    assert read_jump(tmp_path, "a") is not None
    again.begin("a", 4, [3e-6] * 4)
    assert read_jump(tmp_path, "a") is None


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"step": 1, "samples": 3}', '{"samples": [["a"]]}', f'{{"samples": [["a", {10**400}]]}}', "[" * 1000],
)
def test_a_damaged_notice_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trainer" / "a" / "mismatch.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert read_jump(tmp_path, "a") is None


@pytest.mark.slow
def test_a_trainer_compares_its_steps_also_with_those_of_the_process_before(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is a jump to it; so the first that has enough before it is said, and the last one said is kept."""
    monkeypatch.setattr("counterpoint.trainer.telemetry.mismatch.FACTOR", 0.0)
    monkeypatch.setattr("counterpoint.trainer.telemetry.mismatch.LEAST_EARLY", math.inf)
    write_member(tmp_path, dense_directory, "winner", checkpoint_interval=1)
    committed = {"winner": LEAST_STEPS}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(winner=LEAST_STEPS)
    assert read_jump(tmp_path, "winner") is None
    committed["winner"] += 1
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(winner=LEAST_STEPS + 1)
        mismatches = one.run("winner").mismatches
    jump = read_jump(tmp_path, "winner")
    assert jump is not None
    assert jump.step == LEAST_STEPS + 1
    assert jump.mismatch_kl == metrics_lines(tmp_path)[-1]["mismatch_kl"]
    assert jump.samples == tuple(mismatches)
