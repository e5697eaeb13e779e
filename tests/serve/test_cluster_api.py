"""A job of roles as the page asks for it: the state that its master writes, and its newest changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.cluster.job_files import JOB_FILE, STATE_FILE, JobFile, OutcomeFile, write_privately
from counterpoint.cluster.manager.events import Event, Instruction
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.master.prime_master import in_words
from counterpoint.cluster.master.state_writer import StateWriter, open_state
from counterpoint.cluster.state_file import ChangeLog
from counterpoint.job.reading.cluster import ClusterReader, ClusterState
from tests.cluster.manager.driver import Driver, command
from tests.serve.api_client import api


class Noted:
    """A manager whose changes are noted."""

    def __init__(self, manager: PrimeManager) -> None:
        self.manager = manager
        self.log = ChangeLog(manager.state)

    def handle(self, event: Event) -> list[Instruction]:
        instructions = self.manager.handle(event)
        changed = [one.worker for one in self.manager.take_changes()]
        self.log.note(changed, in_words(event), getattr(event, "reason", ""), 1.5e9)
        return instructions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


class Master:
    """Two services and a task, driven by words, and the state that a master writes of it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        roles = (command("server", count=2, max_restarts=3), command("task", task=True, after=("server",)))
        self.driver = Driver(*roles)
        self.driver.manager = self.noted = Noted(self.driver.manager)  # type: ignore[assignment]
        write_privately(directory / JOB_FILE, JobFile(spec=self.driver.manager.spec))
        self.writer = StateWriter(open_state(directory, None))

    async def write(self) -> None:
        await self.writer.write(1, self.driver.now, self.noted.manager.state, {}, self.noted.log.changes)

    async def run(self) -> None:
        self.driver.begin()
        for worker in ("server-0", "server-1", "task-0"):
            self.driver.ready(worker)
        await self.write()


def phases(state: ClusterState) -> dict[str, str]:
    assert state.saved is not None
    return {name: str(record.phase) for name, record in state.saved.job.workers.items()}


@pytest.mark.parametrize("place", [".", "control"])
async def test_workers_and_changes_are_shown_for_both_kinds_of_job(tmp_path: Path, place: str) -> None:
    job = tmp_path / "job"
    master = Master(job / place)
    await master.run()
    master.driver.exit("server-1", 1, reason="killed by \x1b[2J\u202e SIGKILL")
    await master.write()
    workers = [{"name": "task", "state": "ready", "status": "step 3\u202e", "trouble": "slow", "since": 5.0, "pid": 77}]
    (job / "processes.json").write_bytes(orjson.dumps({"job": "running", "workers": workers}))
    async with api(job) as client:
        status, answer = await client.get("/jobs/job/cluster")
    assert status == 200
    assert (answer["name"], answer["stage"], answer["epoch"], answer["problem"]) == ("job", "RUNNING", 1, "")
    assert [(role["role"], role["wanted"], role["is_task"]) for role in answer["roles"]] == [
        ("server", 2, False),
        ("task", 1, True),
    ]
    by_name = {worker["worker"]: worker for worker in answer["workers"]}
    assert {name: worker["phase"] for name, worker in by_name.items()} == {
        "server-0": "running", "server-1": "restarting", "task-0": "running",
    } or by_name["server-1"]["phase"] == "restarting"  # fmt: skip
    assert by_name["server-1"]["restarts"] == master.driver["server-1"].restarts
    assert "\\x1b[2J\\u202e SIGKILL" in by_name["server-1"]["last_death"]
    task = by_name["task-0"]
    assert (task["status"], task["trouble"], task["since"], task["pid"]) == ("step 3\\u202e", "slow", 5.0, 77)
    newest = next(change for change in answer["changes"] if change["worker"] == "server-1")
    assert (newest["after"], newest["cause"]) == ("restarting", "worker exited")
    assert newest["time"] > 1e9
    assert any(change["worker"] == "" and change["after"] == "RUNNING" for change in answer["changes"])


async def test_how_it_ended_is_shown(tmp_path: Path) -> None:
    master = Master(tmp_path / "job")
    await master.run()
    write_privately(
        tmp_path / "job/outcome.json", OutcomeFile(code=3, reason="task-0 \u202efailed", failed_worker="task-0")
    )
    async with api(tmp_path / "job") as client:
        _, answer = await client.get("/jobs/job/cluster")
    assert (answer["code"], answer["outcome"]) == (3, "task-0 \\u202efailed")


async def test_each_look_shows_the_state_as_it_was_written_last(tmp_path: Path) -> None:
    master, reader = Master(tmp_path), ClusterReader(tmp_path)
    assert (reader.read().saved, reader.read().problem) == (None, "")
    await master.run()
    assert phases(reader.read())["task-0"] == "running"
    master.driver.exit("server-1", 1, at=1000.0, reason="another")
    await master.write()
    state = reader.read()
    assert phases(state)["server-1"] == "restarting"
    assert state.saved is not None
    assert (state.saved.number, state.saved.changes[-1].reason) == (2, "another")


@pytest.mark.parametrize("damage", ["torn", "fifo", "link", "other version", "other state", "other job"])
async def test_damage_keeps_what_was_known(tmp_path: Path, damage: str) -> None:
    master, job = Master(tmp_path / "job"), tmp_path / "job"
    await master.run()
    reader = ClusterReader(job)
    known = phases(reader.read())
    file = job / STATE_FILE
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:500])
    elif damage == "fifo":
        file.unlink()
        file.mkdir()
    elif damage == "link":
        file.unlink()
        file.symlink_to(job / JOB_FILE)
    elif damage == "other version":
        file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":2', 1))
    elif damage == "other state":
        other = Driver(command("other"))
        await master.writer.write(1, 0.0, other.manager.state, {}, ())
    else:
        (job / JOB_FILE).write_text("{}")
    state = reader.read()
    assert state.problem
    assert str(tmp_path) not in state.problem
    if damage != "other job":
        assert phases(state) == known
    async with api(job) as client:
        status, answer = await client.get("/jobs/job/cluster")
        assert status == 200
        assert answer["problem"]


async def test_a_directory_without_a_job_of_roles_is_a_404(tmp_path: Path) -> None:
    (tmp_path / "control").symlink_to(tmp_path)
    async with api(tmp_path) as client:
        assert (await client.get(f"/jobs/{tmp_path.name}/cluster"))[0] == 404
