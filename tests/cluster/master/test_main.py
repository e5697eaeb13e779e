"""The master's process, on a backend in memory: exceptions of ours, other masters, and a full disk that outlasts a lease."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import JobFile, control_path, read_outcome, write_privately
from counterpoint.cluster.manager.events import Event, Instruction, WorkFinished
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.master import main as main_module
from counterpoint.cluster.master.control import ControlError, ask
from counterpoint.cluster.master.main import LOST, MasterProcess
from counterpoint.cluster.master.mastership import TARGET
from counterpoint.cluster.master.prime_master import MasterTerm
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.sweep.record import Record
from counterpoint.sweep.store import Conflict
from counterpoint.sweep.stores.local import LocalStore
from tests.cluster.master.fake_backend import FakeBackend, World
from tests.cluster.master.test_prime_master import DEADLINE, until

SPEC = JobSpec(
    name="job",
    lease_seconds=100.0,
    roles=(
        RoleSpec(name="service", worker="some.module:Service"),
        RoleSpec(name="task", worker="some.module:Task", task=True, min_count=1, max_count=3),
    ),
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(
        main_module, "open_backend", lambda name, spec, directory, epoch, options: FakeBackend(world, epoch)
    )
    yield world
    assert world.ran_twice == []


def process(directory: Path, lease_seconds: float = 100.0, *, alone: bool = False) -> MasterProcess:
    job = JobFile(spec=SPEC.model_copy(update={"lease_seconds": lease_seconds}))
    return MasterProcess(directory, job, LocalStore(directory / "journal"), alone=alone)


async def asked(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread(ask, control_path(directory), request)


async def trouble_says(directory: Path, words: str) -> None:
    """Waits until the status says so."""

    async def trouble() -> str:
        return str((await asked(directory, {"ask": "status"}))["trouble"])

    async with asyncio.timeout(DEADLINE):
        while words not in await trouble():  # noqa: ASYNC110 - asked, as a client does
            await asyncio.sleep(0.02)


def full(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


async def test_the_outcome_is_written_and_a_later_master_returns_it(tmp_path: Path, world: World) -> None:
    async with asyncio.timeout(DEADLINE):
        assert await process(tmp_path).run() == 0
        assert await process(tmp_path).run() == 0
    ended = read_outcome(tmp_path)
    assert ended is not None
    assert (ended.code, ended.status["stage"]) == (0, "STOPPED")
    assert world.ended


@pytest.mark.parametrize(("times", "stops_in_order"), [(1, True), (1000, False)])
async def test_an_exception_of_the_manager_ends_the_job_with_a_reason(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, times: int, stops_in_order: bool
) -> None:
    handle, failures = PrimeManager.handle, 0

    def fail(self: PrimeManager, event: Event) -> list[Instruction]:
        nonlocal failures
        if failures < times and (isinstance(event, WorkFinished) or failures):
            failures += 1
            raise RuntimeError("a bug of ours")
        return handle(self, event)

    monkeypatch.setattr(PrimeManager, "handle", fail)
    async with asyncio.timeout(DEADLINE):
        assert await process(tmp_path).run() == 1
    ended = read_outcome(tmp_path)
    assert ended is not None
    assert "the master failed: RuntimeError('a bug of ours'); see" in ended.reason
    assert any(command.startswith("stop") for command in world.commands) == stops_in_order
    assert world.ended


async def test_clients_ask_and_are_refused_with_a_reason(tmp_path: Path, world: World) -> None:
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path).run())
    await until(lambda: "start task-0 1" in world.commands)
    status = await asked(tmp_path, {"ask": "status"})
    assert [one["worker"] for one in status["workers"]] == ["service-0", "task-0"]
    assert [one["worker"] for one in (await asked(tmp_path, {"ask": "nodes", "role": "task"}))["workers"]] == ["task-0"]
    for request, message in (
        ({"ask": "nodes", "role": "tusk"}, "no role 'tusk'; its roles are service, task"),
        ({"ask": "scale", "role": "task", "count": 9}, "may have 1 to 3 workers, not 9"),
        ({"ask": "dance"}, "is no request"),
        ({"ask": "stop", "reason": "", "code": 256}, "256 is no exit code; expected 0 to 255"),
        ({"ask": "stop", "reason": "", "code": True}, "a truth value where none belongs"),
        ({"ask": "scale", "role": "task", "count": True}, "a truth value where none belongs"),
    ):
        with pytest.raises(ControlError, match=message):
            await asked(tmp_path, request)
    await asked(tmp_path, {"ask": "scale", "role": "task", "count": 2})
    await until(lambda: ("task-1", 1) in world.created)
    await asked(tmp_path, {"ask": "stop", "reason": "enough", "code": 5})
    async with asyncio.timeout(DEADLINE):
        assert await run == 5


async def test_a_task_that_failed_while_others_go_on_is_told_by_the_job(tmp_path: Path, world: World) -> None:
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path).run())
    await until(lambda: "start task-0 1" in world.commands)
    assert (await asked(tmp_path, {"ask": "status"}))["trouble"] == ""
    await asked(tmp_path, {"ask": "scale", "role": "task", "count": 2})
    await until(lambda: "start task-1 1" in world.commands)
    world.end("task-0", 2)
    await trouble_says(tmp_path, "task-0 ended with exit code 2 (log: logs/task-0.log); the job fails once its other")
    world.finish("task-1")
    async with asyncio.timeout(DEADLINE):
        assert await run == 2
    ended = read_outcome(tmp_path)
    assert ended is not None
    assert ended.status["trouble"] == ""


@pytest.mark.slow
async def test_a_disk_that_is_full_for_longer_than_the_lease_costs_nothing(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path, lease_seconds=2.0).run())
    await until(lambda: "start task-0 1" in world.commands)
    write_partial = LocalStore._write_partial
    monkeypatch.setattr(LocalStore, "_write_partial", full)
    world.end("task-0", 1)
    world.on_start = lambda world, worker, incarnation: world.finish(worker)

    await trouble_says(tmp_path, "the mastership is lost")
    assert ("task-0", 2) not in world.created
    monkeypatch.setattr(LocalStore, "_write_partial", write_partial)
    async with asyncio.timeout(DEADLINE):
        assert await run == 0
    assert world.epoch > 1
    assert ("task-0", 2) in world.created


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["at once", "after its lease is lost"])
async def test_a_full_disk_does_not_keep_one_that_is_alone_from_ending_in_order(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    caplog.set_level(logging.INFO)
    world.on_start = lambda world, worker, incarnation: None
    master = process(tmp_path, lease_seconds=2.0, alone=True)
    run = asyncio.create_task(master.run())
    await until(lambda: "start task-0 1" in world.commands)
    monkeypatch.setattr(LocalStore, "_write_partial", full)
    monkeypatch.setattr("counterpoint.cluster.job_files.write_privately", full)
    if asked != "at once":
        await until(lambda: "lease lost" in caplog.text)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(DEADLINE):
        assert await run == 143
    assert world.commands.index("stop task-0 1") < world.commands.index("stop service-0 1")
    assert world.ended
    assert master.outcome is not None
    assert (master.outcome.code, master.outcome.reason) == (143, "stopped by SIGTERM")
    assert read_outcome(tmp_path) is None


@pytest.mark.slow
async def test_one_that_is_alone_waits_for_a_full_journal_only_so_long(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease takes the place of the former one, while the journal needs more, and fails later than it is first asked."""
    monkeypatch.setattr(main_module, "WRITE_SECONDS", 0.1)
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path, alone=True).run())
    await until(lambda: "start task-0 1" in world.commands)
    write_partial = LocalStore._write_partial

    def full_for_entries(self: LocalStore, key: str, data: bytes) -> Path:
        if key == TARGET:
            return write_partial(self, key, data)
        time.sleep(0.5)
        return full()

    monkeypatch.setattr(LocalStore, "_write_partial", full_for_entries)
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(DEADLINE):
        assert await run == 130
    assert "stop service-0 1" in world.commands
    assert world.ended


@pytest.mark.slow
async def test_one_that_is_alone_stops_nothing_of_a_master_that_was_there_after_all(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path, lease_seconds=2.0, alone=True).run())
    await until(lambda: "start task-0 1" in world.commands)
    monkeypatch.setattr(LocalStore, "_write_partial", full)
    await until(lambda: "lease lost" in caplog.text)
    world.epoch += 1
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(DEADLINE):
        assert await run == LOST
    assert not any(command.startswith("stop") for command in world.commands)


@pytest.mark.slow
async def test_a_master_whose_lease_another_has_ends(tmp_path: Path, world: World) -> None:
    """As after SIGSTOP: the lease has another owner, and the agents another master, when it goes on."""
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path, lease_seconds=10.0).run())
    await until(lambda: "start task-0 1" in world.commands)
    store = LocalStore(tmp_path / "journal")
    assert await asyncio.to_thread(replaced, store)
    async with asyncio.timeout(DEADLINE):
        assert await run == LOST
    assert read_outcome(tmp_path) is None
    assert not any(command.startswith(("stop", "kill")) for command in world.commands)


@pytest.mark.slow
async def test_a_master_that_fails_after_another_has_taken_over_says_nothing_of_the_job(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP, if what it finds when it goes on is more than it can bear."""
    world.on_start = lambda world, worker, incarnation: None
    master = process(tmp_path, lease_seconds=10.0)
    run = asyncio.create_task(master.run())
    await until(lambda: "start task-0 1" in world.commands)
    assert await asyncio.to_thread(replaced, LocalStore(tmp_path / "journal"))
    lost = MasterTerm.lose

    def fail(self: MasterTerm, reason: str) -> None:
        self.fail(ClusterError("what follows from it"))
        lost(self, "")

    monkeypatch.setattr(MasterTerm, "lose", fail)
    monkeypatch.setattr(MasterTerm, "_check_lost", lambda self: None)
    async with asyncio.timeout(DEADLINE):
        assert await run == LOST
    assert read_outcome(tmp_path) is None
    assert not world.ended


def replaced(store: LocalStore) -> bool:
    """Makes another the owner of the lease, between two heartbeats of its owner."""
    for _ in range(100):
        stored = store.read("master")
        assert stored is not None
        record = Record.of_bytes(stored.data, "master")
        other = replace(record, owner="other", token=record.token + 1, revision=record.revision + 1)
        with suppress(Conflict):
            store.write("master", other.to_bytes(), stored.version)
            return True
    return False


def test_of_two_submitters_at_once_one_is_refused(tmp_path: Path) -> None:
    write_privately(tmp_path / "file", JobFile(spec=SPEC), new=True)
    with pytest.raises(FileExistsError):
        write_privately(tmp_path / "file", JobFile(spec=SPEC.model_copy(update={"name": "other"})), new=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert '"job"' in (tmp_path / "file").read_text()


def test_what_a_submitter_writes_is_private(tmp_path: Path) -> None:
    write_privately(tmp_path / "cluster_job.json", JobFile(spec=SPEC))
    assert (tmp_path / "cluster_job.json").stat().st_mode & 0o777 == 0o600
