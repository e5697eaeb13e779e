"""Directories that appear, vanish and are replaced, and the readers that follow their files."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest

import counterpoint.serve.jobs
from counterpoint.serve.answers import MOST_WAITING, THREADS
from counterpoint.serve.endpoint import Endpoint
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config
from counterpoint.transport.files.lock import take_lock
from tests.serve.api_client import api
from tests.support.jobs import trained_line, write_lines


class Reader:
    """Counts how often it was used."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        self.directory = directory
        self.uses = 0


def use(jobs: Jobs, *arguments: int) -> int:
    with jobs.reading(jobs.get("job"), Reader, *arguments) as reader:
        reader.uses += 1
        return reader.uses


def test_a_reader_is_kept_until_its_directory_is_another(tmp_path: Path) -> None:
    jobs, job = Jobs([tmp_path / "job"]), tmp_path / "job"
    assert [use(jobs), use(jobs)] == [1, 2]
    job.mkdir()
    assert [use(jobs), use(jobs), use(jobs, 7)] == [1, 2, 1]
    job.rename(tmp_path / "job.1")
    job.mkdir()
    assert use(jobs) == 1
    shutil.rmtree(job)
    assert use(jobs) == 1


def test_a_folder_of_jobs_stands_for_the_jobs_in_it(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    for name in ("b", "serve", "with_run/run_x"):
        (outputs / name).mkdir(parents=True)
    jobs = Jobs([outputs, tmp_path / "away"])
    assert [job.id for job in jobs] == ["with_run", "away"]
    (outputs / "b" / "job.json").write_text("{}")
    (outputs / "link").symlink_to(outputs / "b")
    assert jobs.get("b").directory == outputs / "b", "what begins later"
    assert [job.id for job in jobs] == ["b", "with_run", "away"]
    (outputs / "job.json").write_text("{}")
    assert [job.id for job in jobs] == ["outputs", "away"], "a job's own folders are its own"


def test_what_fresh_moved_aside_is_not_listed_unless_it_is_named(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    for name in ("demo", "demo.1", "rate-0", "rate-0.3", "alone.2"):
        (outputs / name).mkdir(parents=True)
        written = name.removesuffix(".1")
        (outputs / name / "job.json").write_text(f'{{"output_dir": "outputs/{written}"}}')
    (outputs / "demo.2" / "run_x").mkdir(parents=True)  # of `counterpoint sft`, which has no `job.json`
    assert [job.id for job in Jobs([outputs])] == ["alone.2", "demo", "rate-0", "rate-0.3"]
    assert [job.id for job in Jobs([outputs / "demo.1"])] == ["demo.1"]


async def test_the_fine_tuning_of_a_job_is_a_job_of_its_own_with_steps_loss_and_progress(tmp_path: Path) -> None:
    job = tmp_path / "warm"
    (tuned := job / "sft" / "run_sft").mkdir(parents=True)
    (job / "job.json").write_text('{"orchestrator": {"run_id": "one", "steps": 9}, "runs": [], "sft": {}}')
    (tuned / "sft.json").write_text("{}")
    (tuned / "control").mkdir()
    (tuned / "control" / "orch.toml").write_text("steps = 60\n")
    lines = [trained_line(step, "sft") | {"time": 100.0 + 2 * step, "loss": 1 / step} for step in range(1, 13)]
    write_lines(job / "sft" / "trainer" / "metrics.jsonl", lines)
    locks = [take_lock(each / "job.lock", "taken") for each in (job, job / "sft")]
    try:
        async with api(job) as client:
            _, shown = await client.get("/overview")
            _, curves = await client.get("/jobs/warm-sft/metrics", run="sft", metric="loss")
    finally:
        for lock in locks:
            os.close(lock)
    assert [(run["job"], run["run"], run["state"]) for run in shown["runs"]] == [
        ("warm", "one", "fine-tuning"),
        ("warm-sft", "sft", "running"),
    ]
    run = shown["runs"][1]
    assert (run["step"], run["steps"], run["loss"], run["updated"]) == (12, 60, pytest.approx(1 / 12), 124.0)
    assert (run["fine_tuning"], run["alive"], run["seconds_a_step"], run["seconds_left"]) == (True, True, 2.0, 96.0)
    assert len(curves["series"][0]["x"]) == 12


@pytest.mark.parametrize(("lives", "state"), [(True, "driven"), (False, "not running")])
async def test_a_driven_run_has_the_steps_that_were_trained(tmp_path: Path, lives: bool, state: str) -> None:
    job = tmp_path / "service"
    (job / "run_one" / "control").mkdir(parents=True)
    (job / "job.json").write_text('{"orchestrator": {"run_id": "none", "steps": 1}, "runs": [], "stay": true}')
    (job / "run_one" / "control" / "orch.toml").write_text('run_id = "one"\ndriven = true\n')
    (job / "trainer").mkdir()
    (job / "trainer" / "runs.json").write_text('{"runs": [{"run": "one", "step": 12}]}')
    lock = take_lock(job / "job.lock", "taken") if lives else None
    try:
        async with api(job) as client:
            _, shown = await client.get("/overview")
    finally:
        if lock is not None:
            os.close(lock)
    [run] = [each for each in shown["runs"] if each["run"] == "one"]
    assert (run["state"], run["step"], run["alive"]) == (state, 12, lives)


def test_of_many_jobs_in_a_folder_the_newest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterpoint.serve.jobs, "MOST_JOBS", 2)
    for age, name in enumerate(["c", "a", "b"]):
        (tmp_path / name / "run_x").mkdir(parents=True)
        os.utime(tmp_path / name, (1e9 + age, 1e9 + age))
    assert [job.id for job in Jobs([tmp_path])] == ["a", "b"]
    os.utime(tmp_path / "c", (2e9, 2e9))
    assert [job.id for job in Jobs([tmp_path])] == ["b", "c"]


def test_a_reader_that_failed_is_used_again_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterpoint.serve.jobs, "MOST_READERS", 2)
    jobs = Jobs([tmp_path / "job"])
    assert use(jobs) == 1
    with pytest.raises(KeyError), jobs.reading(jobs.get("job"), Reader):
        raise KeyError
    assert [use(jobs), use(jobs, 1), use(jobs, 2), use(jobs, 1), use(jobs)] == [2, 1, 1, 2, 1]


def test_a_reader_has_one_user_at_a_time(tmp_path: Path) -> None:
    jobs, entered, go_on = Jobs([tmp_path / "job"]), threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        with jobs.reading(jobs.get("job"), Reader):
            entered.set()
            go_on.wait(60)
            order.append("first")

    def follow() -> None:
        with jobs.reading(jobs.get("job"), Reader):
            order.append("second")

    threads = [threading.Thread(target=hold), threading.Thread(target=follow)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "second"]


class Number(Config):
    number: int = 0


async def test_an_answer_that_hangs_holds_one_thread_and_nobody_for_long(tmp_path: Path) -> None:
    go_on = threading.Event()

    def hang(jobs: Jobs, parameters: Number) -> Number:
        go_on.wait(60)
        return parameters

    def answer(jobs: Jobs, parameters: Number) -> Number:
        return parameters

    endpoints = (
        Endpoint("GET", "/hang", "Hangs.", Number, Number, hang, seconds=0.05),
        Endpoint("GET", "/answer", "Answers.", Number, Number, answer, seconds=60.0),
        Endpoint("POST", "/change", "Changes.", Number, Number, answer, "change"),
        Endpoint("POST", "/hang", "Hangs.", Number, Number, hang, "change", seconds=0.05),
        Endpoint("POST", "/stop", "Changes at once.", Number, Number, answer, "change", is_urgent=True),
    )
    async with api(tmp_path / "job", endpoints=endpoints) as client:
        try:
            for _ in range(3 * THREADS["read"]):
                status, problem = await client.get("/hang")
                assert (status, "took more than 0.05 s" in problem["error"]["what"]) == (503, True)
            assert await client.get("/answer", number=1) == (200, {"number": 1})
            many = range(1, THREADS["read"] + MOST_WAITING["read"] + 10)
            statuses = {status for status, _ in await asyncio.gather(*(client.get("/hang", number=n) for n in many))}
            assert statuses == {503}
            assert (await client.get("/answer", number=2))[0] == 503  # at once: no thread will be free soon
            assert await client.post("/change", number=3) == (200, {"number": 3})
            for _ in range(THREADS["change"]):
                assert (await client.post("/hang"))[0] == 503
            assert await client.post("/stop", number=4) == (200, {"number": 4})
        finally:
            go_on.set()


async def test_there_is_one_check_at_a_time_and_it_keeps_no_view_waiting(tmp_path: Path) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def check(jobs: Jobs, parameters: Number) -> Number:
        begun.release()
        go_on.wait(60)
        return parameters

    endpoints = (
        Endpoint("GET", "/check", "Checks.", Number, Number, check, seconds=60.0, is_check=True),
        Endpoint("GET", "/rollouts", "Reads records.", Number, Number, lambda _, given: given, reads_records=True),
    )
    async with api(tmp_path / "job", endpoints=endpoints) as client:
        first = asyncio.create_task(client.get("/check", number=1))
        try:
            await asyncio.to_thread(begun.acquire)
            assert (await client.get("/check", number=2))[0] == 503
            assert (await client.get("/rollouts", number=3))[0] == 200
        finally:
            go_on.set()
        assert await first == (200, {"number": 1})
        assert (await client.get("/check", number=4))[0] == 200


async def test_lists_of_rollouts_keep_no_other_view_waiting(tmp_path: Path) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def read(jobs: Jobs, parameters: Number) -> Number:
        begun.release()
        go_on.wait(60)
        return parameters

    def answer(jobs: Jobs, parameters: Number) -> Number:
        return parameters

    endpoints = (
        Endpoint("GET", "/rollouts", "Reads records.", Number, Number, read, seconds=60.0, reads_records=True),
        Endpoint("GET", "/answer", "Answers.", Number, Number, answer, seconds=60.0),
    )
    async with api(tmp_path / "job", endpoints=endpoints) as client:
        viewers = [asyncio.create_task(client.get("/rollouts", number=n)) for n in range(2 * THREADS["read"])]
        try:
            for _ in range(THREADS["records"]):
                await asyncio.to_thread(begun.acquire)
            assert await client.get("/answer", number=1) == (200, {"number": 1})
            assert not any(viewer.done() for viewer in viewers)
        finally:
            go_on.set()
        assert [status for status, _ in await asyncio.gather(*viewers)] == [200] * len(viewers)
