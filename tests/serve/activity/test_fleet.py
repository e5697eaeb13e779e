"""The fleet: what several runs say of shared servers, joined; what old and hostile files say does not pass for the present."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.job.reading.activity.fleet import STALE_SECONDS
from counterpoint.orchestrator.activity import FLEET_FILE
from counterpoint.trainer.telemetry.published import RUNS_FILE
from tests.serve.activity.jobs import SERVERS, fleet, write_fleet
from tests.serve.api_client import api


async def test_runs_that_share_servers_are_joined(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_fleet(job, "one", fleet("one"))
    second = fleet("two")
    second["servers"] = [second["servers"][1] | {"state": "loading", "reason": "loading weights", "version": 9}]
    write_fleet(job, "two", second)
    write_fleet(job, "dead", fleet("dead", time=time.time() - 10 * STALE_SECONDS))
    write_fleet(job, "over", fleet("over", ended=True))
    async with api(job) as client:
        status, answer = await client.get("/jobs/job/fleet")
    assert status == 200
    assert answer["current"]
    assert (answer["waiting"], answer["capacity"], answer["trainer"]) == (10, 64, None)
    first, shared = answer["servers"]
    assert (first["url"], first["state"], first["in_flight"], first["limit"]) == (SERVERS[0], "serving", 4, 16)
    assert (shared["state"], shared["reason"]) == ("loading", "loading weights")
    assert (shared["in_flight"], shared["limit"], shared["tokens_per_second"], shared["restarts"]) == (8, 32, 200.0, 1)
    assert shared["cache_hit_share"] == pytest.approx(0.5)
    assert shared["engine"] == {"running": 3, "waiting": 1, "cache_use": 0.25, "preemptions": 0}
    assert sorted((view["run"], view["version"]) for view in shared["views"]) == [("one", 3), ("two", 9)]


async def test_a_jobs_list_says_which_servers_the_runs_use(tmp_path: Path) -> None:
    job = tmp_path / "job"
    second = fleet("one")["servers"][1] | {"state": "out", "reason": "nobody \u202eanswers"}
    write_fleet(job, "one", fleet("one", servers=[fleet("one")["servers"][0], second]))
    (job / "job.json").write_bytes(orjson.dumps({"orchestrator": {"inference": {"urls": SERVERS}}}))
    async with api(job) as client:
        _, answer = await client.get("/jobs/job/servers")
    said = [(server["state"], server["reason"], server["used_by"]) for server in answer["servers"]]
    assert said == [("serving", "", ["one"]), ("out", "nobody \\u202eanswers", [])]


async def test_the_last_state_stays_when_all_orchestrators_are_gone(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_fleet(job, "old", fleet("old", time=100.0))
    write_fleet(job, "late", fleet("late", time=200.0, ended=True, waiting=0))
    async with api(job) as client:
        _, answer = await client.get("/jobs/job/fleet")
    assert (answer["current"], answer["time"], answer["waiting"]) == (False, 200.0, 0)
    assert {view["run"] for server in answer["servers"] for view in server["views"]} == {"late"}


async def test_the_trainers_runs_and_slots_are_told(tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "trainer").mkdir(parents=True)
    run = {"run": "one", "stage": "training", "reason": "", "connected": True, "slot": 0, "step": 3, "steps": 9}
    content = {"format": 1, "time": time.time(), "ended": False, "slots": 4, "runs": [run, "no object", {}]}
    (job / "trainer" / RUNS_FILE).write_bytes(orjson.dumps(content))
    async with api(job) as client:
        _, answer = await client.get("/jobs/job/fleet")
    assert answer["servers"] == []
    assert not answer["current"]
    assert answer["trainer"]["slots"] == 4
    assert (
        answer["trainer"]["runs"][0] | {"stage": "training", "step": 3, "connected": True}
        == answer["trainer"]["runs"][0]
    )
    assert len(answer["trainer"]["runs"]) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"servers": 3, "time": "x"}',
        b'{"servers": [3, {}, {"url": 7}, {"url": "u", "engine": [], "last_outage": 3, "in_flight": "many", "state": ["x"]}]}',
        b'{"time": 1e308, "waiting": 1e308, "servers": [{"url": "\\u202e<b>", "requests_per_second": 1e308, "limit": -1}]}',
        b'{"time": true, "capacity": 9223372036854775807, "servers": [{"url": "u", "cache_hit_share": 1e308}]}',
        b'{"time": 1e308, "outages": [3, {"kind": "server"}, {"kind": [], "since": 1, "who": "x"}], "servers": []}',
        b'{"outages": [{"kind": "trainer", "since": 1, "who": "\\u202e<b>", "what": 3, "reason": ["x"]}]}',
        b"[" * 5000,
    ],
)
async def test_a_hostile_file_is_no_error(tmp_path: Path, content: bytes) -> None:
    job = tmp_path / "job"
    for name in ("run_one", "trainer"):
        (job / name).mkdir(parents=True)
    (job / "run_one" / FLEET_FILE).write_bytes(content)
    (job / "trainer" / RUNS_FILE).write_bytes(content)
    async with api(job) as client:
        status, answer = await client.get("/jobs/job/fleet")
    assert status == 200
    assert "\u202e" not in orjson.dumps(answer).decode()


async def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "run_one").mkdir(parents=True)
    os.mkfifo(job / "run_one" / FLEET_FILE)
    elsewhere = tmp_path / "elsewhere"
    write_fleet(elsewhere, "two", fleet("two"))
    (job / "run_two").symlink_to(elsewhere / "run_two")
    (job / "run_three").mkdir()
    (job / "run_three" / FLEET_FILE).symlink_to(elsewhere / "run_two" / FLEET_FILE)
    (job / "trainer").mkdir()
    os.mkfifo(job / "trainer" / RUNS_FILE)
    async with api(job) as client:
        status, answer = await client.get("/jobs/job/fleet")
    expected: list[Any] = []
    assert (status, answer["servers"]) == (200, expected)
