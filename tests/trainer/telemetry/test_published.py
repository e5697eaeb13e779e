"""The trainer's spans add up to its steps, and `runs.json` says which runs it has; neither needs the disk to work."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import cast

import orjson
import pytest

from counterpoint.trainer.runs.registry import RunRegistry
from counterpoint.trainer.telemetry.published import RUNS_FILE, TrainerTelemetry
from counterpoint.trainer.telemetry.step_times import StepTimes
from counterpoint.transport.files.json_lines import read_lines
from counterpoint.transport.telemetry.intervals import busy_seconds
from counterpoint.transport.telemetry.spans import SPANS_FILE, Span, span_in
from tests.trainer.one_process_trainer import life, write_member


def spans_of(output_dir: Path) -> list[Span]:
    found = [span_in(line) for _, line in read_lines(output_dir / "trainer" / SPANS_FILE)]
    assert None not in found
    return [span for span in found if span is not None]


@pytest.mark.slow
def test_the_spans_of_two_runs_add_up_to_their_steps(tmp_path: Path, dense_directory: Path) -> None:
    for run_id in ("one", "two"):
        write_member(tmp_path, dense_directory, run_id, steps=3, checkpoint_interval=2)
    with life(tmp_path, dense_directory, {"one": 3, "two": 2}) as trainer:
        trainer.until_step(one=3, two=2)
        trainer.trainer.shared.telemetry._due = 0.0  # a turn has written a moment ago
        trainer.trainer.shared.telemetry.settle({})
        runs = orjson.loads((tmp_path / "trainer" / RUNS_FILE).read_bytes())
    assert not runs["ended"]
    assert {run["run"]: (run["stage"], run["step"]) for run in runs["runs"]} == {
        "one": ("finished", 3),
        "two": ("training", 2),
    }
    assert orjson.loads((tmp_path / "trainer" / RUNS_FILE).read_bytes())["ended"]

    by_step: defaultdict[tuple[str, int], dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans_of(tmp_path):
        assert span.role == "trainer"
        by_step[span.run, span.step][span.name].append(span)
    assert set(by_step) == {("one", 1), ("one", 2), ("one", 3), ("two", 1), ("two", 2)}
    for (run, step), spans in by_step.items():
        assert {"step", "wait", "forward", "backward", "optimizer", "broadcast"} <= set(spans), (run, step)
        [whole], [waited] = spans["step"], spans["wait"]
        assert waited.end == pytest.approx(whole.begin, abs=1e-3), "a batch is awaited until its step begins"
        parts = [each.interval for name in spans.keys() - {"step", "wait", "write_checkpoint"} for each in spans[name]]
        assert all(whole.begin - 1e-3 <= part.begin and part.end <= whole.end + 1e-3 for part in parts)
        apart = sum(part.busy for part in parts)
        assert apart == pytest.approx(busy_seconds(parts, whole.begin, whole.end), abs=1e-3), "one thing at a time"
        assert apart <= whole.end - whole.begin + 1e-3
        assert ("write_checkpoint" in spans) == (step == 2 or (run, step) == ("one", 3))


def test_a_disk_that_fails_costs_only_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    telemetry = TrainerTelemetry(tmp_path, 2, RunRegistry(2))
    for _ in range(2):
        telemetry.spans.record("wait", 1.0, 2.0)
        telemetry.close()
    assert caplog.text.count("cannot be written") == 2, "one line of each file"


def test_a_value_that_is_no_json_costs_only_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer").mkdir()
    monkeypatch.setattr(
        "counterpoint.trainer.telemetry.published._described", lambda *_: {"reason": "a cut emoji: \ud83d"}
    )
    telemetry = TrainerTelemetry(tmp_path, 2, cast(RunRegistry, ["one"]))
    telemetry.spans.record("wait", 1.0, 2.0, of="\ud83d")
    telemetry.close()
    assert caplog.text.count("cannot be written") == 2, "one line of each file"
    telemetry.spans.record("wait", 2.0, 3.0)
    monkeypatch.setattr("counterpoint.trainer.telemetry.published._described", lambda *_: {})
    telemetry.close()
    assert len(spans_of(tmp_path)) == 1
    assert (tmp_path / "trainer" / RUNS_FILE).exists()


def test_times_of_many_rows_are_bounded() -> None:
    times = StepTimes()
    for row in range(1000):
        times.add("forward", row, row + 0.25)
        times.add("backward", row + 0.25, row + 1.0)
    taken = times.take()
    assert all(len(intervals) <= 64 for intervals in taken.values())
    assert sum(each.busy for each in taken["forward"]) == pytest.approx(250.0)
    assert sum(each.busy for each in taken["backward"]) == pytest.approx(750.0)
    assert times.take() == {}
