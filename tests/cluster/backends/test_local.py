"""The backend of one machine: what every backend must do, and what becomes of its keepers.

What a worker's process alone answers for, the same one on Ray, is tried here and not in `contract.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from counterpoint.cluster.attended.left_running import has_workers
from counterpoint.cluster.backends.keeper_link import SUFFIX, WORKERS, mark_of
from counterpoint.cluster.backends.local import LocalBackend
from counterpoint.cluster.devices import DEVICES
from counterpoint.cluster.errors import BackendError, ClusterError, StaleMasterError
from counterpoint.cluster.manager.events import Created, CreateFailed, NodeLost, WorkerExited, WorkerReady
from counterpoint.cluster.remains import marked, start_of
from counterpoint.transport.files.lock import take_lock
from tests.cluster.backends.contract import *  # noqa: F403
from tests.cluster.backends.contract import JOB, SERVICE, Watched, bundle, log_of, raises, watch
from tests.support.keepers import keeper_of
from tests.support.polling import until

pytestmark = pytest.mark.slow


class LocalWorld:
    """Backends over two nodes on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.job = JOB
        self.backends: list[LocalBackend] = []

    async def backend(self, epoch: int) -> LocalBackend:
        self.backends.append(LocalBackend(self.job, self.directory, epoch, nodes=2))
        return self.backends[-1]

    @property
    def sockets(self) -> list[Path]:
        return sorted((self.directory / WORKERS).glob(f"*{SUFFIX}"))

    def processes(self) -> list[int]:
        return [pid for path in self.sockets for pid in marked(mark_of(path))]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LocalWorld]:
    made = LocalWorld(tmp_path)
    try:
        yield made
    finally:
        last = LocalBackend(JOB, made.directory, 1000)
        left = [mark_of(path) for path in made.sockets]
        await last.adopt({})
        await last.close(end=True)
        for backend in made.backends:
            await backend.close(end=False)
        assert not [pid for mark in left for pid in marked(mark)]
        assert not made.sockets


async def test_a_hook_that_fails_is_named(world: LocalWorld) -> None:
    async with await watch(world) as master:
        await master.backend.allocate(bundle("fails-0"), ())
        await master.backend.create(master.order("fails-0"))
        ended = await master.get(WorkerExited, "fails-0")
        assert (ended.code, ended.reason) == (1, "`setup` raised ValueError: no such model: tiny")
        assert "Traceback" in log_of(world, "fails-0")


async def test_an_exit_within_a_hook_is_named_with_its_code(world: LocalWorld) -> None:
    async with await watch(world) as master:
        await master.run("exits-0")
        await master.backend.start("exits-0", 1)
        ended = await master.get(WorkerExited, "exits-0")
        assert (ended.code, ended.reason) == (5, "`start` called sys.exit(5)")


WITH_CHILD = """
import subprocess, sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("memory", memory.name, flush=True)
"""
"""A child in a session of its own, and shared memory that its resource tracker must remove."""


async def test_a_killed_keeper_leaves_nothing_before_its_worker_s_end_is_told(world: LocalWorld) -> None:
    async with await watch(world) as master:
        await master.run("program-0", code=WITH_CHILD + SERVICE)
        await master.run("program-1")
        node = (await master.get(Created, "program-0")).node
        assert node != (await master.get(Created, "program-1")).node, "the one with more room is taken"
        memory = Path("/dev/shm") / log_of(world, "program-0").split("memory ")[1].split()[0]
        assert memory.exists()
        mark = mark_of(world.sockets[0])
        os.kill(keeper_of(world.directory, "program-0"), signal.SIGKILL)
        ended = await master.get(WorkerExited, "program-0")
        assert (ended.code, ended.lost) == (137, False)
        assert not marked(mark)
        assert not memory.exists()
        await master.run("program-0", 2)
        assert (await master.get(Created, "program-0", 2)).node == node
        assert not master.of(WorkerExited, "program-1")


async def test_a_frozen_keeper_s_worker_is_lost(world: LocalWorld) -> None:
    world.job = JOB.model_copy(update={"lease_seconds": 10.0})
    async with await watch(world) as master:
        await master.run("program-0")
        mark = mark_of(world.sockets[0])
        os.kill(keeper_of(world.directory, "program-0"), signal.SIGSTOP)
        ended = await master.get(WorkerExited, "program-0")
        assert ended.lost
        assert "did not answer" in ended.reason
        assert not marked(mark)
        assert not world.sockets
        assert not master.of(NodeLost)


async def test_a_signal_to_a_keeper_is_its_worker_s(world: LocalWorld) -> None:
    async with await watch(world) as master:
        await master.run("program-0")
        os.kill(keeper_of(world.directory, "program-0"), signal.SIGTERM)
        assert (await master.get(WorkerExited, "program-0")).code == 7
        await master.run("program-0", 2)
        os.kill(keeper_of(world.directory, "program-0"), signal.SIGHUP)
        assert (await master.get(WorkerExited, "program-0", 2)).code == 137


async def test_a_later_incarnation_begins_after_the_end_of_the_earlier_one(world: LocalWorld) -> None:
    async with await watch(world) as master:
        await master.run("program-0")
        first = (await master.get(Created, "program-0")).pid
        await master.backend.create(master.order("program-0", 2))
        assert start_of(first) is None
        await master.get(WorkerReady, "program-0", 2)
        await raises(BackendError, lambda: master.backend.create(master.order("program-0")))


async def test_a_master_without_a_journal_finds_the_keepers_by_their_sockets(world: LocalWorld) -> None:
    world.directory /= "a-long-name" * 12  # longer than the kernel's limit for the path of a socket
    world.directory.mkdir()
    async with await watch(world) as first:
        await first.run("program-0")
        await first.backend.close(end=False)
    assert has_workers(world.directory)
    async with await watch(world, 2) as second:
        (living,) = await second.backend.adopt({})
        assert (living.worker, living.bundle) == ("program-0", "program-0")
        await second.backend.close(end=True)
        assert start_of(living.pid) is None
        assert not has_workers(world.directory)


async def test_a_master_finds_that_a_keeper_died_meanwhile(world: LocalWorld) -> None:
    async with await watch(world) as first:
        await first.run("program-0", code=WITH_CHILD + SERVICE)
        handles, node = first.backend.handles(), (await first.get(Created, "program-0")).node
        await first.backend.close(end=False)
    mark = mark_of(world.sockets[0])
    os.kill(keeper_of(world.directory, "program-0"), signal.SIGKILL)
    await until(lambda: not has_workers(world.directory), "the end of the keeper")
    async with await watch(world, 2) as second:
        assert list(await second.backend.adopt(handles)) == []
        assert not marked(mark), "what the keeper left is gone"
        await second.backend.create(second.order("program-0", 2))
        assert (await second.get(Created, "program-0", 2)).node == node, "its bundle kept the place"


async def test_a_frozen_keeper_is_not_adopted(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await watch(world) as first:
        await first.run("program-0")
        await first.backend.close(end=False)
    mark = mark_of(world.sockets[0])
    os.kill(keeper_of(world.directory, "program-0"), signal.SIGSTOP)
    monkeypatch.setattr("counterpoint.cluster.backends.local.CONNECT_SECONDS", 1.0)
    async with await watch(world, 2) as second:
        assert list(await second.backend.adopt({})) == []
        assert not marked(mark)


async def test_an_end_that_nobody_has_acknowledged_is_told_to_the_next_master(world: LocalWorld) -> None:
    async with await watch(world, acknowledge=False) as first:
        await first.run("program-0")
        await first.backend.stop("program-0", 1)
        await first.get(WorkerExited, "program-0")
        await first.backend.close(end=False)
    async with await watch(world, 2) as second:
        assert list(await second.backend.adopt({})) == []
        assert (await second.get(WorkerExited, "program-0")).code == 7
        await until(lambda: not world.sockets, "the end of the keeper")


async def test_what_an_earlier_master_starts_after_a_later_one_has_looked_ends_at_once(world: LocalWorld) -> None:
    first, second = await world.backend(1), await world.backend(2)
    assert list(await second.adopt({})) == []
    with pytest.raises(StaleMasterError):
        await (await world.backend(1)).adopt({})
    async with Watched(first, world.directory) as master:  # as one that was frozen and has not looked again
        await master.backend.allocate(bundle("program-0"), ())
        await master.backend.create(master.order("program-0"))
        await master.get(CreateFailed, "program-0")
        assert not master.of(Created)
        assert not (world.directory / "logs" / "program-0.log").read_text()


async def test_what_a_master_on_another_machine_left_is_waited_for(world: LocalWorld) -> None:
    """A directory that machines share; a socket there is reached from its own machine alone."""
    world.job = JOB.model_copy(update={"lease_seconds": 2.0})
    folder = world.directory / WORKERS
    folder.mkdir()
    (folder / "epoch").write_text("1 elsewhere")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "program-0.1.1.sock"))
    began = time.monotonic()
    assert list(await (await world.backend(2)).adopt({})) == []
    assert time.monotonic() - began >= 2 * world.job.lease_seconds
    assert (folder / "epoch").read_text() == f"2 {socket.gethostname()}"


async def test_agents_of_an_earlier_version_are_waited_for(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = world.directory / "agents"
    agents.mkdir()
    lock = take_lock(agents / "node-0.lock", "taken")
    (agents / "node-0.json").write_text(json.dumps({"pid": os.getpid(), "started": start_of(os.getpid())}))
    assert has_workers(world.directory)
    backend = await world.backend(1)
    adopting = asyncio.create_task(backend.adopt({}))
    await asyncio.sleep(0)
    assert not adopting.done()
    os.close(lock)
    assert list(await adopting) == []
    assert not has_workers(world.directory)


async def test_workers_get_accelerators_of_their_own(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES, "3,4,7,9")
    show = f"import os\nprint('sees', os.environ['{DEVICES}'])\n{SERVICE}"
    async with await watch(world) as master:
        together = bundle("program-0", "program-1", gpu=1)
        await master.backend.allocate(together, ())
        for worker in ("program-0", "program-1"):
            await master.backend.create(master.order(worker, code=show, bundle=together.name))
            await master.get(WorkerReady, worker)
        seen = {log_of(world, worker).split()[1] for worker in together.needs}
        assert seen in ({"3", "4"}, {"7", "9"})
        with pytest.raises(ClusterError, match="gpu: wanted 3"):
            await master.backend.allocate(bundle("program-2", gpu=3), ())
