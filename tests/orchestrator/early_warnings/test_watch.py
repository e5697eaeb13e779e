"""The watch: it follows both files, keeps since when, begins again after a restart, and reads what anybody wrote."""

from __future__ import annotations

import logging
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
    watch, lines = Watch(tmp_path, "one"), []
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
    watch = Watch(tmp_path, "one")
    for step in range(1, 11):
        trained(tmp_path, step, masked_share=0.9, entropy=1.0)
        take(watch, tmp_path, step)
    caplog.clear()
    again = Watch(tmp_path, "one")
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
    line = take(Watch(tmp_path, "one"), tmp_path, 101)
    assert [each.sign for each in read_warnings(line)] == [Sign.ENTROPY]


def test_without_the_trainers_file_the_orchestrators_own_metrics_are_watched(tmp_path: Path) -> None:
    watch = Watch(tmp_path, "one")
    for step in range(1, 6):
        line = take(watch, tmp_path, step, **{"reference_kl": 1.0})
    assert [(each.sign, each.about) for each in read_warnings(line)] == [(Sign.DRIFT, "")]
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/metrics.jsonl").mkdir()  # no regular file
    assert METRIC in take(watch, tmp_path, 6, **{"reference_kl": 1.0})


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
        {METRIC: [good, {**good, "sign": "no"}, {**good, "since": "x"}, {**good, "figure": None}, 4, None]}
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
