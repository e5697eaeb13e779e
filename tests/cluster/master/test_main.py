"""The master's process, on a backend in memory: exceptions of ours, other masters, and a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.job_files import LOCK_FILE, STATE_FILE, JobFile, control_path, read_outcome, write_privately
from counterpoint.cluster.manager.events import Event, Instruction, WorkFinished
from counterpoint.cluster.manager.manager import PrimeManager
from counterpoint.cluster.master import main as main_module
from counterpoint.cluster.master import state_writer
from counterpoint.cluster.master.control import ControlError, ask
from counterpoint.cluster.master.main import HELD, LOST, MasterProcess
from counterpoint.cluster.master.state_writer import StateWriter, open_state
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.cluster.state_file import StateError, read_state
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.lock import take_lock
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
    return MasterProcess(directory, job, alone=alone)


async def asked(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread(ask, control_path(directory), request)


async def trouble_says(directory: Path, words: str) -> None:
    """Waits until the status says so."""

    async def trouble() -> str:
        return str((await asked(directory, {"ask": "status"}))["trouble"])

    async with asyncio.timeout(DEADLINE):
        while words not in await trouble():  # noqa: ASYNC110 - asked, as a client does
            await asyncio.sleep(0.02)


def full(*_: object, **__: object) -> NoReturn:
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
    for request, message in (
        ({"ask": "scale", "role": "tusk", "count": 1}, "no role 'tusk'; its roles are service, task"),
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


async def test_a_full_disk_is_waited_for_and_costs_nothing(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path).run())
    await until(lambda: "start task-0 1" in world.commands)
    monkeypatch.setattr(state_writer, "write_atomically", full)
    world.end("task-0", 1)
    world.on_start = lambda world, worker, incarnation: world.finish(worker)
    await trouble_says(tmp_path, "the master does not act: disk full")
    assert ("task-0", 2) not in world.created
    monkeypatch.setattr(state_writer, "write_atomically", write_atomically)
    async with asyncio.timeout(DEADLINE):
        assert await run == 0
    assert world.epoch == 1
    assert ("task-0", 2) in world.created


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["at once", "once it was asked"])
async def test_a_full_disk_does_not_keep_one_that_is_alone_from_ending_in_order(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(main_module, "WRITE_SECONDS", 0.1)
    world.on_start = lambda world, worker, incarnation: None
    master = process(tmp_path, alone=True)
    run = asyncio.create_task(master.run())
    await until(lambda: "start task-0 1" in world.commands)

    def full_later(*_: object, **__: object) -> None:
        time.sleep(0.5)
        full()

    monkeypatch.setattr(state_writer, "write_atomically", full if fails == "at once" else full_later)
    monkeypatch.setattr("counterpoint.cluster.job_files.write_privately", full)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(DEADLINE):
        assert await run == 143
    assert world.commands.index("stop task-0 1") < world.commands.index("stop service-0 1")
    assert world.ended
    assert master.outcome is not None
    assert (master.outcome.code, master.outcome.reason) == (143, "stopped by SIGTERM")
    assert read_outcome(tmp_path) is None
    assert read_state(tmp_path).job.stop_requests == 0


async def test_one_that_is_alone_stops_nothing_of_a_master_that_was_there_after_all(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_module, "WRITE_SECONDS", 0.0)
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path, alone=True).run())
    await until(lambda: "start task-0 1" in world.commands)
    monkeypatch.setattr(state_writer, "write_atomically", full)
    world.epoch += 2
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(DEADLINE):
        assert await run == LOST
    assert not any(command.startswith("stop") for command in world.commands)


@pytest.mark.parametrize("meets", ["a write", "an error of the backend"])
async def test_a_master_that_was_frozen_while_another_took_over_ends_and_says_nothing_of_the_job(
    tmp_path: Path, world: World, meets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master of another machine has written the shared state: whatever this one does next, it stops."""
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path).run())
    await until(lambda: "start task-0 1" in world.commands)
    await until(lambda: not world.reports and read_state(tmp_path).job.stage == "RUNNING")  # it writes nothing now
    other = StateWriter(open_state(tmp_path, None))
    saved = other.read()
    assert saved is not None
    await other.write(saved.epoch + 1, saved.at, saved.job, saved.handles, saved.changes)

    async def fail(self: FakeBackend, event: Event) -> None:
        raise ClusterError("what follows from it")

    if meets == "an error of the backend":
        monkeypatch.setattr(FakeBackend, "acknowledge", fail)
        monkeypatch.setattr(StateWriter, "write", lambda *_: asyncio.sleep(0))
    world.end("task-0", 1)
    async with asyncio.timeout(DEADLINE):
        assert await run == LOST
    assert read_outcome(tmp_path) is None
    assert not any(command.startswith(("stop", "kill", "create task-0 2")) for command in world.commands)
    assert not world.ended


async def test_of_two_masters_one_waits_and_is_the_next(tmp_path: Path, world: World) -> None:
    world.on_start = lambda world, worker, incarnation: None
    lock = take_lock(tmp_path / LOCK_FILE, "another")
    second = asyncio.create_task(process(tmp_path).run())
    await asyncio.sleep(3 * main_module.LOOK_SECONDS)
    assert not world.commands
    os.close(lock)
    await until(lambda: "start task-0 1" in world.commands)
    waiting = asyncio.create_task(process(tmp_path).run())
    await asyncio.sleep(3 * main_module.LOOK_SECONDS)
    assert not waiting.done()
    os.kill(os.getpid(), signal.SIGTERM)  # the handlers are those of the one that waits
    async with asyncio.timeout(DEADLINE):
        assert await waiting == HELD
    assert read_outcome(tmp_path) is None
    world.finish("task-0")
    async with asyncio.timeout(DEADLINE):
        assert await second == 0


async def test_a_lock_that_cannot_be_taken_is_tried_again_and_said_once(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def fail_first(path: Path, taken: str) -> int:
        nonlocal tries
        tries += 1
        return take_lock(path, taken) if tries > 3 else full()

    monkeypatch.setattr(main_module, "take_lock", fail_first)
    async with asyncio.timeout(DEADLINE):
        assert await process(tmp_path).run() == 0
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("left", ["nothing", "damage"])
async def test_a_job_whose_state_is_gone_or_damaged_is_refused_in_one_sentence(
    tmp_path: Path, world: World, left: str
) -> None:
    world.on_start = lambda world, worker, incarnation: None
    run = asyncio.create_task(process(tmp_path).run())
    await until(lambda: "start task-0 1" in world.commands)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    created = list(world.created)
    if left == "nothing":
        (tmp_path / STATE_FILE).unlink()
    else:
        (tmp_path / STATE_FILE).write_bytes((tmp_path / STATE_FILE).read_bytes()[:-20])
    with pytest.raises(StateError, match=rf"(?s){tmp_path}.*state\.json.*another directory"):
        await process(tmp_path).run()
    assert world.created == created


def test_of_two_submitters_at_once_one_is_refused(tmp_path: Path) -> None:
    write_privately(tmp_path / "file", JobFile(spec=SPEC), new=True)
    with pytest.raises(FileExistsError):
        write_privately(tmp_path / "file", JobFile(spec=SPEC.model_copy(update={"name": "other"})), new=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert '"job"' in (tmp_path / "file").read_text()


def test_what_a_submitter_writes_is_private(tmp_path: Path) -> None:
    write_privately(tmp_path / "cluster_job.json", JobFile(spec=SPEC))
    assert (tmp_path / "cluster_job.json").stat().st_mode & 0o777 == 0o600
