"""A run as a whole, of which few lines are read: the trend, and the older steps of a long file's curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.job.reading.metrics import run_series, step_table
from counterpoint.job.reading.metrics.run_series import SECONDS_A_STEP, JobSeries, Window
from counterpoint.job.reading.metrics.sampled_lines import MOST_BYTES, TREND_POINTS, Trend
from counterpoint.job.reading.metrics.step_table import StepTable
from tests.support.jobs import shipped_line, trained_line, write_lines

EVERYTHING = Window(points=100_000)


def line(step: int, value: float, padding: int = 0) -> bytes:
    text = json.dumps({"step": step, "time": 1.0, "reward/mean": value, "padding": "x" * padding})
    return text.encode() + b"\n"


def newest(step: int, value: float) -> dict[str, Any]:
    return {"step": step, "time": 1.0, "reward/mean": value}


PARTS = st.lists(
    st.lists(st.tuples(st.integers(0, 3_000), st.sampled_from([b"", b"\n", b"garbage\n", b"[1]\n"])), max_size=60),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
def test_a_trend_is_of_the_whole_run_in_order_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    @settings(max_examples=100, deadline=None)
    @given(PARTS)
    def holds(parts: list[list[tuple[int, bytes]]]) -> None:
        path.write_bytes(b"")
        trend, step = Trend("reward/mean"), 0
        for part in parts:
            with path.open("ab") as file:
                for padding, garbage in part:
                    step += 1
                    file.write(line(step, step / 2, padding) + garbage)
            trend.refresh(path, path.stat().st_size)
            values = trend.values(newest(step, step / 2) if step else {})
            assert len(values) <= TREND_POINTS + 1
            assert values == sorted({*values}), "ascending as the steps, none twice"
            assert {*values} <= {number / 2 for number in range(1, step + 1)}
            if step:
                assert (values[0], values[-1]) == (0.5, step / 2), "from the first to the newest"

    holds()


def test_a_short_run_has_all_its_steps_in_its_trend(tmp_path: Path) -> None:
    path, trend = tmp_path / "metrics.jsonl", Trend("reward/mean")
    for step in range(1, 21):
        with path.open("ab") as file:
            file.write(line(step, float(step), 1_500))
        trend.refresh(path, path.stat().st_size)
        assert trend.values(newest(step, float(step))) == [float(each) for each in range(1, step + 1)]


def test_steps_that_are_repeated_count_once_with_their_last_value(tmp_path: Path) -> None:
    path, trend = tmp_path / "metrics.jsonl", Trend("reward/mean")
    path.write_bytes(b"".join(line(step, 0.0, 900) for step in range(1, 11)))
    trend.refresh(path, path.stat().st_size)
    with path.open("ab") as file:
        file.writelines(line(step, 1.0, 900) for step in range(6, 9))
    trend.refresh(path, path.stat().st_size)
    assert trend.values(newest(8, 1.0)) == [0.0] * 5 + [1.0] * 3


def test_a_trend_of_a_hundred_thousand_steps_reads_little(tmp_path: Path) -> None:
    path, trend = tmp_path / "metrics.jsonl", Trend("reward/mean")
    path.write_bytes(b"".join(line(step, float(step), 100) for step in range(1, 100_001)))
    size = path.stat().st_size
    before = bytes_read()
    trend.refresh(path, size)
    assert bytes_read() - before < 2**20
    values = trend.values(newest(100_000, 1e5))
    assert TREND_POINTS // 2 < len(values) <= TREND_POINTS + 1
    gaps = np.diff(values[:-1])
    assert gaps.max() < 1.1 * gaps.min(), "evenly spread"
    before = bytes_read()
    trend.refresh(path, size)
    assert bytes_read() - before < MOST_BYTES, "nothing is new"


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_curves_of_a_long_file_begin_with_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_series, "NEWEST_BYTES", 20_000)
    monkeypatch.setattr(run_series, "NEWEST_TRAINED", 50)
    monkeypatch.setattr(run_series, "OLDER_STEPS", 20)
    steps = range(1, 501)
    write_lines(tmp_path / "run_test" / "metrics.jsonl", [shipped_line(step, 10.0 * step) for step in steps])
    write_lines(tmp_path / "trainer" / "metrics.jsonl", [trained_line(step, "test") for step in steps])
    reader = JobSeries(tmp_path)
    series = reader.run("test", ["reward/mean", "mismatch_kl", SECONDS_A_STEP])
    assert "some of the steps before its newest" in reader.unreadable
    for name in ("reward/mean", "mismatch_kl"):
        x = series.curve(name, EVERYTHING).x
        assert (x[0], x[-1]) == (1, 500)
        assert 30 < len(x) < 150
        assert (np.diff(x) > 0).all()
        assert (np.diff(x)[-20:] == 1).all(), "the newest ones are all there"
    took = series.curve(SECONDS_A_STEP, EVERYTHING)
    assert took.mean[1:].tolist() == [10.0] * (len(took.x) - 1), "not the time since a step that is not kept"
    write_lines(tmp_path / "run_test" / "metrics.jsonl", [shipped_line(501, 5010.0)])
    again = reader.run("test", ["reward/mean", "mismatch_kl", SECONDS_A_STEP]).curve("reward/mean", EVERYTHING).x
    assert (again[0], again[-1], len(np.unique(again))) == (1, 501, len(again))


def test_a_table_that_is_full_thins_its_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "MAX_STEPS", 100)
    table = StepTable("a", ["value"])
    for step in range(1, 1_001):
        table.add_line({"step": step, "time": 1.0, "value": 0.0}, step)
        if step % 7 == 0:  # it was repeated
            table.add_line({"step": step, "time": 1.0, "value": float(step)}, 2 * step)
        assert len(table) <= 100
    steps, values = table.steps(), table.values("value")
    assert (steps[0], steps[-1]) == (1, 1_000)
    assert len(values) == len(table.times()) == len(steps) > 40
    assert (np.diff(steps) > 0).all()
    assert (values == np.where(steps % 7 == 0, steps, 0)).all(), "the later line of each"
    assert (table.offsets() == np.where(steps % 7 == 0, 2 * steps, steps)).all()


def test_a_file_that_is_a_hole_gives_no_trend(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(2**33)
    trend = Trend("reward/mean")
    trend.refresh(path, 2**33)
    assert trend.values({}) == []
