"""The logs of a job over HTTP: their names, the end of one, bounded and without keys; anything but a regular file is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from counterpoint.serve.api.logs import MAX_BYTES
from tests.serve.api_client import api


async def get(job: Path, path: str, **query: str) -> tuple[int, Any]:
    async with api(job) as client:
        return await client.get(path, **query)


async def test_the_end_of_a_log_is_shown(tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "trainer").mkdir(parents=True)
    (job / "orchestrator.log").write_text("".join(f"line {number}\n" for number in range(500)))
    assert (await get(job, "/jobs/job/logs"))[1] == {"names": ["orchestrator"]}
    status, answer = await get(job, "/jobs/job/logs/orchestrator", lines="2")
    assert (status, answer["lines"], answer["cut"]) == (200, ["line 498", "line 499"], True)
    assert answer["size"] == (job / "orchestrator.log").stat().st_size
    assert (await get(job, "/jobs/job/logs/trainer"))[0] == 404


async def test_a_log_is_hostile(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "a.log").write_bytes(
        b"x" * 2**22 + b"\nAuthorization: Bearer sk-abcdefghijklmnopqrstuvwxyz0123456789\n\x1b[2J\xff\n"
    )
    _, answer = await get(job, "/jobs/job/logs/a")
    assert sum(map(len, answer["lines"])) < MAX_BYTES
    assert "abcdefghijklmnop" not in str(answer)
    assert "\x1b" not in answer["lines"][-1]
    os.mkfifo(job / "b.log")
    assert (await get(job, "/jobs/job/logs/b"))[0] == 404
    assert (await get(job, "/jobs/job/logs/..%2F..%2Fetc%2Fpasswd"))[0] == 404
