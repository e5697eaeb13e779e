"""The tests of the backend for Ray. They need Ray in their own process, so `test_on_ray.py` runs this file in another.

One cluster of two nodes on this machine serves them all; one test adds a node and takes it away.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.backends.on_ray import RayBackend
from counterpoint.cluster.backends.ray_cluster import RayCluster
from counterpoint.cluster.backends.ray_places import job_key
from counterpoint.cluster.errors import BackendError, CapacityError
from counterpoint.cluster.job_files import read_master
from counterpoint.cluster.job_handle import JobHandle, submit
from counterpoint.cluster.manager.events import Created, NodeLost, WorkerExited, WorkerReady
from counterpoint.cluster.master.control import NoMaster
from counterpoint.cluster.spec import JobSpec, Resources, RoleSpec
from tests.cluster.backends.contract import *  # noqa: F403
from tests.cluster.backends.contract import JOB, bundle, raises, watch
from tests.support.polling import until, wait_until
from tests.support.ray_nodes import ray_files, workers_on_ray

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}


class RayWorld:
    """Backends over a Ray cluster, for one test."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        self.address = address
        self.job = JOB
        self.backends: list[RayBackend] = []

    async def backend(self, epoch: int) -> RayBackend:
        self.backends.append(RayBackend(self.job, self.directory, epoch, address=self.address))
        return self.backends[-1]

    @property
    def key(self) -> str:
        return job_key(self.job.name, self.directory)

    def processes(self) -> list[int]:
        return list(workers_on_ray(self.key))

    def actor_of(self, worker: str) -> int:
        """The process of a worker's actor: below it is a keeper, and below that the worker."""
        (mark,) = {mark for mark in workers_on_ray(self.key).values() if mark.split("/")[2] == worker}
        return int(mark.split(":")[1])


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    with ray_files() as files:
        made = Cluster(initialize_head=True, head_node_args=NODE | {"temp_dir": files})
        made.add_node(**NODE)
        yield made
        made.shutdown()


@pytest.fixture(scope="session")
def connection(ray_cluster: Any) -> Iterator[RayCluster]:
    """One for the whole session, which then waits for Ray once."""
    with pytest.raises(BackendError, match=r"Ray cluster, 127\.0\.0\.1:1"):
        RayCluster("127.0.0.1:1").connect()  # as long as this process has no connection
    made = RayCluster(ray_cluster.address)
    made.connect()
    yield made
    made.disconnect()


@pytest.fixture
async def world(tmp_path: Path, connection: RayCluster) -> AsyncIterator[RayWorld]:
    made = RayWorld(tmp_path, connection.address)
    try:
        yield made
    finally:
        last = RayBackend(made.job, tmp_path, 1000, address=connection.address)
        await last.adopt({})
        await last.close(end=True)
        for backend in made.backends:
            await backend.close(end=False)
        await until(lambda: not connection.groups(made.key) + connection.actors(made.key), "an empty Ray cluster")
        await until(lambda: not made.processes(), "the end of every process")


async def test_another_cluster_is_refused_by_a_process_that_has_one(world: RayWorld) -> None:
    backend = RayBackend(JOB, world.directory, 1, address="127.0.0.1:1")
    assert "is connected to Ray at" in await raises(BackendError, backend.nodes)
    await backend.close(end=False)


async def test_a_collocation_group_is_on_one_node_or_nowhere(world: RayWorld, connection: RayCluster) -> None:
    world.job = JOB.model_copy(
        update={"roles": (RoleSpec(name="program", count=2, command=("unused",), resources=Resources(cpu=0.5)),)}
    )
    pair = bundle("program-0", "program-1", cpu=0.5)
    async with await watch(world) as master:
        await master.backend.allocate(pair, ())
        await master.backend.allocate(pair, ())  # again
        for worker in pair.needs:
            await master.backend.create(master.order(worker, bundle="program-0"))
        nodes = {(await master.get(Created, worker)).node for worker in pair.needs}
        assert len(nodes) == 1
        assert len(connection.groups(world.key)) == 1
        maps = [mapped_by(world.actor_of(worker)) for worker in pair.needs]
        assert all("ray" in text and "libtorch" not in text for text in maps)
        await master.backend.release("program-0")
        assert not connection.groups(world.key)
        refused = await raises(CapacityError, lambda: master.backend.allocate(bundle("a", "b", cpu=1.5), ()))
        assert "bundle a (a, b) fits on no node: cpu: wanted 3, present 2, missing 1" in refused


async def test_a_dead_actor_is_told_and_its_worker_created_again(world: RayWorld) -> None:
    async with await watch(world) as master:
        await master.run("program-0")
        os.kill(world.actor_of("program-0"), signal.SIGKILL)
        ended = await master.get(WorkerExited, "program-0")
        assert "its actor died" in ended.reason
        assert not world.processes()
        await master.run("program-0", 2)


async def test_a_frozen_actor_is_noticed_and_nothing_of_it_is_left(world: RayWorld) -> None:
    """Ray tells the death of what it kills at once, and a stopped process dies seconds later."""
    world.job = JOB.model_copy(update={"lease_seconds": 8.0})
    async with await watch(world) as master:
        await master.run("program-0")
        frozen = world.actor_of("program-0")
        os.kill(frozen, signal.SIGSTOP)
        ended = await master.get(WorkerExited, "program-0")
        assert "did not answer" in ended.reason
        assert not world.processes()
        assert state_of(frozen) in "ZX"
        await master.run("program-0", 2)


FAMILY = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{child.pid} {os.getppid()}")
from counterpoint.transport.process.notify import notify
notify("READY=1")
time.sleep(600)
"""


async def test_what_a_killed_keeper_left_is_gone_before_the_end_is_told(world: RayWorld, tmp_path: Path) -> None:
    async with await watch(world) as master:
        family = tmp_path / "family"
        await master.run("program-0", command=(sys.executable, "-c", FAMILY, str(family)))
        child, keeper = map(int, family.read_text().split())
        os.kill(keeper, signal.SIGKILL)
        await master.get(WorkerExited, "program-0")
        assert state_of(child) in "ZX"
        assert not world.processes()


async def test_a_job_without_a_master_leaves_nothing_on_ray(world: RayWorld, connection: RayCluster) -> None:
    world.job = JOB.model_copy(update={"lease_seconds": 4.0})
    async with await watch(world) as master:
        for worker in ("program-0", "program-1"):
            await master.backend.allocate(bundle("program-0", "program-1"), ())
            await master.backend.create(master.order(worker, bundle="program-0"))
            await master.get(WorkerReady, worker)
        await master.backend.close(end=False)
    await until(lambda: not connection.actors(world.key), "the end of the actors")
    await until(lambda: not connection.groups(world.key), "the end of the placement group")


async def test_the_next_master_places_anew_what_the_keepers_have_left(world: RayWorld, connection: RayCluster) -> None:
    """Without a master they end, and the last one removes the placement group."""
    world.job = JOB.model_copy(update={"lease_seconds": 2.0})
    async with await watch(world) as master:
        await master.run("program-0")
        handles = master.backend.handles()
        await master.backend.close(end=False)
    await until(lambda: not connection.groups(world.key), "the end of the placement group")
    async with await watch(world, epoch=2) as master:
        assert await master.backend.adopt(handles) == []
        await master.backend.create(master.order("program-0", 2))
        await master.get(WorkerReady, "program-0", 2)
        assert master.backend.handles() == handles
        await master.backend.release("program-0")
        assert not connection.groups(world.key)
        assert master.backend.handles() == {"ray_address": connection.address}


async def test_the_workers_of_a_lost_node_are_placed_elsewhere(
    world: RayWorld, connection: RayCluster, ray_cluster: Any
) -> None:
    world.job = JOB.model_copy(update={"lease_seconds": 4.0})
    known = {node.name for node in connection.nodes()}
    extra = ray_cluster.add_node(**NODE)
    async with await watch(world) as master:
        await master.backend.allocate(bundle("program-0"), sorted(known))
        await master.backend.create(master.order("program-0"))
        await master.get(WorkerReady, "program-0")
        lost = (await master.get(Created, "program-0")).node
        assert lost not in known
        await asyncio.to_thread(ray_cluster.remove_node, extra)
        told = await master.get(NodeLost)
        assert told.node == lost
        assert not world.processes()
        assert [node.alive for node in await master.backend.nodes() if node.name == lost] == [False]
        await master.run("program-0", 2)
        assert (await master.get(Created, "program-0", 2)).node in known


async def test_a_node_that_does_not_answer_is_left_once_nothing_there_can_run(
    world: RayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its cable were pulled, and Ray did not know yet."""
    world.job = JOB.model_copy(update={"lease_seconds": 2.0})

    def hang(*_: Any) -> None:
        time.sleep(10.0)
        raise BackendError("no answer")

    async with await watch(world) as master:
        await master.run("program-0")
        first = (await master.get(Created, "program-0")).node
        monkeypatch.setattr(RayCluster, "clear", hang)
        world.backends[0].links["program-0"].lose("its cable is pulled")
        await master.get(WorkerExited, "program-0")
        assert not world.processes()
        monkeypatch.undo()
        await master.run("program-0", 2)
        assert (await master.get(Created, "program-0", 2)).node != first


WORK = """
import pathlib, sys, time
directory = pathlib.Path(sys.argv[1])
(directory / "begun").touch()
while not (directory / "go").exists():
    time.sleep(0.02)
"""


def test_a_job_on_ray_survives_its_master_which_ray_starts_again(tmp_path: Path, connection: RayCluster) -> None:
    work = RoleSpec(
        name="work",
        command=(sys.executable, "-c", WORK, str(tmp_path)),
        task=True,
        ready_timeout_seconds=None,
        silence_timeout_seconds=None,
        resources=Resources(cpu=1),
    )
    spec = JobSpec(name="small", roles=(work,), lease_seconds=60.0)
    job = submit(spec, tmp_path / "job", "ray", options={"address": connection.address})
    key = job_key(spec.name, tmp_path / "job")
    try:
        wait_until((tmp_path / "begun").exists, "the worker", details=lambda: job.logs("master"))
        master = read_master(tmp_path / "job")
        assert master is not None
        assert "ray::MasterActor" in Path(f"/proc/{master.pid}/cmdline").read_text()
        os.kill(master.pid, signal.SIGKILL)
        wait_until(lambda: _epoch(job) > 1, "the next master", details=lambda: job.logs("master"))
        (tmp_path / "go").touch()
        assert job.wait(120).code == 0, job.logs("master")
        assert [one.incarnation for one in job.status().workers] == [1]
        assert not connection.groups(key)
        wait_until(lambda: not connection.actors(key), "the end of the actors")
    finally:
        if job.outcome() is None:
            job.stop()
            wait_until(lambda: job.outcome() is not None, "the job's end")


def _epoch(job: JobHandle) -> int:
    try:
        return job.status().epoch
    except NoMaster:
        return 0


def state_of(pid: int) -> str:
    """A process's state; X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def mapped_by(pid: int) -> str:
    """What a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text()
