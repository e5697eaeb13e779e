"""A job of roles as the page asks for it: the fold of the journal that a master writes, and its newest changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.cluster.job_files import JOB_FILE, JOURNAL, JobFile, OutcomeFile, write_privately
from counterpoint.cluster.manager.events import Event, Instruction
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.master.event_codec import encode
from counterpoint.cluster.master.journal import Journal
from counterpoint.cluster.master.restore import state_of
from counterpoint.serve.readers.cluster import ClusterReader, ClusterState
from counterpoint.serve.readers.rollouts.step_indexes import moment
from counterpoint.sweep.open_store import open_store
from counterpoint.sweep.protocol import perform
from tests.cluster.manager.driver import Driver, command
from tests.serve.api_client import api


class Recorded:
    """A manager that notes its events."""

    def __init__(self, manager: PrimeManager) -> None:
        self.manager = manager
        self.events: list[Event] = []

    def handle(self, event: Event) -> list[Instruction]:
        self.events.append(event)
        return self.manager.handle(event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)


class Master:
    """Two services and a task, driven by words, and the journal that a master writes of it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        roles = (command("server", count=2, max_restarts=3), command("task", task=True, after=("server",)))
        self.driver = Driver(*roles)
        self.driver.manager = self.recorded = Recorded(self.driver.manager)  # type: ignore[assignment]
        write_privately(directory / JOB_FILE, JobFile(spec=self.driver.manager.spec))
        self.store = open_store(directory / JOURNAL)
        self.journal = Journal("here", 1)
        perform(self.store, self.journal.open(lambda history: []))

    def write(self) -> None:
        """Appends what has happened since the last call."""
        events, self.recorded.events = self.recorded.events, []
        perform(self.store, self.journal.append([encode(event) for event in events]))

    def snapshot(self) -> None:
        manager = self.recorded.manager
        perform(self.store, self.journal.write_snapshot(self.journal.take_snapshot(state_of(manager, self.driver.now))))

    def run(self) -> None:
        self.driver.begin()
        for worker in ("server-0", "server-1", "task-0"):
            self.driver.ready(worker)
        self.write()


def read(reader: ClusterReader) -> ClusterState:
    return reader.read(moment(60))


def phases(state: ClusterState) -> dict[str, str]:
    assert state.manager is not None
    return {name: str(record.phase) for name, record in state.manager.state.workers.items()}


@pytest.mark.parametrize("place", [".", "control"])
async def test_workers_and_changes_are_shown_for_both_kinds_of_job(tmp_path: Path, place: str) -> None:
    job = tmp_path / "job"
    master = Master(job / place)
    master.run()
    master.driver.exit("server-1", 1, reason="killed by \x1b[2J\u202e SIGKILL")
    master.write()
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
    master.run()
    write_privately(
        tmp_path / "job/outcome.json", OutcomeFile(code=3, reason="task-0 \u202efailed", failed_worker="task-0")
    )
    async with api(tmp_path / "job") as client:
        _, answer = await client.get("/jobs/job/cluster")
    assert (answer["code"], answer["outcome"]) == (3, "task-0 \\u202efailed")


def test_each_look_folds_what_is_new_also_past_a_snapshot(tmp_path: Path) -> None:
    """A reader that comes late, or slept while entries were replaced, ends up with the state of one that saw all."""
    master, reader = Master(tmp_path), ClusterReader(tmp_path)
    assert phases(read(reader))["task-0"] == "waiting"
    master.run()
    assert phases(read(reader))["task-0"] == phases(read(ClusterReader(tmp_path)))["task-0"]
    asleep = ClusterReader(tmp_path)
    read(asleep)
    for death in range(3):
        now = 1000.0 * (death + 1)
        master.driver.exit("server-0", 1, at=now, reason=f"death {death}")
        master.write()
        read(reader)
        master.driver.tick(now + 100.0)
        master.driver.ready("server-0", now + 101.0)
        master.write()
    master.snapshot()
    master.driver.exit("server-1", 1, at=9000.0, reason="another")
    master.write()
    states = [read(each) for each in (reader, asleep, ClusterReader(tmp_path))]
    assert [phases(state) for state in states] == 3 * [
        {n: str(w.phase) for n, w in master.recorded.manager.state.workers.items()}
    ]
    assert [state.entries for state in states] == 3 * [master.journal.last]
    deaths = [change.reason for change in states[0].changes if change.after == "restarting"]
    assert deaths == ["death 0", "death 1", "death 2", "another"]
    assert [change.reason for change in states[1].changes if change.after == "restarting"] == ["another"]


def test_a_look_ends_in_time_and_the_next_goes_on(tmp_path: Path) -> None:
    master = Master(tmp_path)
    master.run()
    for number in range(3):
        master.driver.exit("server-1", 1, at=1000.0 * (number + 1))
        master.write()
    reader = ClusterReader(tmp_path)
    looks: list[int] = []
    while len(looks) < 20:
        state = reader.read(0.0)
        looks.append(state.entries)
        if state.is_complete:
            break
    assert looks == [1, 2, 3, 4, 5, 5][: len(looks)]
    assert looks[-1] == master.journal.last


@pytest.mark.parametrize("damage", ["torn", "fifo", "link", "unknown event", "other job"])
async def test_damage_keeps_what_was_known(tmp_path: Path, damage: str) -> None:
    master, job = Master(tmp_path / "job"), tmp_path / "job"
    master.run()
    reader = ClusterReader(job)
    known = phases(read(reader))
    newest = job / JOURNAL / "entry-000000000003.json"
    if damage == "torn":
        newest.write_bytes(b'{"format": 1')
    elif damage == "fifo":
        newest.mkdir()
    elif damage == "link":
        newest.symlink_to(job / JOB_FILE)
    elif damage == "unknown event":
        perform(master.store, master.journal.append([{"kind": "Nothing", "at": 1.0}]))
    else:
        (job / JOB_FILE).write_text("{}")
    state = read(reader)
    assert state.problem
    assert str(tmp_path) not in state.problem
    if damage != "other job":
        assert phases(state) == known
    async with api(job) as client:
        status, answer = await client.get("/jobs/job/cluster")
        assert status == 200
        assert answer["problem"]


async def test_a_directory_without_a_journal_is_a_404(tmp_path: Path) -> None:
    (tmp_path / "control").symlink_to(tmp_path)
    async with api(tmp_path) as client:
        assert (await client.get(f"/jobs/{tmp_path.name}/cluster"))[0] == 404
