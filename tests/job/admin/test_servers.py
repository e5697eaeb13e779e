"""Servers that are drained and added: the wishes of the operator, and what a pool makes of their file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from inference.config import PoolConfig
from inference.pool.sources import OPERATOR_FILE, Sources
from job.admin.ask import NotThere, Refused
from job.admin.servers import ServerWish, add_server, drain_server, list_servers, remove_server, undrain_server
from transport.errors import UserError

ONE, TWO, NEW = "http://one:8000", "http://two:8000", "http://new:8000"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.json").write_bytes(orjson.dumps({"orchestrator": {"inference": {"urls": [ONE, f"{TWO}/"]}}}))
    return tmp_path


async def test_wishes_go_before_the_configuration_and_can_be_taken_back(job: Path) -> None:
    sources = Sources(PoolConfig(urls=[ONE, TWO]), job / OPERATOR_FILE)
    assert sources.changes
    assert await sources.read() == {ONE: "", TWO: ""}, "there is no file yet"
    assert drain_server(job, f"{ONE}/") == ServerWish(ONE, "job", True)
    assert add_server(job, NEW) == ServerWish(NEW, "added", False)
    assert list_servers(job) == [
        ServerWish(NEW, "added", False),
        ServerWish(ONE, "job", True),
        ServerWish(TWO, "job", False),
    ]
    assert await sources.read() == {ONE: "its operator has drained it", TWO: "", NEW: ""}
    drain_server(job, TWO)
    with pytest.raises(Refused, match="the last server"):
        drain_server(job, NEW)
    assert undrain_server(job, ONE) == ServerWish(ONE, "job", False)
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
    assert {wish.url for wish in list_servers(job)} == {ONE, TWO, *urls}
