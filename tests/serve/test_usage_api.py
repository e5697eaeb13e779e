"""What a job's processes take of their machine: what its file says is shown, whatever is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serve.api_client import api
from tests.support.jobs import write_lines

HOSTILE = "<b>\u202e\x1b[2J"


async def usage(directory: Path) -> list[dict[str, Any]]:
    async with api(directory) as client:
        status, answer = await client.get("/jobs/job/usage")
    assert status == 200, answer
    series: list[dict[str, Any]] = answer["series"]
    return series


async def test_figures_are_series_of_processes_and_gpus(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    assert await usage(directory) == []
    hostile: list[dict[str, Any]] = [
        {"time": "now", "workers": {}, "gpus": {}}, {"time": 3.0, "workers": [], "gpus": {}}, {"time": 3.0},
        {"time": 3.0, "workers": {"trainer": 1, HOSTILE: {"cpu": "much", "memory": 5}}, "gpus": {}},
    ]  # fmt: skip
    lines = [
        {"time": float(time), "workers": {"trainer": {"cpu": 0.5 * time, "memory": 10**9}}, "gpus": {"0": 0.25}}
        for time in (1, 2)
    ]
    write_lines(directory / "usage.jsonl", [*lines, *hostile])
    found = {(one["figure"], one["name"]): (one["time"], one["value"]) for one in await usage(directory)}
    assert found == {
        ("cpu", "trainer"): ([1.0, 2.0], [0.5, 1.0]),
        ("memory", "trainer"): ([1.0, 2.0], [10**9, 10**9]),
        ("memory", "<b>\\u202e\\x1b[2J"): ([3.0], [5.0]),
        ("gpu", "0"): ([1.0, 2.0], [0.25, 0.25]),
    }


async def test_a_long_job_is_drawn_with_few_points(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    write_lines(
        directory / "usage.jsonl",
        [{"time": float(time), "workers": {"trainer": {"cpu": 1.0}}, "gpus": {}} for time in range(2_000)],
    )
    [one] = await usage(directory)
    assert len(one["time"]) == len(one["value"]) == 300
    assert {*one["value"]} == {1.0}
