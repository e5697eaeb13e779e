"""The files of a trial: what is in them, that other tools read them, and that no kill tears, repeats or loses a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.callbacks.csv_logger import CSVLoggerCallback
from counterpoint.tune.callbacks.defaults import with_default_loggers
from counterpoint.tune.callbacks.json_logger import JsonLoggerCallback
from counterpoint.tune.callbacks.logger_callback import LoggerCallback
from counterpoint.tune.trial import Trial


def make_trial(directory: Path, trial_id: str = "one") -> Trial:
    return Trial("m:a", {"lr": 0.1, "b": [1, None]}, trial_id, local_dir=str(directory), evaluated_params={"lr": 0.1})


def result_of(number: int) -> dict[str, Any]:
    return {
        "training_iteration": number,
        "loss": 1 / number,
        "eval": {"reward": number, "by": {"env": 0.5}},
        "note": 'a "b",\nc',
        "config": {"lr": 0.1},
    }


def report(loggers: list[LoggerCallback], trial: Trial, number: int) -> None:
    """As the runner does: counted first, then told."""
    trial.num_results, trial.last_result = number, result_of(number)
    for logger in loggers:
        logger.on_trial_result(0, [trial], trial, trial.last_result, number=number)


def started(trial: Trial) -> list[LoggerCallback]:
    loggers: list[LoggerCallback] = [JsonLoggerCallback(), CSVLoggerCallback()]
    for logger in loggers:
        logger.on_trial_start(0, [trial], trial)
    return loggers


def json_lines(trial: Trial) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(trial.logdir, "result.json").read_text().splitlines()]


def rows(trial: Trial) -> list[dict[str, Any]]:
    table = pandas.read_csv(Path(trial.logdir, "progress.csv"))
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def test_results_are_written_as_they_come(tmp_path: Path) -> None:
    trial = make_trial(tmp_path)
    loggers = started(trial)
    for number in (1, 2):
        report(loggers, trial, number)
        assert json_lines(trial) == [result_of(past) for past in range(1, number + 1)]
        assert [row["training_iteration"] for row in rows(trial)] == list(range(1, number + 1))
    assert json.loads(Path(trial.logdir, "params.json").read_text()) == trial.config
    assert rows(trial)[1] == {
        "training_iteration": 2,
        "loss": 0.5,
        "eval/reward": 2,
        "eval/by/env": 0.5,
        "note": 'a "b",\\nc',
    }


def test_the_configuration_that_a_trial_takes_over_is_written(tmp_path: Path) -> None:
    trial = make_trial(tmp_path)
    loggers = started(trial)
    report(loggers, trial, 1)
    trial.config = {"lr": 0.2}
    loggers[0].on_trial_restore(0, [trial], trial)
    assert json.loads(Path(trial.logdir, "params.json").read_text()) == {"lr": 0.2}
    trial.config = {"lr": 0.3}
    report(loggers, trial, 2)
    assert json.loads(Path(trial.logdir, "params.json").read_text()) == {"lr": 0.3}


def test_later_keys_are_in_the_json_and_missing_ones_are_empty(tmp_path: Path) -> None:
    trial = make_trial(tmp_path)
    loggers = started(trial)
    results: list[dict[str, Any]] = [{"a": 1, "b": 2}, {"a": 3, "c": math.nan}]
    for number, result in enumerate(results, start=1):
        for logger in loggers:
            logger.on_trial_result(0, [trial], trial, result, number=number)
    assert json_lines(trial) == [{"a": 1, "b": 2}, {"a": 3, "c": None}]
    assert Path(trial.logdir, "progress.csv").read_text() == "a,b\n1,2\n3,\n"


@pytest.mark.slow
@settings(max_examples=50)
@given(
    kills=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.binary(max_size=12).filter(lambda torn: b"\n" not in torn)),
        max_size=4,
    )
)
def test_no_kill_tears_repeats_or_loses_a_line(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, int, bytes]]
) -> None:
    """Each kill: so many results after a start, so many of them to be told again, and the torn bytes at the files' ends."""
    trial = make_trial(tmp_path_factory.mktemp("trial"))
    for results, again, torn in [*kills, (1, 0, b"")]:
        loggers = started(trial)
        begin = trial.num_results
        for number in range(begin + 1, begin + results + 1):
            report(loggers, trial, number)
        trial.num_results -= min(again, results)
        for name in ("result.json", "progress.csv"):
            with Path(trial.logdir, name).open("ab") as file:
                file.write(torn)
    loggers = started(trial)
    report(loggers, trial, trial.num_results + 1)
    numbers = list(range(1, trial.num_results + 1))
    assert json_lines(trial) == [result_of(number) for number in numbers]
    assert [row["training_iteration"] for row in rows(trial)] == numbers


def test_what_is_told_again_is_written_once(tmp_path: Path) -> None:
    """A resumed runner tells what it has journalled since its snapshot; of that, the file may lack the end."""
    trial = make_trial(tmp_path)
    loggers = started(trial)
    for number in (1, 2, 3):
        report(loggers, trial, number)
    loggers = started(trial)
    for number in (2, 3, 4):
        report(loggers, trial, number)
    for logger in loggers:
        logger.on_trial_complete(0, [trial], trial)
    assert json_lines(trial) == [result_of(number) for number in (1, 2, 3, 4)]
    assert [row["training_iteration"] for row in rows(trial)] == [1, 2, 3, 4]


def test_results_that_are_lost_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = make_trial(tmp_path)
    loggers = started(trial)
    report(loggers[:1], trial, 1)
    report(loggers[:1], trial, 4)
    report(loggers[:1], trial, 5)
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["results 2 to 3 are missing"]
    assert json_lines(trial) == [result_of(1), result_of(4), result_of(5)]


def test_without_numbers_lines_are_appended(tmp_path: Path) -> None:
    trial = make_trial(tmp_path)
    for _ in range(2):
        logger = JsonLoggerCallback()
        logger.on_trial_result(0, [trial], trial, {"a": 1})
    assert json_lines(trial) == [{"a": 1}, {"a": 1}]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_trial(tmp_path)
    loggers = started(trial)
    report(loggers, trial, 1)

    def half_a_line(descriptor: int, buffers: list[bytes]) -> None:
        import os

        os.write(descriptor, buffers[0][:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("counterpoint.transport.files.json_lines.write_buffers", half_a_line)
        for logger in loggers:
            with pytest.raises(OSError, match="No space left"):
                logger.on_trial_result(0, [trial], trial, result_of(2), number=2)
    assert json_lines(trial) == [result_of(1)]
    report(loggers, trial, 2)
    assert json_lines(trial) == [result_of(1), result_of(2)]
    assert len(rows(trial)) == 2


def test_loggers_that_are_given_replace_the_default_ones() -> None:
    mine = JsonLoggerCallback()
    plain = Callback()
    assert [type(callback) for callback in with_default_loggers([plain, mine])] == [
        CSVLoggerCallback,
        Callback,
        JsonLoggerCallback,
    ]
    assert [type(callback) for callback in with_default_loggers(None)] == [JsonLoggerCallback, CSVLoggerCallback]
