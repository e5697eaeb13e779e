"""The audit log: a change is recorded before it is carried out, or not carried out."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from counterpoint.serve.audit import FILE, FORMER, ApiCaller, AuditLog
from counterpoint.serve.endpoint import ChangeForbidden, Endpoint
from counterpoint.serve.errors import StorageFull
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config
from tests.serve.api_client import api

CALLER = ApiCaller("127.0.0.1")


class Text(Config):
    text: str


@contextmanager
def full_disk(most_bytes: int = 0) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def changing(done: list[str]) -> Endpoint[Any, Any]:
    def answer(jobs: Jobs, parameters: Text) -> Text:
        if parameters.text == "no":
            raise ChangeForbidden("not now")
        done.append(parameters.text)
        return parameters

    return Endpoint("POST", "/say", "Says.", Text, Text, answer, "change")


async def test_a_change_is_recorded_before_and_after(tmp_path: Path) -> None:
    done: list[str] = []
    async with api(tmp_path / "job", endpoints=(changing(done),)) as client:
        assert [(await client.post("/say", text=text))[0] for text in ("a", "no", "b" * 300)] == [200, 409, 200]
    lines = lines_of(tmp_path / "job.state" / FILE)
    assert [(line["event"], line.get("status")) for line in lines] == [
        ("begin", None), ("end", 200), ("begin", None), ("end", 409), ("begin", None), ("end", 200),
    ]  # fmt: skip
    assert lines[0] | {"time": 0, "change": ""} == {
        "time": 0, "change": "", "event": "begin", "client": "127.0.0.1", "operation": "post /say", "parameters": {"text": "a"},
    }  # fmt: skip
    assert lines[0]["change"] == lines[1]["change"] != lines[2]["change"]
    assert lines[4]["parameters"]["text"]["characters"] == 300
    assert (tmp_path / "job.state" / FILE).stat().st_mode & 0o077 == 0


async def test_a_full_disk_refuses_a_change_and_leaves_the_log_whole(tmp_path: Path) -> None:
    done: list[str] = []
    async with api(tmp_path / "job", endpoints=(changing(done),)) as client:
        assert (await client.post("/say", text="before"))[0] == 200
        log = tmp_path / "job.state" / FILE
        before = log.read_bytes()
        with full_disk(len(before) + 50):
            status, answer = await client.post("/say", text="during")
        assert (status, done, log.read_bytes()) == (507, ["before"], before)
        assert "nothing was changed" in answer["error"]["what"]
        assert (await client.post("/say", text="after"))[0] == 200
    assert done == ["before", "after"]


def test_the_log_is_bounded(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "state", most_bytes=2000)
    for number in range(200):
        log.begin(CALLER, "post /x", {"number": number})
    files = sorted((tmp_path / "state").glob(f"{FILE}*"))
    assert len(files) == 1 + FORMER
    assert all(file.stat().st_size <= 2000 for file in files)
    assert lines_of(log.path)[-1]["parameters"] == {"number": 199}


def test_a_link_is_not_followed_and_a_job_that_has_gone_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "other").touch()
    (tmp_path / "state" / FILE).symlink_to(tmp_path / "other")
    with pytest.raises(StorageFull):
        AuditLog(tmp_path / "state").begin(CALLER, "post /x", {})
    with pytest.raises(StorageFull):
        AuditLog(tmp_path / "gone" / "serve").begin(CALLER, "post /x", {})
    assert not (tmp_path / "gone").exists()
    assert (tmp_path / "other").read_bytes() == b""
