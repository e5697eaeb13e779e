"""The watch: it follows both files, keeps since when, begins again after a restart, and reads what anybody wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.orchestrator.early_warnings.rules import Sign
from counterpoint.orchestrator.early_warnings.watch import (
    METRIC,
    MOST,
    SaidOfWarnings,
    Watch,
    read_warnings,
)
from counterpoint.transport.files.json_lines import append_line


def trained(output_dir: Path, step: int, run_id: str = "one", **metrics: Any) -> None:
    (output_dir / "trainer").mkdir(exist_ok=True)
    append_line(output_dir / "trainer/metrics.jsonl", {"run_id": run_id, "step": step, "time": 5.0, **metrics})


def watch_of(output_dir: Path, compares_groups: Callable[[], bool] = lambda: True) -> Watch:
    return Watch(output_dir, "one", {"sums": ("math",)}, compares_groups)


def take(watch: Watch, output_dir: Path, step: int, **metrics: Any) -> dict[str, Any]:
    """A step as the boundary takes it: its line with what the watch adds goes into the file."""
    line = {"step": step, "time": 100.0 + step, **metrics}
    line |= watch.take(line)
    (output_dir / "run_one").mkdir(exist_ok=True)
    append_line(output_dir / "run_one/metrics.jsonl", line)
    return line


def test_a_fault_of_the_trainer_is_named_in_the_steps_lines_and_once_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, lines = watch_of(tmp_path), []
    with caplog.at_level(logging.WARNING):
        for step in range(1, 21):
            trained(tmp_path, step, masked_share=0.0 if step < 10 else 0.9)
            trained(tmp_path, step, run_id="other", masked_share=0.9)
            lines.append(take(watch, tmp_path, step))
    assert [METRIC in line for line in lines] == [step > 11 for step in range(1, 21)]
    (warning,) = read_warnings(lines[-1])
    assert (warning.sign, warning.since, warning.time, warning.figure) == (Sign.MASKED, 12, 112.0, 0.9)
    assert str(warning).startswith("masked since step 12: the loss leaves out 90% of the trained tokens")
    assert len(caplog.records) == 1


def test_a_new_process_goes_on_where_the_last_one_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = watch_of(tmp_path)
    for step in range(1, 11):
        trained(tmp_path, step, masked_share=0.9, entropy=1.0)
        take(watch, tmp_path, step)
    caplog.clear()
    again = watch_of(tmp_path)
    for step in range(11, 16):
        trained(tmp_path, step, masked_share=0.9, entropy=0.01)
        line = take(again, tmp_path, step)
    found = {each.sign: each.since for each in read_warnings(line)}
    assert found == {Sign.MASKED: 5, Sign.ENTROPY: 13}
    assert [record.message.split()[0] for record in caplog.records] == ["entropy"]


def test_of_a_long_file_the_beginning_and_the_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.orchestrator.early_warnings.watch.HEAD_BYTES", 700)
    monkeypatch.setattr("counterpoint.orchestrator.early_warnings.watch.END_BYTES", 500)
    for step in range(1, 101):
        trained(tmp_path, step, entropy=1.0 if step < 50 else 0.01)
    line = take(watch_of(tmp_path), tmp_path, 101)
    assert [each.sign for each in read_warnings(line)] == [Sign.ENTROPY]


def test_without_the_trainers_file_the_orchestrators_own_metrics_are_watched(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    for step in range(1, 6):
        line = take(watch, tmp_path, step, **{"reference_kl": 1.0})
    assert [(each.sign, each.about) for each in read_warnings(line)] == [(Sign.DRIFT, "")]
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/metrics.jsonl").mkdir()  # no regular file
    assert METRIC in take(watch, tmp_path, 6, **{"reference_kl": 1.0})


def test_equal_groups_are_a_fault_only_while_the_run_compares_them(tmp_path: Path) -> None:
    compared = [True]
    watch = watch_of(tmp_path, lambda: compared[0])
    found = [take(watch, tmp_path, step, **{"groups/no_difference": 1.0}) for step in range(1, 11)]
    assert [each.sign for each in read_warnings(found[-1])] == [Sign.FEW_DIFFERENCES]
    compared[0] = False
    assert METRIC not in take(watch, tmp_path, 11, **{"groups/no_difference": 1.0})


LARGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "text",
    [
        '{"step": "1"}',
        '{"step": null, "entropy": 1.0}',
        f'{{"run_id": "one", "step": {LARGE}, "entropy": 1.0}}',
        f'{{"run_id": "one", "step": 1, "entropy": {LARGE}}}',
        '{"run_id": "one", "step": 1, "entropy": 1e308}',
        f'{{"step": 1, "early_warnings": [{{"sign": "masked", "about": "", "figure": 0.9, "reason": "", "advice": "", '
        f'"since": {LARGE}, "time": 1.0}}]}}',
        "[1]",
        "{",
    ],
)
def test_no_line_of_a_file_stops_a_step(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("run_one", "trainer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f"{text}\n")
    watch = watch_of(tmp_path)
    numbers: dict[str, Any] = {"reward/mean": 1e308, "environment/sums/math/mean": 1e308, "masked_share": 0.9}
    lines = [take(watch, tmp_path, step, **numbers) for step in range(2, 90)]  # written, too
    assert [each.sign for each in read_warnings(lines[-1])] == [Sign.MASKED]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_fault_of_a_rule_is_said_once_and_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("counterpoint.orchestrator.early_warnings.watch.found_in", lambda seen: 1 / 0)
    watch = watch_of(tmp_path)
    assert [METRIC in take(watch, tmp_path, step) for step in (1, 2)] == [False, False]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_what_anybody_wrote_is_checked() -> None:
    good = {
        "sign": "cut",
        "about": "a\x1b[2J",
        "figure": 1,
        "reason": "r" * 5000,
        "advice": "",
        "since": 3,
        "time": 1.0,
    }
    (read,) = read_warnings(
        {
            METRIC: [
                good,
                {**good, "sign": "no"},
                {**good, "since": "x"},
                {**good, "figure": None},
                {**good, "since": 10**30},
                4,
                None,
            ]
        }
    )
    assert "\x1b" not in read.about
    assert len(read.reason) < 1000
    assert len(read_warnings({METRIC: [good] * 1000})) == MOST
    assert read_warnings({METRIC: {"a": 1}}) == read_warnings({}) == []


def test_a_console_says_each_once() -> None:
    said = SaidOfWarnings()
    warning = {"sign": "cut", "about": "toy", "figure": 1.0, "reason": "all", "advice": "more", "since": 3, "time": 1.0}
    assert said.news({"step": 3, METRIC: [warning]}) == "cut since step 3: toy: all. What to do: more"
    assert said.news({"step": 4, METRIC: [warning, {**warning, "about": "b"}]}).startswith("cut since step 3: b")
    assert said.news({"step": 5}) == said.news({"step": 6, METRIC: [warning]}) == ""
    assert said.news({"step": 80, METRIC: [warning]})
    assert orjson.loads(orjson.dumps(warning)) == warning
