"""Curves: the columns hold what `status` reads, and a curve of few points hides none of its values."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoint
from counterpoint.job.reading.metrics import trained_lines as trained_lines_module
from counterpoint.job.reading.metrics.downsample import downsample, rounded
from counterpoint.job.reading.metrics.evaluations import EvaluationResults, result_in
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.run_series import SECONDS_A_STEP, TOKENS_PER_SECOND, JobSeries, Window
from counterpoint.job.reading.metrics.step_table import MOST_SEEN, StepTable
from counterpoint.transport.files import appended_lines
from tests.support.jobs import shipped_line, trained_line, write_lines
from tests.support.synthetic_jobs import trained_lines

EVERYTHING = Window(points=100_000)

VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.floats(),
    st.integers(), st.sampled_from([10**30, -1, 1.5, {"deep": [[]]}]),
)  # fmt: skip

LINES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"step": st.integers(0, 12), "time": st.floats(0, 100)}, optional={"reward/mean": VALUES}
        ),
        st.dictionaries(st.sampled_from(["step", "time", "run_id", "reward/mean"]), VALUES, max_size=4),
    ),
    max_size=12,
)


def curve(directory: Path, name: str, run_id: str = "test", window: Window = EVERYTHING) -> list[tuple[float, float]]:
    """A curve's points, from a reader that was never used before."""
    found = JobSeries(directory).run(run_id, [name]).curve(name, window)
    return [*zip(found.x.tolist(), found.mean.tolist(), strict=True)]


def as_stored(value: float) -> float:
    return float(np.float32(value))


@pytest.mark.slow
def test_columns_hold_what_status_reads_of_any_lines(tmp_path: Path) -> None:
    path = tmp_path / "run_test" / "metrics.jsonl"
    path.parent.mkdir()

    @settings(max_examples=150, deadline=None)
    @given(LINES, st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")))
    def holds(lines: list[dict[str, Any]], garbage: bytes) -> None:
        path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + garbage + b"\n")
        history = History.of(tmp_path, "test")
        history.refresh()
        expected = [(step, as_stored(value)) for step, value in history.series("reward/mean")]
        assert curve(tmp_path, "reward/mean") == expected

    holds()


def test_a_resume_takes_back_the_steps_that_it_repeats(tmp_path: Path) -> None:
    metrics = tmp_path / "run_test" / "metrics.jsonl"
    write_lines(metrics, [shipped_line(step, 10.0 * step) for step in range(1, 7)])
    reader = JobSeries(tmp_path)
    assert len(reader.run("test", ["reward/mean"]).curve("reward/mean", EVERYTHING).x) == 6
    first_three = b"".join(line + b"\n" for line in metrics.read_bytes().split(b"\n")[:3])
    metrics.write_bytes(first_three)  # in place
    write_lines(metrics, [shipped_line(step, 100.0 * step, **{"reward/mean": -1.0}) for step in range(4, 12)])
    again = reader.run("test", ["reward/mean"]).curve("reward/mean", EVERYTHING)
    assert again.x.tolist() == [*range(1, 12)]
    assert again.mean.tolist()[3:] == [-1.0] * 8


def test_each_run_has_its_own_lines_of_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "trainer" / "metrics.jsonl"
    lines = [trained_line(step, run_id) for step in range(1, 6) for run_id in ("a", "b")]
    write_lines(path, lines)
    reader = JobSeries(tmp_path)
    for run_id in ("a", "b", "c"):
        expected = [(line["step"], as_stored(line["mismatch_kl"])) for line in lines if line["run_id"] == run_id]
        found = reader.run(run_id, ["mismatch_kl"]).curve("mismatch_kl", EVERYTHING)
        assert [*zip(found.x, found.mean, strict=True)] == expected
    write_lines(path, [trained_line(6, "b")])
    assert len(reader.run("b", ["mismatch_kl"]).curve("mismatch_kl", EVERYTHING).x) == 6
    beside = path.with_suffix(".new")  # as `MetricsFile.truncate` replaces it
    write_lines(beside, [line for line in lines if line["run_id"] == "a" or line["step"] <= 2])
    beside.replace(path)
    again = [reader.run(run_id, ["mismatch_kl"]).curve("mismatch_kl", EVERYTHING) for run_id in "ab"]
    assert [len(curve.x) for curve in again] == [5, 2]


def test_a_long_file_of_the_trainer_is_read_on_by_the_next_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended_lines, "MOST_BYTES", 1000)
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 300)
    clock = itertools.count()  # a second a look
    monkeypatch.setattr(trained_lines_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    path = tmp_path / "trainer" / "metrics.jsonl"
    write_lines(path, [trained_line(step, run_id) for step in range(1, 31) for run_id in ("a", "b")])
    reader = JobSeries(tmp_path)
    found = len(reader.run("a", ["mismatch_kl"], deadline=1).curve("mismatch_kl", EVERYTHING).x)
    assert 0 < found < 30
    assert reader.unreadable == f"{path}: only its first 0.0 GB have been read"
    before = len(reader.run("b", ["mismatch_kl"], deadline=1).curve("mismatch_kl", EVERYTHING).x)
    assert abs(before - found) <= 1, "another run of the same answer has no time of its own"
    series = reader.run("a", ["mismatch_kl"], deadline=100)
    assert len(series.curve("mismatch_kl", EVERYTHING).x) == 30
    assert not reader.unreadable


def test_a_long_file_of_a_run_is_read_on_by_the_next_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_lines, "MOST_BYTES", 5000)
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 1000)
    path = tmp_path / "run_test" / "metrics.jsonl"
    write_lines(path, [shipped_line(step, float(step)) for step in range(1, 31)])
    reader = JobSeries(tmp_path)
    counts: list[int] = []
    while len(counts) < 2 or reader.unreadable:
        counts.append(len(reader.run("test", ["reward/mean"]).curve("reward/mean", EVERYTHING).x))
        assert reader.unreadable in ("", f"{path}: only its first 0.0 GB have been read")
    assert 0 < counts[0] < counts[-1] == 30


def test_rates_are_those_of_status(tmp_path: Path) -> None:
    lines = [
        shipped_line(step, 10.0 * step + step % 3, uptime_seconds=10.0 * step + step % 3 - 5) for step in range(1, 19)
    ]
    lines[4] |= {"uptime_seconds": 2.0, "tokens/restored": 600}  # a restart
    for line in lines[12:]:
        line["time"] -= 60.0  # the clock is set back
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = History.of(tmp_path, "test")
    history.refresh()
    seconds = curve(tmp_path, SECONDS_A_STEP)
    assert [value for _, value in seconds] == pytest.approx([history.seconds_of(step) for step in range(1, 19)])
    tokens = [value for _, value in curve(tmp_path, TOKENS_PER_SECOND)]
    assert tokens[-1] == pytest.approx(history.tokens_per_second()), "the page has one figure"
    for step in range(1, len(lines) + 1):
        write_lines(tmp_path / "run_part" / "metrics.jsonl", lines[step - 1 : step])
        part = History.of(tmp_path, "part")
        part.refresh()
        assert tokens[step - 1] == pytest.approx(part.tokens_per_second())


def test_an_evaluation_stands_at_its_step_with_its_interval(tmp_path: Path) -> None:
    run = tmp_path / "run_test"
    lines = [shipped_line(step, 10.0 * step) for step in (1, 2, 3)]
    lines[2] |= {"evaluation/held/pass@1": 0.5, "evaluation/held/step": 2}
    write_lines(run / "metrics.jsonl", lines)
    assert curve(tmp_path, "evaluation/held/pass@1") == [(3, 0.5)], "what has no file of results"
    interval = {"low": 0.25, "high": None}
    results = [
        {"evaluation": name, "step": step, "time": 10.0 * step + 1, "metrics": {"pass@1": {"value": value, **interval}}}
        for name, step, value in (("held", 0, 0.0), ("other", 2, 0.75), ("held", 2, 0.5), ("held", 3, 1.0))
    ]
    hostile: list[dict[str, Any]] = [
        {"evaluation": [], "metrics": 1}, {"evaluation": "held", "metrics": {"pass@1": {"value": "x"}}},
        {"evaluation": "held", "step": 4, "time": "now", "metrics": {"pass@1": {"value": 1.0}}},
        {"evaluation": "held", "step": 4, "time": 50.0, "error": "its server is away"},
    ]  # fmt: skip
    write_lines(run / "evaluations.jsonl", [*results, *hostile])
    assert curve(tmp_path, "evaluation/held/pass@1") == [(0, 0.0), (2, 0.5), (3, 1.0)]
    assert curve(tmp_path, "evaluation/held/pass@1/low") == [(0, 0.25), (2, 0.25), (3, 0.25)]
    assert curve(tmp_path, "evaluation/held/pass@1", window=Window("time", 20)) == [(21, 0.5), (31, 1.0)]
    assert "evaluation/other/pass@1" in JobSeries(tmp_path).run("test", []).names()


def test_a_window_is_cut_by_step_or_by_time(tmp_path: Path) -> None:
    write_lines(tmp_path / "run_test" / "metrics.jsonl", [shipped_line(step, 10.0 * step) for step in range(1, 21)])
    by_step = curve(tmp_path, "reward/mean", window=Window("step", 5, 8))
    by_time = curve(tmp_path, "reward/mean", window=Window("time", 50, 80))
    assert [x for x, _ in by_step] == [5, 6, 7, 8]
    assert [x for x, _ in by_time] == [50, 60, 70, 80]
    assert [y for _, y in by_step] == [y for _, y in by_time]


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.job.reading.metrics.run_series.KEPT_BYTES", 2000)
    reader = JobSeries(tmp_path)
    for number in range(12):
        write_lines(tmp_path / f"run_{number}" / "metrics.jsonl", [shipped_line(step, step) for step in range(1, 21)])
        assert len(reader.run(str(number), ["reward/mean"]).curve("reward/mean", EVERYTHING).x) == 20
        assert reader.nbytes <= 2000
    assert len(reader.run("0", ["reward/mean"]).curve("reward/mean", EVERYTHING).x) == 20


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.one_of(st.just(math.nan), st.floats(-1e15, 1e15))), max_size=80),
    st.integers(1, 30),
)
def test_stretches_contain_all_points(points: list[tuple[float, float]], most: int) -> None:
    points.sort(key=lambda point: point[0])
    x, y = np.array([x for x, _ in points]), np.array([y for _, y in points])
    curve = downsample(x, y, most)
    known = y[np.isfinite(y)]
    assert len(curve.x) == len(curve.mean) == len(curve.low) == len(curve.high) <= max(most, 0)
    assert (np.diff(curve.x) >= 0).all()
    if len(known):
        assert (np.nanmin(curve.low), np.nanmax(curve.high)) == (known.min(), known.max())
    else:
        assert np.isnan(curve.mean).all()
    defined = np.isfinite(curve.mean)
    assert ((curve.low <= curve.mean) & (curve.mean <= curve.high))[defined].all()
    assert curve.exact == (len(points) <= most)


def test_names_that_a_guest_makes_up_are_bounded() -> None:
    table = StepTable("a", ())
    table.add(orjson.dumps({"step": 1, "time": 1.0, **{f"name {number}": 1.0 for number in range(2 * MOST_SEEN)}}), 0)
    assert len(table.seen) == MOST_SEEN
    table = StepTable("a", ())
    table.add(orjson.dumps({"step": 1, "time": 1.0, "x" * 10_000: 1.0}), 0)
    assert table.seen == {"step", "time"}


def test_an_evaluation_with_an_endless_name_is_left_out(tmp_path: Path) -> None:
    metrics = {"reward/mean": {"value": 0.5, "low": 0.4, "high": 0.6}}
    results = [{"evaluation": name, "step": 1, "time": 1.0, "metrics": metrics} for name in ("e" * 2**20, "sums")]
    write_lines(tmp_path / "run_test" / "evaluations.jsonl", results)
    series = JobSeries(tmp_path).run("test", [])
    assert series.names() == [f"evaluation/sums/reward/mean{bound}" for bound in ("", "/high", "/low")]
    assert [*series._evaluated] == ["sums"]


def test_numbers_have_seven_digits() -> None:
    values = np.array([0.1, 1 / 3, -123456.789, 2e-7 / 3, 0.0, math.nan, 5e17])
    assert rounded(values.astype(np.float32).astype(np.float64)) == [
        0.1,
        0.3333333,
        -123456.8,
        6.666667e-08,
        0.0,
        None,
        5e17,
    ]


def test_a_metric_of_the_trainer_is_found_beside_those_of_the_orchestrator(tmp_path: Path) -> None:
    shipped = [shipped_line(step, step, wall_seconds=1.0) | {"batch/tokens": 9, "batch/samples": 3} for step in (1, 2)]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", shipped)
    write_lines(tmp_path / "trainer" / "metrics.jsonl", [{"run_id": "test", **line} for line in trained_lines(shipped)])
    assert [x for x, _ in curve(tmp_path, "grad_norm")] == [1, 2]
    assert curve(tmp_path, "no/such/metric") == []


def test_a_result_without_a_completed_rollout_has_no_number_for_any_reader(tmp_path: Path) -> None:
    """An older version wrote 0 as its pass@k. The curve and the frame had that 0, and `status` said that it failed."""
    run = tmp_path / "run_test"
    result = {"evaluation": "held", "step": 5, "time": 1.0, "metrics": {"pass@1": {"value": 0.0}}}
    result |= {"rollouts/completed": 0, "rollouts/failed": 8}
    write_lines(run / "metrics.jsonl", [shipped_line(5, 1.0)])
    write_lines(run / "evaluations.jsonl", [result])
    evaluations = EvaluationResults(run)
    evaluations.refresh()
    assert "failed" in str(evaluations.newest["held"])
    assert curve(tmp_path, "evaluation/held/pass@1") == []
    assert counterpoint.read(tmp_path).evaluations().empty
    found = result_in(orjson.dumps(result))
    assert found is not None
    assert found.values == {}, "what sinks get"
