"""The overview, a run and its loop over the API, of jobs as their roles write them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.reading import job_facts
from counterpoint.job.reading.status import read_status
from counterpoint.run.changes import Change, write_journal
from counterpoint.serve.readers.problems import Kind, problems_of
from counterpoint.trainer.metrics import MetricsFile
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.files.json_lines import append_line
from tests.serve.api_client import api
from tests.support.jobs import shipped_line, trained_line, write_lines
from tests.support.past_jobs import make_job
from tests.support.synthetic_jobs import running, write_job

GIB = 2**30


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the machine that tests run on may be full."""
    monkeypatch.setattr(job_facts, "_disk", lambda directory: (500 * GIB, 200 * GIB))


async def get(directory: Path, path: str, **query: Any) -> Any:
    async with api(directory) as client:
        status, answer = await client.get(path, **query)
    assert status == 200, answer
    return answer


@pytest.mark.slow
async def test_a_running_job_is_shown_with_its_runs_and_no_problem(tmp_path: Path) -> None:
    run_ids = write_job(tmp_path / "job", 3, 40, wanted=100)
    with running(tmp_path / "job", run_ids):
        answer = await get(tmp_path / "job", "/overview")
    assert answer["problems"] == []
    assert [(job["id"], job["running"], job["runs"], len(job["workers"])) for job in answer["jobs"]] == [
        ("job", True, 3, 5)
    ]
    assert [run["run"] for run in answer["runs"]] == run_ids
    for run in answer["runs"]:
        assert (run["state"], run["step"], run["steps"], run["trained"]) == ("running", 40, 100, 40)
        assert run["seconds_left"] == pytest.approx(60 * run["seconds_a_step"])
        assert {name for name, value in run.items() if value is None} == {"evaluated", "staleness_lossless"}


async def test_a_run_has_its_newest_evaluation_and_the_keys_of_its_file(tmp_path: Path) -> None:
    run_ids = write_job(tmp_path / "job", 2, 5)
    run = tmp_path / "job" / f"run_{run_ids[0]}"
    results = [
        {
            "evaluation": "held",
            "step": step,
            "time": 1.0,
            "metrics": {"reward/mean": {"value": 1.0}, "pass@1": {"value": value}},
        }
        for step, value in ((0, 0.25), (5, 0.5))
    ]
    write_lines(run / "evaluations.jsonl", results)
    file = f'runs = [{{ run_id = "{run_ids[1]}", training = {{ learning_rate = 1 }} }}]\n[orchestrator]\nsteps = 5\n'
    (tmp_path / "job" / "job.toml").write_text(f"{file}sampling = {{ temperature = 0.5 }}\n")
    first, second = (await get(tmp_path / "job", "/overview"))["runs"]
    assert (first["evaluated"], first["evaluation"]) == (0.5, "pass@1 0.500")
    assert (second["evaluated"], second["evaluation"]) == (None, "")
    assert (first["evaluation_metric"], second["evaluation_metric"]) == ("evaluation/held/pass@1", "")
    failed = {"evaluation": "held", "step": 6, "time": 2.0, "metrics": {}, "failed": 4}
    write_lines(run / "evaluations.jsonl", [failed])
    assert (await get(tmp_path / "job", "/overview"))["runs"][0]["evaluation_metric"] == "evaluation/held/pass@1"
    of_all = {"steps": "100", "sampling.temperature": "1.0"}
    given = [(await get(tmp_path / "job", f"/jobs/job/runs/{run_id}"))["given"] for run_id in run_ids]
    assert given == [of_all, {**of_all, "run_id": '"default"', "training.learning_rate": "1e-05"}]
    for hostile in (b"\xff", b"runs = 1\norchestrator = []\n", b"[orchestrator]\n" + b"[orchestrator.a]\n" * 2):
        (tmp_path / "job" / "job.toml").write_bytes(hostile)
        assert (await get(tmp_path / "job", f"/jobs/job/runs/{run_ids[0]}"))["given"] == {}


async def test_a_run_has_its_trend_from_the_first_step_on(tmp_path: Path) -> None:
    (run_id,) = write_job(tmp_path / "job", 1, 300)
    metrics = tmp_path / "job" / f"run_{run_id}" / "metrics.jsonl"
    rewards = [json.loads(line)["reward/mean"] for line in metrics.read_text().splitlines()]
    (run,) = (await get(tmp_path / "job", "/overview"))["runs"]
    assert 20 < len(run["rewards"]) < 50
    assert run["rewards"][0] == pytest.approx(rewards[0], rel=1e-3)
    assert run["rewards"][-1] == pytest.approx(rewards[-1], rel=1e-3)


async def test_the_overview_says_what_to_do_next(tmp_path: Path) -> None:
    job, evaluations = tmp_path / "a job", "evaluations.jsonl"

    async def said() -> tuple[str, list[str]]:
        (entry,) = (await get(job, "/overview"))["jobs"]
        return entry["next"], entry["next_commands"]

    job.mkdir()
    assert (await said())[1] == ["counterpoint run FILE"]
    (run_id,) = write_job(job, 1, 5, wanted=6)
    shown = f"'{job}'"
    assert (await said())[1] == ["counterpoint run FILE --resume"]
    with running(job, [run_id]):
        assert (await said())[1] == [f"counterpoint change {run_id} --job {shown}"]
        lines = (job / f"run_{run_id}" / "metrics.jsonl").rename(tmp_path / "metrics")
        assert (await said())[1] == [f"counterpoint status {shown}"]
        lines.rename(job / f"run_{run_id}" / "metrics.jsonl")
    write_lines(job / f"run_{run_id}" / "metrics.jsonl", [shipped_line(6, time.time())])
    write_lines(job / "trainer" / "metrics.jsonl", [trained_line(6, run_id)])
    assert (await said())[1] == [f"counterpoint show {shown} --worst"]
    result = {"evaluation": "held", "step": 6, "time": 1.0, "metrics": {"pass@1": {"value": 0.5}}}
    write_lines(job / f"run_{run_id}" / evaluations, [result])
    weights = job / f"run_{run_id}" / "broadcast" / "step_6"
    with publish_directory(weights, durable=False) as partial:
        (partial / "model.safetensors").touch()
    evaluate = f"counterpoint eval '{job / 'job.toml'}' --checkpoint '{weights}'"
    assert (await said())[1] == [f"counterpoint show {shown} --worst", evaluate]
    guest = job / "run_guest"
    write_lines(guest / "metrics.jsonl", [shipped_line(1, time.time())])
    write_lines(guest / evaluations, [result])
    (guest / "control").mkdir()
    (guest / "control" / "orch.toml").write_text("steps = 1\n")
    write_lines(job / "trainer" / "metrics.jsonl", [trained_line(1, "guest")])
    weights.rename(guest / "weights")
    with publish_directory(guest / "broadcast" / "step_1", durable=False) as partial:
        (partial / "model.safetensors").touch()
    assert (await said())[1] == [f"counterpoint show {shown} --run {run_id} --worst"], "its file knows no guest"
    (guest / "weights").rename(weights)
    (job / f"run_{run_id}" / "control" / "evicted.txt").write_text("too long")
    text, commands = await said()
    assert ("problems above" in text, commands) == (True, [])


async def test_a_run_without_a_step_has_no_curves(tmp_path: Path) -> None:
    run = tmp_path / "job" / "run_new" / "control"
    run.mkdir(parents=True)
    (run / "orch.toml").write_text("steps = 7\n")
    assert (await get(tmp_path / "job", "/jobs/job/runs/new"))["metrics"] == []


async def test_a_run_that_is_about_to_begin_is_there_and_a_link_is_not(tmp_path: Path) -> None:
    run_ids = write_job(tmp_path / "job", 2, 5)
    for run_id in run_ids:
        (tmp_path / "job" / f"run_{run_id}").rename(tmp_path / run_id)
    (tmp_path / "job" / f"run_{run_ids[1]}").symlink_to(tmp_path / run_ids[1])
    detail = await get(tmp_path / "job", f"/jobs/job/runs/{run_ids[0]}")
    assert (detail["run"]["step"], detail["configuration"], detail["changes_error"]) == (0, {}, "")
    async with api(tmp_path / "job") as client:
        assert (await client.get(f"/jobs/job/runs/{run_ids[1]}"))[0] == 404


async def test_the_overview_says_what_status_says(tmp_path: Path) -> None:
    write_job(tmp_path / "job", 2, 30)
    guest = tmp_path / "job" / "run_guest"
    write_lines(
        guest / "metrics.jsonl", [shipped_line(step, 5.0 * step) | {"staleness/lossless": 6} for step in range(1, 4)]
    )
    (guest / "control").mkdir()
    (guest / "control" / "orch.toml").write_text("steps = 7\n[lag]\nwarn_max_seconds = 0.001\n")
    (guest / "control" / "evicted.txt").write_text("its loss is nan")
    answer = await get(tmp_path / "job", "/overview")
    status = read_status(tmp_path / "job").as_json()
    assert len(status["runs"]) == 3
    for expected, run in zip(status["runs"], answer["runs"], strict=True):
        metrics = expected["metrics"]
        assert run == run | {
            "run": expected["run_id"], "state": expected["state"], "step": expected["step"], "steps": expected["steps"],
            "trained": expected["trained"], "tokens_per_second": pytest.approx(expected["tokens_per_second"]),
            "reward": metrics["reward/mean"], "staleness": metrics["staleness/mean"],
            "lag_p99": metrics["event_loop_lag/p99"], "lag_max": metrics["event_loop_lag/max"],
            "mismatch_kl": metrics.get("mismatch_kl"),
        }  # fmt: skip
    assert [(each["kind"], each["run"], each["reason"]) for each in answer["problems"]] == [
        ("evicted", "guest", "evicted: its loss is nan")
    ]
    assert [each["staleness_lossless"] for each in answer["runs"]] == [None, None, 6]


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [f"steps = {'9' * 400}", f"a{'.a' * 400_000} = 1", f"[lag]\na{'.a' * 400_000} = 1"])
async def test_a_guests_hostile_configuration_hides_no_other(tmp_path: Path, hostile: str) -> None:
    """More steps than can be computed with, and keys that a parser would take hours for."""
    run_ids = write_job(tmp_path / "job", 2, 30)
    guest = tmp_path / "job" / "run_guest"
    write_lines(guest / "metrics.jsonl", [shipped_line(step, 5.0 * step) for step in range(1, 4)])
    (guest / "control").mkdir()
    (guest / "control" / "orch.toml").write_text(f"steps = {'9' * 400}\n")
    with running(tmp_path / "job", [*run_ids, "guest"]):
        answer = await get(tmp_path / "job", "/overview")
    assert {run["run"]: run["steps"] for run in answer["runs"]}["guest"] is None
    assert len(answer["runs"]) == 3


def test_the_overview_follows_a_job_also_back(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    make_job(tmp_path)
    metrics, reader = tmp_path / "run_test" / "metrics.jsonl", job_facts.JobReader(tmp_path)

    def steps() -> tuple[int, int]:
        (run,) = reader.read().runs
        return run.history.step, max(run.history.trained, default=0)

    assert steps() == (0, 0)
    for step in range(1, 30):
        write_lines(metrics, [shipped_line(step, 10.0 * step)])
        append_line(tmp_path / "trainer" / "metrics.jsonl", trained_line(step))
        assert steps() == (step, step)
    os.truncate(metrics, metrics.read_bytes().index(b'{"step": 11,'))  # a resume from step 10
    MetricsFile(tmp_path / "trainer" / "metrics.jsonl").truncate({"test": 10})
    assert steps() == (10, 10)
    write_lines(metrics, [shipped_line(11, 1000.0)])
    assert steps() == (11, 10)


def test_the_overview_reads_only_the_ends_of_files(tmp_path: Path) -> None:
    (run,) = write_job(tmp_path / "job", 1, 20)
    for path in (tmp_path / "job" / f"run_{run}" / "metrics.jsonl", tmp_path / "job" / "trainer" / "metrics.jsonl"):
        lines = path.read_bytes()
        with path.open("wb") as file:
            file.truncate(2**33)  # a hole of 8 GiB before them
            file.seek(0, os.SEEK_END)
            file.write(b"\n" + lines)
    before = bytes_read()
    (facts,) = job_facts.JobReader(tmp_path / "job").read().runs
    assert (facts.history.step, max(facts.history.trained)) == (20, 20)
    assert bytes_read() - before < 2**23


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


async def test_a_directory_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    answer = await get(tmp_path / "job", "/overview")
    assert [(each["kind"], each["severity"]) for each in answer["problems"]] == [("unreadable", "error")]


def test_a_run_that_was_just_resumed_is_not_stalled(tmp_path: Path) -> None:
    now = time.time()
    (run,) = write_job(tmp_path / "job", 1, 20, wanted=30, ended=now - 10_000)
    with running(tmp_path / "job", [run]):
        assert problems_of(job_facts.JobReader(tmp_path / "job").read()) == []
        for path in ("orchestrator.lock", "control"):
            os.utime(tmp_path / "job" / f"run_{run}" / path, (now - 9_000, now - 9_000))
        (problem,) = problems_of(job_facts.JobReader(tmp_path / "job").read())
    assert (problem.kind, problem.run) == (Kind.STALLED, run)
    assert problem.since == pytest.approx(now - 9_000)


@pytest.mark.slow
async def test_hostile_files_do_not_keep_others_from_being_shown(tmp_path: Path) -> None:
    write_job(tmp_path / "job", 1, 5)
    for name in ("fifo", "garbage", "nothing"):
        (tmp_path / "job" / f"run_{name}" / "control").mkdir(parents=True)
        (tmp_path / "job" / f"run_{name}" / "control" / "orch.toml").write_bytes(b"steps = [[[[" + b"\0" * 100)
    os.mkfifo(tmp_path / "job" / "run_fifo" / "metrics.jsonl")
    garbage = b'{"step": 1e999}\n{"step": 1, "time": NaN}\n[]\n' + b"\xff" * 100_000 + b"\n" + b"[" * 100_000 + b"\n"
    (tmp_path / "job" / "run_garbage" / "metrics.jsonl").write_bytes(garbage)
    (tmp_path / "job" / "run_link").symlink_to("/")
    (tmp_path / "job" / "trainer" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "job" / "trainer" / "metrics.jsonl")
    async with api(tmp_path / "job") as client:
        status, answer = await client.get("/overview")
        assert status == 200
        assert {run["run"]: run["step"] for run in answer["runs"]} == {
            "run-0000": 5, "fifo": 0, "garbage": 0, "nothing": 0,
        }  # fmt: skip
        assert {each["kind"] for each in answer["problems"]} == {"unreadable"}
        for run in ("fifo", "garbage", "nothing", "run-0000"):
            for path in (f"/jobs/job/runs/{run}", f"/jobs/job/runs/{run}/loop"):
                assert (await client.get(path))[0] == 200
            status, answer = await client.get("/jobs/job/metrics", run=run, metric="loss")
            assert (status, answer["series"][0]["x"]) == (200, [])
            assert answer["unreadable"]
        for path in ("/jobs/job/runs/link", "/jobs/job/runs/none", "/jobs/job/runs/link/loop"):
            assert (await client.get(path))[0] == 404


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"runs": 3}', b'{"orchestrator": {"run_id": "../x"}}', b"{", b"\0" * 9]
)
async def test_a_damaged_job_is_shown_as_that(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_bytes(content)
    (tmp_path / "job" / "processes.json").write_bytes(b'{"job": "stopped", "workers": [{"name": 3}, null]}')
    answer = await get(tmp_path / "job", "/overview")
    assert [each["kind"] for each in answer["problems"]] in (["unreadable"], [])
    assert answer["runs"] == []
    assert answer["jobs"][0]["workers"] == []


@pytest.mark.slow
async def test_curves_of_several_runs_come_in_one_answer(tmp_path: Path) -> None:
    run_ids = write_job(tmp_path / "job", 2, 300)
    metrics = ["reward/mean", "loss", "seconds_a_step"]
    answer = await get(tmp_path / "job", "/jobs/job/metrics", run=run_ids, metric=metrics, points=50)
    assert [(each["run"], each["metric"]) for each in answer["series"]] == [
        (run, name) for run in run_ids for name in metrics
    ]
    assert all(len(each["x"]) == 50 and not each["exact"] for each in answer["series"])
    zoomed = await get(tmp_path / "job", "/jobs/job/metrics", run=run_ids[0], metric="loss", x_from=101, x_to=130)
    (series,) = zoomed["series"]
    assert series["exact"]
    assert series["x"] == [*range(101, 131)]
    assert series["low"] == series["mean"] == series["high"]


@pytest.mark.slow
async def test_changes_and_copies_are_annotations(tmp_path: Path) -> None:
    (run,) = write_job(tmp_path / "job", 1, 20)
    run_dir = tmp_path / "job" / f"run_{run}"
    change = Change(
        request_id="r1", step=8, changes={"training.learning_rate": 1e-4}, given={"training.learning_rate": 1e-5}
    )
    write_journal(run_dir, [change])
    copied = {"run_id": run, "step": 21, "time": 1.0, "copied/run": "other", "copied/step": 9}
    append_line(tmp_path / "job" / "trainer" / "metrics.jsonl", copied)
    found = await get(tmp_path / "job", "/jobs/job/metrics", run=run, metric="loss")
    assert [(each["kind"], each["step"], each["x"]) for each in found["annotations"]] == [
        ("change", 8, 8),
        ("copy", 21, 21),
    ]
    detail = await get(tmp_path / "job", f"/jobs/job/runs/{run}")
    assert detail["changes"] == [{"step": 8, "changes": change.changes, "given": change.given}]
    assert {"loss", "reward/mean", "seconds_a_step"} <= {*detail["metrics"]}
    (run_dir / "control" / "changes.json").write_text("{")
    damaged = await get(tmp_path / "job", f"/jobs/job/runs/{run}")
    assert "changes.json" in damaged["changes_error"]


@pytest.mark.slow
async def test_the_loop_names_the_code_at_its_peaks(tmp_path: Path) -> None:
    (run,) = write_job(tmp_path / "job", 1, 1010)
    answer = await get(tmp_path / "job", f"/jobs/job/runs/{run}/loop", peaks=3, points=100)
    assert {peak["step"] for peak in answer["peaks"][:2]} == {500, 1000}
    for peak in answer["peaks"][:2]:
        (blamed,) = peak["blame"]
        assert (blamed["function"], blamed["file"], blamed["line"]) == ("Grader.score", "tasks/grader.py", 41)
        assert peak["seconds"] > 0.06
    assert answer["peaks"][2]["blame"] == []
    assert answer["late"] == 2
    assert answer["seconds_by_kind"]["callback"] == pytest.approx(0.12)
    assert [each["metric"].removeprefix("event_loop_lag/") for each in answer["series"]] == ["median", "p99", "max"]
    window = await get(tmp_path / "job", f"/jobs/job/runs/{run}/loop", x_from=600, x_to=1100, peaks=1)
    assert [peak["step"] for peak in window["peaks"]] == [1000]
    assert window["late"] == 1


async def test_secrets_are_not_shown(tmp_path: Path) -> None:
    (run,) = write_job(tmp_path / "job", 1, 3)
    file = tmp_path / "job" / f"run_{run}" / "control" / "orch.toml"
    args = """
[[environments]]
name = "search"
kind = "search"
[environments.args]
api_key = "PLAIN1"
headers = { Authorization = "Bearer PLAIN2", X-Id = "PLAIN6" }
command = "curl -H 'X: Bearer PLAIN7'"
other = "sk-PLAIN8abcdefgh"
mirror = "https://user:a@PLAIN9@search.example"
tokens = ["PLAIN3"]
credentials = { user = "PLAIN6", more = [{ value = "PLAIN7" }] }
max_tokens = 77
key_file = "keys/search.key"
url = "https://user:PLAIN4@search.example/find?q=1&access_token=PLAIN5"
"""
    file.write_text(file.read_text() + args)
    detail = await get(tmp_path / "job", f"/jobs/job/runs/{run}")
    text = json.dumps(detail)
    assert "PLAIN" not in text
    shown = detail["configuration"]["environments"][-1]["args"]
    assert (shown["max_tokens"], shown["key_file"], shown["api_key"]) == (77, "keys/search.key", "(hidden)")
    assert detail["configuration"]["sampling"]["max_tokens"] > 0


async def test_a_run_says_which_side_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_id,) = write_job(tmp_path / "job", 1, 30)
    waits = [trained_line(step, run_id) | {"phase/wait": 1.0, "phase/train": 1.0} for step in range(31, 40)]
    write_lines(tmp_path / "job" / "trainer" / "metrics.jsonl", waits)
    assert [run["balance"] for run in (await get(tmp_path / "job", "/overview"))["runs"]] == [""]
    monkeypatch.setattr(job_facts, "is_running", lambda directory: True)
    async with api(tmp_path / "job") as client:
        _, detail = await client.get(f"/jobs/job/runs/{run_id}")
    assert detail["run"]["balance"].startswith("the trainer waits ")
