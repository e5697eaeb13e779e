"""What every backend must do, as tests over a `world` fixture; each backend's own test file imports them all.

A world has a job's directory and makes backends of any epoch, which it closes, and ends, after the test.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from counterpoint.cluster.backends.base import Backend, Bundle, WorkerHeartbeat
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.errors import BackendError, CapacityError, StaleMasterError
from counterpoint.cluster.manager.events import (
    ChildrenChecked,
    Created,
    Event,
    FailoverDone,
    JobStopRequested,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    WorkFinished,
)
from counterpoint.cluster.master.orders import COMMAND, description_of
from counterpoint.cluster.member import Member, Stage
from counterpoint.cluster.spec import JobSpec, Resources, RoleSpec
from tests.support.polling import until

WORKERS = "tests.cluster.worker_process.workers"

JOB = JobSpec(
    name="contract",
    lease_seconds=60.0,  # a busy machine's test may not speak to its keepers for a while
    roles=(
        RoleSpec(name="plain", count=2, worker=f"{WORKERS}:Plain", sub_master=f"{WORKERS}:Leader"),
        RoleSpec(name="fails", worker=f"{WORKERS}:FailsInSetup"),
        RoleSpec(name="exits", worker=f"{WORKERS}:ExitsInStart"),
        RoleSpec(name="asks", worker=f"{WORKERS}:Asker", task=True),
        RoleSpec(name="program", count=2, command=("unused",)),
    ),
)

SERVICE = """
import signal, sys, time
from counterpoint.transport.process.notify import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""

Kind = TypeVar("Kind", bound=Event)


class World(Protocol):
    """Where a test's backends are."""

    directory: Path

    async def backend(self, epoch: int) -> Backend:
        """Makes a backend of that epoch."""


class Watched:
    """A backend whose events are taken as they come, and acknowledged unless a test does not want that."""

    def __init__(self, backend: Backend, directory: Path, *, acknowledge: bool = True) -> None:
        self.backend, self._directory, self._acknowledge = backend, directory, acknowledge
        self.seen: list[Event] = []
        self.beats: list[WorkerHeartbeat] = []
        self.error: Exception | None = None
        self._task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        try:
            async for event in self.backend.events():
                if isinstance(event, WorkerHeartbeat):
                    self.beats.append(event)
                    continue
                self.seen.append(event)
                if self._acknowledge:
                    await self.backend.acknowledge(event)
        except StaleMasterError as error:
            self.error = error

    async def __aenter__(self) -> Watched:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def of(self, kind: type[Kind], worker: str = "", incarnation: int = 0) -> list[Kind]:
        return [
            event
            for event in self.seen
            if isinstance(event, kind)
            and (not worker or getattr(event, "worker", worker) == worker)
            and (not incarnation or getattr(event, "incarnation", incarnation) == incarnation)
        ]

    async def get(self, kind: type[Kind], worker: str = "", incarnation: int = 0) -> Kind:
        def there() -> bool:
            return bool(self.of(kind, worker, incarnation))

        try:
            await until(there, f"{kind.__name__} of {worker} {incarnation}")
        except AssertionError as error:
            raise AssertionError(f"{error}; seen: {self.seen}") from None
        return self.of(kind, worker, incarnation)[0]

    def order(self, worker: str, incarnation: int = 1, *, code: str = "", **fields: Any) -> WorkerOrder:
        description = description_of(JOB, worker, incarnation, 2, self._directory)
        known: dict[str, Any] = {
            "worker": worker,
            "incarnation": incarnation,
            "bundle": worker,
            "command": COMMAND if description else (sys.executable, "-c", code or SERVICE),
            "environment": {},
            "log_file": str(self._directory / "logs" / f"{worker}.log"),
            "silence_timeout_seconds": 4.0,
            "description": description,
        }
        return WorkerOrder(**(known | fields))

    async def run(self, worker: str, incarnation: int = 1, **fields: Any) -> None:
        """Places and creates a worker, and waits until it is ready."""
        await self.backend.allocate(bundle(worker), ())
        await self.backend.create(self.order(worker, incarnation, **fields))
        await self.get(WorkerReady, worker, incarnation)


def bundle(*workers: str, **needs: Any) -> Bundle:
    return Bundle(workers[0], {worker: Resources(**needs) for worker in workers})


async def watch(world: World, epoch: int = 1, **options: Any) -> Watched:
    return Watched(await world.backend(epoch), world.directory, **options)


def log_of(world: World, worker: str) -> str:
    return (world.directory / "logs" / f"{worker}.log").read_text()


def hooks_of(world: World, worker: str) -> Sequence[str]:
    lines = log_of(world, worker).splitlines()
    return [line.removeprefix("hook ") for line in lines if line.startswith("hook ")]


async def raises(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        await call()
    return str(caught.value)


async def test_a_worker_of_a_class_goes_through_its_life(world: World) -> None:
    async with await watch(world) as master:
        await master.run("plain-0")
        assert (await master.get(Created, "plain-0")).node in {node.name for node in await master.backend.nodes()}
        await until(lambda: any(beat.status == "fine" for beat in master.beats), "its status")
        await master.backend.start("plain-0", 1)
        await master.get(WorkerStarted, "plain-0")
        await master.get(WorkFinished, "plain-0")
        failed = Member("plain-1", 2, Stage.READY)
        await master.backend.failover("plain-0", 1, 5, [failed])
        assert (await master.get(FailoverDone, "plain-0")).notice == 5
        await master.backend.stop("plain-0", 1)
        assert (await master.get(WorkerExited, "plain-0")).code == 0
        names = ["__init__", "setup", "self_check", "start", "on_failover plain-1 2", "stop"]
        assert hooks_of(world, "plain-0") == names


async def test_a_command_runs_and_is_stopped_and_nothing_happens_twice(world: World) -> None:
    async with await watch(world) as master:
        await master.run("program-0")
        await master.backend.create(master.order("program-0"))  # again
        await master.backend.start("program-0", 1)
        await master.get(WorkerStarted, "program-0")
        await master.backend.stop("program-0", 1)
        assert (await master.get(WorkerExited, "program-0")).code == 7
        await master.backend.create(master.order("program-0"))  # late
        assert len(master.of(Created)) == 1


async def test_a_killed_worker_is_told_and_its_successor_runs(world: World) -> None:
    async with await watch(world) as master:
        await master.run("program-0")
        await master.backend.kill("program-0", 1)
        assert (await master.get(WorkerExited, "program-0")).code == 137
        await master.run("program-0", 2)
        assert not master.of(WorkerExited, "program-0", 2)


async def test_the_end_of_a_worker_that_does_not_exist_is_told_at_once(world: World) -> None:
    async with await watch(world) as master:
        await master.backend.kill("program-0", 3)
        await master.get(WorkerExited, "program-0", 3)


async def test_members_and_checks_reach_the_workers(world: World) -> None:
    async with await watch(world) as master:
        children = [Member(f"plain-{rank}", 1, Stage.READY, node="n") for rank in range(2)]
        await master.backend.publish(children)
        await master.run("plain-master")
        await master.backend.check_children("plain-master", 1, 9, children)
        assert (await master.get(ChildrenChecked, "plain-master")).check == 9
        assert "check_child plain-0 plain-1; known plain-0 plain-1" in hooks_of(world, "plain-master")
        asked = await master.get(JobStopRequested)
        assert (asked.reason, asked.code, asked.by) == ("checked", 0, "plain-master")


async def test_a_worker_calls_another_one(world: World) -> None:
    async with await watch(world) as master:
        await master.run("plain-0")
        ready = await master.get(WorkerReady, "plain-0")
        callee = Member("plain-0", 1, Stage.READY, ready.address, "", ready.server_key)
        await master.run("asks-0")
        asker = Member("asks-0", 1, Stage.READY, server_key=(await master.get(WorkerReady, "asks-0")).server_key)
        await master.backend.publish([callee, asker])
        await master.backend.start("asks-0", 1)
        assert (await master.get(WorkerExited, "asks-0")).code == 0
        assert hooks_of(world, "asks-0") == ["told 42"]


async def test_a_higher_master_adopts_what_lives_and_the_lower_one_must_stop(world: World) -> None:
    async with await watch(world, 1, acknowledge=False) as first:
        await first.run("program-0")
        handles = first.backend.handles()
        async with await watch(world, 2) as second:
            living = await second.backend.adopt(handles)
            assert [(one.worker, one.incarnation, one.ready) for one in living] == [("program-0", 1, True)]
            await second.get(Created, "program-0")  # nobody had acknowledged it
            await until(lambda: first.error is not None, "the first master's notice that it is over")
            assert "epoch 2" in await raises(StaleMasterError, lambda: first.backend.kill("program-0", 1))
            await second.backend.stop("program-0", 1)
            assert (await second.get(WorkerExited, "program-0")).code == 7


async def test_workers_survive_their_master(world: World) -> None:
    async with await watch(world, 1) as first:
        await first.run("program-0")
        handles = first.backend.handles()
        await first.backend.close(end=False)
    async with await watch(world, 2) as second:
        (living,) = await second.backend.adopt(handles)
        assert (living.worker, living.incarnation) == ("program-0", 1)
        await second.backend.release("program-0")
        assert (await second.get(WorkerExited, "program-0")).code == 137


async def test_what_does_not_fit_is_refused_with_the_shortfall(world: World) -> None:
    backend = await world.backend(1)
    wish = bundle("plain-0", cpu=100_000)
    message = await raises(CapacityError, lambda: backend.check_capacity([wish]))
    assert "cpu: wanted 100000" in message
    await backend.check_capacity([bundle("plain-0")])
    await raises((CapacityError, BackendError), lambda: backend.allocate(wish, ()))  # type: ignore[arg-type]


__all__ = [name for name in dir() if name.startswith("test_")]
