"""An experiment as the page asks for it: one that really ran, and directories that nobody should have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.job.reading.rollouts.step_indexes import moment
from counterpoint.serve.readers import population as reading
from counterpoint.serve.readers.population import PopulationReader, TrialResults
from counterpoint.tune.runner.trial_files import write_state
from counterpoint.tune.trial import Trial
from examples.tune.two_slopes import ITERATIONS, best, population
from tests.serve.api_client import api


def experiment(directory: Path, trials: list[Trial]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_state(directory, trials, {"metric": "score", "mode": "min"})
    return directory


def trial(number: int, **fields: Any) -> Trial:
    values = {"lr": 0.1 * number}
    return Trial(
        "m:t", {**values, "other": [1, {"a": 2}]}, f"t{number}", "/moved/elsewhere", values, f"{number}_lr", **fields
    )


def write_results(directory: Path, name: str, lines: list[Any]) -> None:
    (directory / name).mkdir(exist_ok=True)
    (directory / name / "result.json").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


@pytest.fixture
def trained(tmp_path: Path) -> list[Trial]:
    """The trials of an experiment that ran, in a loop of its own."""
    return population(str(tmp_path))


@pytest.mark.slow
async def test_a_population_that_ran_is_shown_with_its_copies(tmp_path: Path, trained: list[Trial]) -> None:
    directory = tmp_path / "population"
    async with api(directory) as client:
        assert [job["kind"] for job in (await client.get("/jobs"))[1]["jobs"]] == ["experiment"]
        status, answer = await client.get("/jobs/population/population")
    assert status == 200
    assert (answer["metric"], answer["mode"], answer["parameters"]) == ("worth", "max", ["h"])
    assert answer["counts"] == [{"status": "TERMINATED", "count": 4}]
    assert answer["best"] == best(trained).trial_id
    assert (answer["is_complete"], answer["problems"]) == (True, [])
    assert len(answer["copies"]) == 2 * (ITERATIONS // 4 - 1)
    for shown in answer["trials"]:
        copies = [copy for copy in answer["copies"] if copy["trial"] == shown["trial_id"]]
        assert shown["iterations"] == list(range(1, ITERATIONS + 1))
        assert shown["scores"][-1] == pytest.approx(shown["score"])
        assert [values["iteration"] for values in shown["values"]] == [0, *(copy["iteration"] for copy in copies)]
        assert {values["texts"][0] for values in shown["values"]} <= {"[1.0,0.0]", "[0.0,1.0]"}
        assert shown["copied_from"] == (copies[-1]["source"] if copies else "")


async def test_trials_are_read_below_the_directory_wherever_their_state_says_they_are(tmp_path: Path) -> None:
    first, second = trial(1, last_result={"score": 3.0, "training_iteration": 2}), trial(2, status="RUNNING")
    directory = experiment(tmp_path / "moved", [first, second])
    write_results(directory, "t1", [{"training_iteration": n, "score": 5.0 - n} for n in (1, 2)])
    write_results(
        directory, "t2", [{"training_iteration": 1, "score": None}, [], {"training_iteration": 2, "score": 9.0}]
    )
    (directory / "t2" / "copied.json").write_bytes(orjson.dumps({"source": "t1", "iteration": 2, "request_id": "r"}))
    async with api(directory) as client:
        _, answer = await client.get("/jobs/moved/population")
    one, two = answer["trials"]
    assert (one["iterations"], one["scores"], one["score"], answer["best"]) == ([1, 2], [4.0, 3.0], 3.0, "t1")
    assert (two["iterations"], two["scores"], two["copied_from"], two["status"]) == ([2], [9.0], "t1", "RUNNING")
    assert one["values"][0]["numbers"] == [0.1]


HOSTILE_STATES: list[bytes] = [
    b"",
    b"[]",
    b"{}",
    b'{"trials": {}}',
    b'{"trials": [1, null, {}, {"trial_id": "../../etc", "status": "RUNNING"}, {"trial_id": 5, "status": "x"}]}',
    b'{"runner": [1], "trials": [{"trial_id": "a", "status": "\\u202eX", "logdir": "/etc", "evaluated_params": 7, "config": 8,'
    b' "last_result": "x", "num_failures": -5, "error_msg": {"a": 1}, "experiment_tag": []}]}',
    b'{"trials": [{"trial_id": "a", "status": "RUNNING", "logdir": "..", "evaluated_params": {"\\u0000": {}, "lr": "NaN"}}]}',
]


@pytest.mark.parametrize("state", HOSTILE_STATES)
async def test_no_state_makes_the_answer_fail(tmp_path: Path, state: bytes) -> None:
    (tmp_path / "experiment_state.json").write_bytes(state)
    (tmp_path / "pbt_global.txt").write_bytes(
        b'[]\n["a", "a", 1, 1, {}, {}]\n["a", [], null]\n\xff\n["a", "b", 1, 2, {}, {}]\n'
    )
    async with api(tmp_path) as client:
        response = await client.request("GET", f"/api/v1/jobs/{tmp_path.name}/population")
        body = await response.read()
    assert response.status == 200, body
    assert b"\\u202e" not in body.replace(b"\\\\u202e", b"")
    assert "\u202e".encode() not in body


async def test_what_is_no_experiment_is_a_404(tmp_path: Path) -> None:
    async with api(tmp_path, tmp_path / "gone") as client:
        for job in (tmp_path.name, "gone"):
            status, answer = await client.get(f"/jobs/{job}/population")
            assert (status, "counterpoint serve" in answer["error"]["advice"]) == (404, True)


def test_a_fifo_is_not_waited_for_and_a_link_not_followed(tmp_path: Path) -> None:
    directory = experiment(tmp_path / "e", [trial(1), trial(2)])
    (tmp_path / "secret").mkdir()
    write_results(tmp_path, "secret", [{"training_iteration": 1, "score": 1.0}])
    (directory / "t1").symlink_to(tmp_path / "secret")
    (directory / "t2").mkdir()
    os.mkfifo(directory / "t2" / "result.json")
    os.mkfifo(directory / "pbt_global.txt")
    found = PopulationReader(directory).read(moment(60))
    assert [one.scores for one in found.trials] == [[], []]
    assert len(found.problems) == 2


def test_results_are_followed_and_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_POINTS", 16)
    results, path = TrialResults(tmp_path, "score"), tmp_path / "result.json"
    for number in range(1, 301):
        with path.open("ab") as file:
            file.write(orjson.dumps({"training_iteration": number, "score": float(number)}) + b"\n")
        results.advance(moment(60))
        assert results.is_complete
        assert len(results.iterations) < 16
        assert results.scores.tolist() == results.iterations.tolist()
    assert results.iterations[-1] > 300 - results._every
    path.write_bytes(orjson.dumps({"training_iteration": 1, "score": 7.0}) + b"\n")
    results.advance(moment(60))
    assert results.scores.tolist() == [7.0], "a file that was replaced begins anew"


def test_many_trials_are_counted_and_the_newest_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_TRIALS", 3)
    directory = experiment(tmp_path / "e", [trial(number) for number in range(1, 8)])
    found = PopulationReader(directory).read(moment(60))
    assert [one.trial_id for one in found.trials] == ["t5", "t6", "t7"]
    assert {one.status: one.count for one in found.counts} == {"PENDING": 7}


async def test_values_that_a_copy_brought_are_found_in_nested_tables(tmp_path: Path) -> None:
    names = ("training/learning_rate", "sampling/temperature")
    config = {"training": {"learning_rate": 0.01, "lora": {"rank": 8}}, "sampling": {"temperature": 1.2}}
    changed = {"training": {"learning_rate": 0.008, "lora": {"rank": 8}}, "sampling": {"temperature": 0.9}}
    first = dict(zip(names, (0.01, 1.2), strict=True))
    trials = [
        Trial("m:t", config, "t1", "/moved", first, "1_lr"),
        Trial("m:t", changed, "t2", "/moved", first, "2_lr", last_result={"training_iteration": 8}),
    ]
    directory = experiment(tmp_path / "nested", trials)
    (directory / "pbt_global.txt").write_bytes(orjson.dumps(["2_lr", "1_lr", 4, 4, config, changed]) + b"\n")
    async with api(directory) as client:
        _, answer = await client.get("/jobs/nested/population")
    assert answer["parameters"] == ["sampling/temperature", "training/learning_rate"]
    two = answer["trials"][1]
    assert [(values["iteration"], values["numbers"]) for values in two["values"]] == [
        (0, [1.2, 0.01]),
        (4, [0.9, 0.008]),
    ]


async def test_of_a_traceback_what_was_raised_is_shown(tmp_path: Path) -> None:
    message = 'Traceback (most recent call last):\n  File "train.py", line 3, in train\n    open(path)\nOSError: no such disk\n'
    failed = [trial(1, status="ERROR", error_msg=message), trial(2, status="ERROR", error_msg="killed by signal 9\n")]
    directory = experiment(tmp_path / "failed", failed)
    async with api(directory) as client:
        _, answer = await client.get("/jobs/failed/population")
    assert [one["error"] for one in answer["trials"]] == ["OSError: no such disk", "killed by signal 9"]
