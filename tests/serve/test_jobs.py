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
from tests.serve.api_client import api


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
            many = range(1, THREADS["read"] + MOST_WAITING + 10)
            statuses = {status for status, _ in await asyncio.gather(*(client.get("/hang", number=n) for n in many))}
            assert statuses == {503}
            assert (await client.get("/answer", number=2))[0] == 503  # at once: no thread will be free soon
            assert await client.post("/change", number=3) == (200, {"number": 3})
            for _ in range(THREADS["change"]):
                assert (await client.post("/hang"))[0] == 503
            assert await client.post("/stop", number=4) == (200, {"number": 4})
        finally:
            go_on.set()


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
