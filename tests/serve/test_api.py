"""The API as a caller sees it: endpoints, tokens, errors, caching."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from counterpoint.serve.endpoint import ROOT, Endpoint, NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.errors import UserError
from tests.serve.api_client import ADMIN, READ, api


class Named(Config):
    job: Identifier
    points: int = 100
    runs: list[Identifier] = []


class Said(Config):
    text: str


def endpoint_of(answer: Any, **fields: Any) -> Endpoint[Any, Any]:
    return Endpoint(**{"method": "GET", "path": "/jobs/{job}/said", "summary": "Says."} | fields,
                    parameters=Named, result=Said, answer=answer)  # fmt: skip


def say(jobs: Jobs, parameters: Named) -> Said:
    return Said(text=f"{jobs.get(parameters.job).id} {parameters.points} {','.join(parameters.runs)}")


async def test_jobs_are_listed_in_order_with_unique_ids(tmp_path: Path) -> None:
    for name in ("a/out", "b/out"):
        (tmp_path / name / "run_x").mkdir(parents=True)
    async with api(tmp_path / "a/out", tmp_path / "b/out", tmp_path / "gone") as client:
        status, answer = await client.get("/jobs")
    assert status == 200
    assert [(job["id"], job["kind"]) for job in answer["jobs"]] == [
        ("out", "job"),
        ("out-2", "job"),
        ("gone", "missing"),
    ]


async def test_parameters_come_from_path_and_query(tmp_path: Path) -> None:
    async with api(tmp_path / "j", endpoints=(endpoint_of(say),)) as client:
        assert await client.get("/jobs/j/said", points=7, runs=["a", "b"]) == (200, {"text": "j 7 a,b"})
        for wrong in ({"points": "many"}, {"unknown": "1"}, {"job": "k"}, {"runs": "../x"}, {"points": ["1", "2"]}):
            status, answer = await client.get("/jobs/j/said", **wrong)
            assert (status, answer["error"]["where"].split(".")[0]) == (400, next(iter(wrong)))


async def test_a_misspelt_parameter_is_named_and_not_the_one_that_is_missing_for_it(tmp_path: Path) -> None:
    async with api(tmp_path / "j", endpoints=(endpoint_of(say, path="/said"),)) as client:
        status, answer = await client.get("/said", jop="j")
    assert (status, answer["error"]["what"]) == (400, "there is no parameter 'jop'")


@pytest.mark.parametrize("token", [None, "", "wrong-token-of-the-tests", READ[:-1]])
async def test_nothing_of_the_api_is_shown_without_a_token(tmp_path: Path, token: str | None) -> None:
    async with api(tmp_path) as client:
        for path in ("/jobs", "/openapi.json", "/nothing"):
            response = await client.request("GET", ROOT + path, token)
            assert response.status == 401
            assert "Bearer" in response.headers["WWW-Authenticate"]


async def test_the_read_token_changes_nothing(tmp_path: Path) -> None:
    asked: list[Named] = []

    def note(jobs: Jobs, parameters: Named) -> Said:
        asked.append(parameters)
        return Said(text="done")

    changing = endpoint_of(note, method="POST", access="change")
    async with api(tmp_path / "j", endpoints=(changing,)) as client:
        response = await client.request("POST", f"{ROOT}/jobs/j/said", READ, json={})
        assert (response.status, asked) == (403, [])
        assert await client.post("/jobs/j/said", points=3) == (200, {"text": "done"})
        assert [parameters.points for parameters in asked] == [3]


async def test_errors_are_problems(tmp_path: Path) -> None:
    raised: list[Exception] = [
        NotFound("no such run", where="run"),
        UserError("wrong"),
        OSError(28, "No space"),
        KeyError(),
    ]

    def fail(jobs: Jobs, parameters: Named) -> Said:
        raise raised[parameters.points]

    async with api(tmp_path, endpoints=(endpoint_of(fail),)) as client:
        answers = [await client.get("/jobs/j/said", points=number) for number in range(4)]
    assert [status for status, _ in answers] == [404, 400, 507, 500]
    assert all(answer["error"]["what"] for _, answer in answers)


async def test_an_unchanged_answer_is_not_sent_again(tmp_path: Path) -> None:
    async with api(tmp_path / "j", endpoints=(endpoint_of(say),)) as client:
        tag = (await client.request("GET", f"{ROOT}/jobs/j/said")).headers["ETag"]
        again = await client.request("GET", f"{ROOT}/jobs/j/said", headers={"If-None-Match": tag})
        other = await client.request("GET", f"{ROOT}/jobs/j/said?points=3", headers={"If-None-Match": tag})
    assert (again.status, other.status) == (304, 200)


async def test_many_viewers_cost_one_computation(tmp_path: Path) -> None:
    import asyncio

    computed, go_on = [], threading.Event()

    def wait(jobs: Jobs, parameters: Named) -> Said:
        computed.append(parameters.points)
        go_on.wait(60)
        return Said(text="once")

    async with api(tmp_path, endpoints=(endpoint_of(wait, fresh_seconds=1000.0),)) as client:
        asking = [asyncio.create_task(client.get("/jobs/j/said")) for _ in range(20)]
        await asyncio.sleep(0)
        go_on.set()
        answers = await asyncio.gather(*asking)
    assert (computed, answers) == ([100], [(200, {"text": "once"})] * 20)


async def test_the_page_needs_no_token_and_may_load_nothing_foreign(tmp_path: Path) -> None:
    async with api(tmp_path) as client:
        response = await client.request("GET", "/", None)
        assert (response.status, response.content_type) == (200, "text/html")
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
        for path in ("/main.py", "/%2e%2e/main.py", "/..%2fmain.py", "/vendor/", "/vendor/README.md", "/a%00b"):
            assert (await client.request("GET", path, ADMIN)).status == 404
