"""Servers that are drained and added: the wishes of the operator, what a pool makes of their file, and what is said of that."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.cli.main import main
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.inference.pool.sources import OPERATOR_FILE, Sources
from counterpoint.job.admin.ask import NotThere, Refused
from counterpoint.job.admin.servers import (
    Server,
    add_server,
    await_use,
    drain_server,
    list_servers,
    remove_server,
    undrain_server,
)
from counterpoint.orchestrator.activity import FLEET_FILE, RunActivity
from counterpoint.transport.errors import UserError
from tests.serve.activity.jobs import fleet, write_fleet
from tests.support.fake_inference import FakeServer
from tests.support.polling import until
from tests.support.ports import free_port

ONE, TWO, NEW = "http://one:8000", "http://two:8000", "http://new:8000"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.json").write_bytes(orjson.dumps({"orchestrator": {"inference": {"urls": [ONE, f"{TWO}/"]}}}))
    return tmp_path


def unseen(url: str, origin: Any, drained: bool) -> Server:
    """A server of a job of which no run is at work."""
    return Server(url=url, origin=origin, drained=drained, state="unknown", reason="no run is at work", used_by=[])


async def test_wishes_go_before_the_configuration_and_can_be_taken_back(job: Path) -> None:
    sources = Sources(PoolConfig(urls=[ONE, TWO]), job / OPERATOR_FILE)
    assert sources.changes
    assert await sources.read() == {ONE: "", TWO: ""}, "there is no file yet"
    assert drain_server(job, f"{ONE}/") == unseen(ONE, "job", True)
    assert add_server(job, NEW) == unseen(NEW, "added", False)
    assert list_servers(job) == [
        unseen(NEW, "added", False),
        unseen(ONE, "job", True),
        unseen(TWO, "job", False),
    ]
    assert await sources.read() == {ONE: "its operator has drained it", TWO: "", NEW: ""}
    drain_server(job, TWO)
    with pytest.raises(Refused, match="the last server"):
        drain_server(job, NEW)
    assert undrain_server(job, ONE) == unseen(ONE, "job", False)
    undrain_server(job, TWO)
    remove_server(job, NEW)
    assert await sources.read() == {ONE: "", TWO: ""}
    (job / OPERATOR_FILE).unlink()
    assert await sources.read() == {ONE: "", TWO: ""}


def test_what_is_no_server_of_the_job_is_told(job: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for change in (drain_server, undrain_server, remove_server):
        with pytest.raises(NotThere, match=f"{NEW} is no server of the job"):
            change(job, NEW)
    with pytest.raises(UserError, match="holds no user or password") as refused:
        add_server(job, "http://me:hidden@10.0.0.9:8000")
    assert "hidden" not in str(refused.value)
    with pytest.raises(UserError, match="is no server: http://HOST:PORT is expected"):
        add_server(job, "file:///etc/passwd")
    with pytest.raises(Refused, match="drain it instead"):
        remove_server(job, ONE)
    with pytest.raises(NotThere, match="holds no job"):
        add_server(tmp_path_factory.mktemp("other"), NEW)
    (job / OPERATOR_FILE).write_text("http://one:8000 and more\n")
    with pytest.raises(UserError, match="repair or remove it"):
        add_server(job, NEW)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "expected an object, found list"),
        ({"orchestrator": 3}, "orchestrator: expected an object, found 3"),
        ({"orchestrator": {"inference": {"urls": 3}}}, "orchestrator.inference.urls: expected a list, found 3"),
        ({"orchestrator": {"inference": {"urls_file": 3}}}, "orchestrator.inference.urls_file: .*, found 3"),
    ],
)
def test_a_damaged_file_of_the_job_is_named_with_its_key(job: Path, content: object, said: str) -> None:
    (job / "job.json").write_bytes(orjson.dumps(content))
    for ask in (list_servers, lambda directory: add_server(directory, NEW)):
        with pytest.raises(UserError, match=rf"job.json is damaged: {said}.*; restore it"):
            ask(job)


def test_changes_at_once_lose_none(job: Path) -> None:
    urls = [f"http://new-{number}:8000" for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda url: add_server(job, url), urls))
    assert {server.url for server in list_servers(job)} == {ONE, TWO, *urls}


async def test_a_server_that_does_not_answer_is_not_said_to_be_in_use(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.orchestrator.activity.PUBLISH_SECONDS", 0.01)
    (job / "run_a").mkdir()

    async def said(*words: str) -> str:
        assert await asyncio.to_thread(main, ["servers", *words, "--job", str(job)]) == 0
        return capsys.readouterr().out

    url, late = f"http://127.0.0.1:{free_port()}", FakeServer()
    assert await said("add", url) == f"{url}  not in use: no run is at work, added by its operator\n"
    async with FakeServer() as server:
        config = PoolConfig(urls=[server.url], health_interval_seconds=0.02, startup_timeout_seconds=60)
        pool, activity = (
            InferencePool(config, operator_file=job / OPERATOR_FILE).model("a-model"),
            RunActivity(job / "run_a", "a"),
        )
        activity.observe(pool, 0)
        publishing = asyncio.create_task(activity.run())
        try:
            await pool.start()
            await until((job / "run_a" / FLEET_FILE).exists, "what the run says of its servers")
            silent = f"{url}  not in use: {url}/counterpoint/v1/status: nothing listens there (connection refused)"
            for words in ("add", url), ("undrain", url), ():
                answer = await said(*words)
                assert silent in answer
                assert "; used once it answers and has proven its weights, added by its operator\n" in answer
            assert f"{url}  drained, and out of service (" in await said("drain", url)
            await late.listen(int(url.rpartition(":")[2]))
            await until(
                lambda: "draining" in (server.state for server in list_servers(job)), "the late server to answer"
            )
            assert await said("undrain", url) == f"{url}  in use, added by its operator\n"
            assert await said("add", server.url) == f"{server.url}  in use, added by its operator\n"
        finally:
            publishing.cancel()
            await activity.close()
            await pool.release()
    await late.vanish()
    assert "not in use: no run is at work" in await said("add", url)


def test_a_server_is_in_use_when_every_run_uses_it(job: Path) -> None:
    one, two = ({"url": ONE, "state": "serving"}, {"url": TWO, "state": "loading", "reason": "loading weights"})
    write_fleet(job, "a", fleet("a", servers=[one, two | {"state": "serving"}]))
    write_fleet(job, "b", fleet("b", servers=[one, two]))
    write_fleet(job, "c", fleet("c", servers=[], ended=True))
    add_server(job, NEW)
    found = {server.url: (server.state, server.reason, server.used_by) for server in list_servers(job)}
    assert found == {
        NEW: ("unknown", "not every run has looked at it yet", []),
        ONE: ("serving", "", ["a", "b"]),
        TWO: ("loading", "loading weights", ["a"]),
    }
    assert await_use(job, ONE, timeout=60).state == "serving"
    assert await_use(job, NEW, timeout=0).state == "unknown"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("serving", "in use\n"),
        ("loading", "not in use: why; used once they are proven\n"),
        ("draining", "not in use: why\n"),
        ("out", "not in use: why; used once it answers and has proven its weights\n"),
    ],
)
def test_the_list_says_of_each_server_whether_it_is_in_use(
    job: Path, capsys: pytest.CaptureFixture[str], state: str, said: str
) -> None:
    servers = [{"url": ONE, "state": state, "reason": "why" * (state != "serving")}, {"url": TWO, "state": "serving"}]
    write_fleet(job, "a", fleet("a", servers=servers))
    assert main(["servers", "--job", str(job)]) == 0
    assert capsys.readouterr().out == f"{ONE}  {said}{TWO}  in use\n"
    write_fleet(job, "b", fleet("b", servers=[each | {"state": "serving"} for each in servers]))
    assert main(["servers", "--job", str(job)]) == 0
    assert capsys.readouterr().out.startswith(
        f"{ONE}  {'in use by b, and not by every run: why' * (state != 'serving')}"
    )
